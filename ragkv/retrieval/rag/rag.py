"""Retrieval-augmented generation: answers a question from a corpus.

Each passage of the index is one chunk of the engine; `corpus.py` keeps both in step. This module
knows no command line and no network protocol.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack, get_args

from ragkv.conversations import Session
from ragkv.engine import Engine
from ragkv.errors import InputError
from ragkv.prompt import AnswerOptions
from ragkv.prompt.history import PartKind
from ragkv.retrieval import Hit, Index, Passage, Where
from ragkv.runtime import Check, Closing, no_check
from ragkv.runtime.arguments import check_words
from ragkv.scheduling import Work
from ragkv.types import Answer, Chunk, TokenEvent, brief

from .corpus import Corpus

Order = Literal["best-last", "score", "document"]
# How many chunks a question gets, as in the evaluation of the CacheBlend paper.
DEFAULT_K = 6
# Of the question before only so much is searched for: a client may have put documents before it.
BEFORE_CHARS = 500


@dataclass(frozen=True, slots=True)
class RagAnswer:
    """An answer and the passages of its prompt, in prompt order."""

    answer: Answer
    hits: tuple[Hit, ...]
    __repr__ = brief


@dataclass(frozen=True, eq=False)
class Rag(Closing):
    """Answers from a corpus, which is closed with this: `Rag(Corpus.open(home))`."""

    corpus: Corpus

    @property
    def engine(self) -> Engine:
        """The engine of the corpus."""
        return self.corpus.engine

    @property
    def index(self) -> Index:
        """The index of the corpus."""
        return self.corpus.index

    def close(self) -> None:
        self.corpus.close()

    def retrieve(
        self,
        question: str,
        k: int = DEFAULT_K,
        *,
        retriever: str | None = None,
        where: Where | None = None,
        order: Order | None = None,
        before: Session | str | None = None,
        check: Check = no_check,
    ) -> tuple[Hit, ...]:
        """The best `k` passages, in the order of a prompt. What `check` raises between two steps
        ends the search.

        `before` is the conversation, or its last question: a follow-up is searched with that.
        """
        if isinstance(before, Session):
            before = question_before(before, self.engine.tokenizer)
        query = search_text(question, before or "")
        hits = self.index.search(query, k, retriever=retriever, where=where, check=check)
        return self.in_order(hits, order)

    def in_order(self, hits: Sequence[Hit], order: str | None = None) -> tuple[Hit, ...]:
        """Hits, the best first, in the order of a prompt: the best last or first ("score"), or as
        in the corpus.

        `None` is best last, next to the question (docs/research/selection.md). Raises `InputError` for an
        unknown order.
        """
        if order is None:
            order = "best-last"
        if order not in get_args(Order):
            raise InputError(f"Unknown order {order!r}. Known: {', '.join(get_args(Order))}.")
        if order == "best-last":
            hits = hits[::-1]
        elif order == "document":
            positions = self.index.positions({hit.passage.document_id for hit in hits})
            hits = sorted(
                hits,
                key=lambda hit: (
                    positions.get(hit.passage.document_id, math.inf),
                    hit.passage.span,
                ),
            )
        return tuple(hits)

    def stream(
        self,
        question: str,
        k: int = DEFAULT_K,
        *,
        retriever: str | None = None,
        where: Where | None = None,
        order: Order | None = None,
        session: Session | None = None,
        **how: Unpack[AnswerOptions],
    ) -> Iterator[TokenEvent | RagAnswer]:
        """Retrieve passages, then token events as they come, and the answer. `how` is for
        `Engine.stream`. Raises `InputError` for an empty question.
        """
        search = {"retriever": retriever, "where": where, "order": order, "before": session}
        hits = self._found(question, how, k, **search)
        for event in self.engine.stream(question, self.chunks_of(hits), session, **how):
            yield event if isinstance(event, TokenEvent) else RagAnswer(event, hits)

    def ask(
        self,
        question: str,
        k: int = DEFAULT_K,
        *,
        retriever: str | None = None,
        where: Where | None = None,
        order: Order | None = None,
        session: Session | None = None,
        **how: Unpack[AnswerOptions],
    ) -> RagAnswer:
        """The answer of `stream`, once missed chunks are stored: see `Engine.answer`."""
        search = {"retriever": retriever, "where": where, "order": order, "before": session}
        hits = self._found(question, how, k, **search)
        return RagAnswer(self.engine.answer(question, self.chunks_of(hits), session, **how), hits)

    def _found(self, question: str, how: AnswerOptions, k: int, **search: Any) -> tuple[Hit, ...]:
        """The passages for a question that is answered next: the search counts for its deadline."""
        check_words("question", question)
        work = Work("", how.get("deadline_s"), how.get("cancel"))
        hits = self.retrieve(question, k, check=work.check, **search)
        if how.get("deadline_s") is not None:
            how["deadline_s"] = work.remaining_s()
        return hits

    def chunks_of(self, hits: Sequence[Hit]) -> list[Chunk]:
        """The engine's chunks of hits."""
        return [self.chunk(hit.passage) for hit in hits]

    def chunk(self, passage: Passage) -> Chunk:
        """The engine's chunk of a passage."""
        place = {"source": passage.source, "document": passage.document_id, "span": passage.span}
        return self.engine.chunk(passage.text, {**passage.metadata, **place})


def search_text(question: str, before: str) -> str:
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
            tail = session.owner.runs.after_question  # not put after the question of a raw turn
            if tail and asked[-len(tail) :] == tail:
                asked = asked[: -len(tail)]
            return str(tokenizer.decode(asked, skip_special_tokens=True))
        end -= len(part)
    return ""
