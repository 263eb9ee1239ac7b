"""Retrieval-augmented generation: answers a question from a corpus.

Each passage of the index is one chunk of the engine; `corpus.py` keeps both in step. This module
knows no command line and no network protocol.
"""

import math
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal, Unpack, cast, get_args

from ragkv.engine import Engine
from ragkv.errors import InputError
from ragkv.prompt import AnswerOptions, Request, check_names
from ragkv.retrieval import Hit, Index, Passage, Where
from ragkv.runtime import Check, Closing, no_check
from ragkv.runtime.outside import check_kind, check_words
from ragkv.sessions import Session
from ragkv.types import Answer, Chunk, TokenEvent, brief

from .corpus import Corpus
from .follow_ups import follow_up, question_before

Order = Literal["best-last", "score", "document"]
# How many chunks a question gets, as in the evaluation of the CacheBlend paper.
DEFAULT_K = 6


class RagOptions(AnswerOptions, total=False):
    """Options of `Rag.ask` and `Rag.stream`: those of the search, then those of the answer."""

    retriever: str | None
    where: Where | None
    order: Order | None


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
        _check_order(order)
        query = follow_up(question, before) if before else question
        hits = self.index.search(query, k, retriever=retriever, where=where, check=check)
        return self.in_order(hits, order)

    def in_order(self, hits: Sequence[Hit], order: str | None = None) -> tuple[Hit, ...]:
        """Hits, the best first, in the order of a prompt: the best last or first ("score"), or as
        in the corpus.

        `None` is best last, next to the question (docs/research/selection.md). Raises `InputError`
        for an unknown order.
        """
        _check_order(order)
        if order in (None, "best-last"):
            hits = hits[::-1]
        elif order == "document":
            positions = self.index.contents.positions({hit.passage.document_id for hit in hits})
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
        session: Session | None = None,
        **options: Unpack[RagOptions],
    ) -> Generator[TokenEvent | RagAnswer, None, None]:
        """Retrieve passages, then token events as they come, and the answer. Raises `InputError`
        for an empty question, and what `Engine.stream` raises. Close a stream that is not read to
        its end.
        """
        request, hits = self._searched(question, k, session, options)
        with closing(self.engine.events(request, session)) as events:
            for event in events:
                if isinstance(event, TokenEvent):
                    yield event
                elif isinstance(event, Answer):
                    yield RagAnswer(event, hits)

    def ask(
        self,
        question: str,
        k: int = DEFAULT_K,
        *,
        session: Session | None = None,
        **options: Unpack[RagOptions],
    ) -> RagAnswer:
        """The answer of `stream`, once missed chunks are stored: see `Engine.answer`."""
        request, hits = self._searched(question, k, session, options)
        return RagAnswer(self.engine.answer_to(request, session), hits)

    def _searched(
        self, question: str, k: int, session: Session | None, options: RagOptions
    ) -> tuple[Request, tuple[Hit, ...]]:
        """The request for a question, and the passages that are its chunks.

        The request is made first: what it would refuse is refused before the search, and the search
        takes its time from the request's deadline.
        """
        check_words("question", question)
        check_kind("k", k, int)
        check_kind("session", session, Session, type(None))
        check_names(options, RagOptions)
        retriever = options.pop("retriever", None)
        where = options.pop("where", None)
        order = options.pop("order", None)
        request = self.engine.request(question, **cast("AnswerOptions", options))
        with self.engine.parts.scheduler.request():
            if session is not None:  # another replica may have added the question before this one
                self.engine.sessions.check_usable(session)
                session.bring_up_to_date()
            hits = self.retrieve(
                question,
                k,
                retriever=retriever,
                where=where,
                order=order,
                before=session,
                check=request.claim.check,
            )
        chunks = tuple(self.chunks_of(hits))
        # the search counts for the first token's time, but not as waiting for the engine
        return replace(request, pieces=chunks, asked_after_s=request.claim.elapsed_s()), hits

    def chunks_of(self, hits: Sequence[Hit]) -> list[Chunk]:
        """The engine's chunks of hits."""
        return [self.chunk(hit.passage) for hit in hits]

    def chunk(self, passage: Passage) -> Chunk:
        """The engine's chunk of a passage."""
        place = {"source": passage.source, "document": passage.document_id, "span": passage.span}
        return self.engine.chunk(passage.text, {**passage.metadata, **place})


def _check_order(order: str | None) -> None:
    if order is not None and order not in get_args(Order):
        raise InputError(f"Unknown order {order!r}. Known: {', '.join(get_args(Order))}.")
