"""Retrieval-augmented generation: a question is answered from a corpus.

Each passage of the index is one chunk of the engine; `corpus.py` keeps both in step. This module
knows no command line and no network protocol.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, Unpack, get_args

from ragkv.config import CHUNK_TOKENS, EngineConfig
from ragkv.conversations import Session
from ragkv.engine import Engine
from ragkv.errors import InputError
from ragkv.home import KnownHome
from ragkv.prompt import AnswerOptions
from ragkv.prompt.history import PartKind
from ragkv.retrieval import (
    Embedder,
    Hit,
    Index,
    Passage,
    Splitter,
    Where,
    resolve_embedder,
)
from ragkv.runtime import Check, no_check
from ragkv.runtime.arguments import check_kind, check_words
from ragkv.types import Answer, Chunk, TokenEvent, brief

from .corpus import RagCorpus

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


class Rag(RagCorpus):
    """One corpus and the engine that answers from it: `Rag.open(home)`, or an engine and an index
    of your own.
    """

    def __init__(
        self,
        engine: Engine,
        directory: str | Path | None,
        *,
        chunk_tokens: int | None = None,
        embedder: Embedder | None = None,
        home: KnownHome | None = None,
        writes: bool | None = None,
    ) -> None:
        """Open or create the index at `directory` (`None`: in memory). Without an embedder, only
        BM25 is used.

        Chunks have at most `chunk_tokens` tokens; `None`: as `splitter_of` says. The home keeps
        what documents are ingested with. Documents can be changed if it `writes`; `None`: unless
        the store is read-only.
        """
        check_kind("engine", engine, Engine)
        self.splitter = splitter_of(engine, home, chunk_tokens)

        @functools.cache
        def keep() -> None:
            if home is not None:
                home.keep(
                    engine.config, self.splitter.tokens, embedder.folder if embedder else None
                )

        self.engine = engine
        self._closing = ExitStack()
        read_only = engine.config.store.read_only if writes is None else not writes
        self.index = Index(
            directory,
            self.splitter,
            embedder,
            read_only=read_only,
            before_write=keep,
            owner=engine.scheduler.owner,
        )

    @classmethod
    def open(
        cls,
        home: str | Path,
        model: str = "",
        config: EngineConfig | None = None,
        *,
        engine: Engine | None = None,
        chunk_tokens: int | None = None,
        embedder: Embedder | None = None,
        writes: bool | None = None,
    ) -> Self:
        """The corpus of a home, as the commands open it, with an engine that is closed with it,
        unless one is given.

        `model`, `chunk_tokens` and `embedder` are by default those the home was made with; of a new
        home smollm2, what `splitter_of` says, and MiniLM, if it is installed. `config` is by
        default `EngineConfig.gather(None)`. Raises `ConfigError` for another model than the home's,
        and what `Engine.from_pretrained` raises.
        """
        known = KnownHome.at(home, model)
        with ExitStack() as stack:
            if engine is None:
                config = known.config(config or EngineConfig.gather(None))
                engine = stack.enter_context(Engine.from_pretrained(known.model, config))
            embedder = embedder or resolve_embedder(
                known.kept.get("embedder"), device=engine.config.device
            )
            rag = cls(
                engine,
                known.path / "index",
                chunk_tokens=chunk_tokens,
                embedder=embedder,
                home=known,
                writes=writes,
            )
            rag._closing = stack.pop_all()
        return rag

    def retrieve(
        self,
        question: str,
        k: int = DEFAULT_K,
        *,
        retriever: str | None = None,
        where: Where | None = None,
        order: Order | None = None,
        before: str = "",
        check: Check = no_check,
    ) -> tuple[Hit, ...]:
        """The best `k` passages, in the order of a prompt. What `check` raises between two steps
        ends the search.

        `before` is the question before in a conversation: a follow-up is searched with it.
        """
        query = search_text(question, before)
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
        hits: Iterable[Hit],
        session: Session | None = None,
        **how: Unpack[AnswerOptions],
    ) -> Iterator[TokenEvent | Answer]:
        """Token events, then the answer, from passages that were retrieved before. `how` is for
        `Engine.stream`.
        """
        return self.engine.stream(
            question, [self.chunk(hit.passage) for hit in hits], session, **how
        )

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
        """Retrieve passages and answer from them. `how` is for `Engine.answer`.

        Raises `InputError` for an empty question.
        """
        check_words("question", question)
        before = question_before(session, self.engine.tokenizer)
        hits = self.retrieve(
            question, k, retriever=retriever, where=where, order=order, before=before
        )
        answer = self.engine.answer(
            question, [self.chunk(hit.passage) for hit in hits], session, **how
        )
        return RagAnswer(answer, hits)

    def chunk(self, passage: Passage) -> Chunk:
        """The engine's chunk of a passage."""
        place = {"source": passage.source, "document": passage.document_id, "span": passage.span}
        return self.engine.chunk(passage.text, {**passage.metadata, **place})

    def close(self) -> None:
        """Close the index, and the engine that `open` made. May be called twice."""
        self.index.close()
        self._closing.close()


def splitter_of(
    engine: Engine, home: KnownHome | None = None, chunk_tokens: int | None = None
) -> Splitter:
    """Splits documents into chunks of `chunk_tokens`. If it is `None`, the home's size is taken, or
    `CHUNK_TOKENS` in a new home.
    """
    known = home.made_with.get("chunk_tokens") if home is not None else None
    tokens = chunk_tokens or known or CHUNK_TOKENS
    return Splitter(engine.model.count_tokens, tokens, tokenizer_id=engine.model.identity.tokenizer)


def search_text(question: str, before: str) -> str:
    """The query for a question; `before` is the question before it in the conversation, or "".

    "And when did he die?" finds by the question before it. On mtRAG's follow-ups a passage of the
    answer is among the first six for .945 with the question before, and for .925 without
    (`benchmarks.retrieval`). A rewriting by the model would delay the first token.
    """
    return f"{before.strip()[-BEFORE_CHARS:]}\n{question}" if before.strip() else question


def question_before(session: Session | None, tokenizer: Any) -> str:
    """The last question of a conversation; "" if it has none."""
    if session is None or tokenizer is None:
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
