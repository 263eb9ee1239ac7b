"""The search query of a question that follows another one."""

from typing import Any

from ragkv.prompt.history import PartKind
from ragkv.sessions import Session

# Of the question before only so much is searched for: a client may have put documents before it.
BEFORE_CHARS = 500


def follow_up(question: str, before: str) -> str:
    """The query for a question; `before` is the question before it in the conversation, or "".

    "And when did he die?" finds by the question before it. On mtRAG's follow-ups a passage of the
    answer is among the first six for .945 with the question before, and for .925 without
    (`benchmarks.retrieval`). A rewriting by the model would delay the first token.
    """
    return f"{before.strip()[-BEFORE_CHARS:]}\n{question}" if before.strip() else question


def question_before(session: Session, tokenizer: Any | None) -> str:
    """The last question of a conversation; "" if it has none."""
    if tokenizer is None:
        return ""
    history = session.history
    ids = history.token_ids
    end = len(ids)
    for part in reversed(history.parts):
        if part.kind is PartKind.QUESTION:
            asked = ids[end - len(part) : end]
            tail = session.sessions.runs.after_question  # not put after the question of a raw turn
            if tail and asked[-len(tail) :] == tail:
                asked = asked[: -len(tail)]
            return str(tokenizer.decode(asked, skip_special_tokens=True))
        end -= len(part)
    return ""
