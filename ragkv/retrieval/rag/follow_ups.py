"""What a follow-up is searched with: "And when did he die?" finds by the question before it.

On mtRAG's 338 follow-ups recall at 6 is .86 with the question before, .82 with the follow-up alone
and .80 with all earlier questions. A rewriting by the model would delay the first token.
"""

from typing import Any

from ragkv.conversations import Session
from ragkv.prompt.history import PartKind

# Of the question before only so much is searched for: a client may have put documents before it.
BEFORE_CHARS = 500


def search_text(question: str, before: str) -> str:
    """The query for a question; `before` is the question before it in the conversation, or ""."""
    return f"{before.strip()[-BEFORE_CHARS:]}\n{question}" if before.strip() else question


def question_before(session: Session | None, tokenizer: Any) -> str:
    """The last question of a conversation; "" if it has none."""
    if session is None or tokenizer is None:
        return ""
    history = session.past.history
    ids = history.token_ids
    end = len(ids)
    for part in reversed(history.parts):
        if part.kind is PartKind.QUESTION:
            # the part ends with what the template puts after a question
            asked = ids[end - len(part) : end - len(session.owner.runs.after_question)]
            return str(tokenizer.decode(asked, skip_special_tokens=True))
        end -= len(part)
    return ""
