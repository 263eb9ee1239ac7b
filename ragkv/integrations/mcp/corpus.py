"""The corpus behind the tools: a home that this process opens, or the REST service that has it.

Both give the values that the tools return, and raise `RagKVError` for what cannot be done. Loads no torch at import.
"""

import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from pydantic import BaseModel, Field

from ragkv.runtime import run_in_thread

if TYPE_CHECKING:
    from ragkv.retrieval import Hit
    from ragkv.retrieval.rag import Rag

_COLLECTION = "/v1/collections/default"


class ToolSource(BaseModel):
    """A passage."""

    number: int = Field(description="By which citations name it, from 1 on.")
    document_id: str
    source: str = Field(description="Where the document came from.")
    text: str
    score: float


class ToolSearch(BaseModel):
    """The passages of a search, the best first."""

    sources: list[ToolSource]


class ToolQuote(BaseModel):
    """A place where a source contains the answer."""

    number: int = Field(description="Of the source.")
    text: str
    start: int = Field(description="Characters from the beginning of the source's text.")
    end: int


class ToolAnswer(BaseModel):
    """An answer, the passages that it was made from, and how much of the prompt was reused."""

    answer: str
    sources: list[ToolSource]
    citations: list[ToolQuote]
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int = Field(description="Of the prompt: exact and fused.")
    first_token_s: float
    notes: list[str]


class ToolDocument(BaseModel):
    """A stored document."""

    id: str
    source: str
    passages: int
    characters: int


class ToolDocuments(BaseModel):
    """A page of stored documents."""

    documents: list[ToolDocument]
    next: int | None = Field(description="`after` of the next page; null: there is none.")


class ToolCorpus(Protocol):
    """What the tools do."""

    async def search(self, query: str, k: int) -> ToolSearch:
        """The best `k` passages, the best first."""

    async def ask(self, question: str, k: int, max_tokens: int) -> ToolAnswer:
        """The answer over `k` passages, which are in prompt order. It ends early if the task is cancelled."""

    async def documents(self, after: int, limit: int) -> ToolDocuments:
        """The documents behind the place `after`."""

    async def add(self, document_id: str, text: str, title: str) -> str:
        """Store a document; returns "added", "changed" or "unchanged"."""


class HomeCorpus:
    """A home, read by this process. The first tool that is called opens it: clients wait for no model before."""

    def __init__(self, open_rag: Callable[[], "AbstractContextManager[Rag]"]) -> None:
        self._open_rag, self._stack, self._lock = open_rag, ExitStack(), threading.Lock()
        self._opened: Rag | None = None

    def __enter__(self) -> "HomeCorpus":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def _rag(self) -> "Rag":
        with self._lock:
            if self._opened is None:
                self._opened = self._stack.enter_context(self._open_rag())
            return self._opened

    async def search(self, query: str, k: int) -> ToolSearch:
        hits = await run_in_thread(lambda _: self._rag.retrieve(query, k, order="score"))
        return ToolSearch(sources=_sources(hits))

    async def ask(self, question: str, k: int, max_tokens: int) -> ToolAnswer:
        answered = await run_in_thread(
            lambda cancel: self._rag.ask(question, k, max_new_tokens=max_tokens, cancel=cancel)
        )
        answer, sources = answered.answer, _sources(answered.hits)
        return ToolAnswer(
            answer=answer.text,
            sources=sources,
            citations=[_quote(sources, one.chunk + 1, one.start, one.end) for one in answer.citations],
            finish_reason=answer.finish_reason,
            prompt_tokens=answer.reuse.tokens,
            reused_tokens=answer.reuse.exact + answer.reuse.fused,
            first_token_s=answer.timing.first_token_s,
            notes=list(answer.reuse.notes),
        )

    async def documents(self, after: int, limit: int) -> ToolDocuments:
        found = await run_in_thread(lambda _: self._rag.index.document_page(after, limit + 1))
        page = [
            ToolDocument(id=one.id, source=one.source, passages=one.passages, characters=one.characters)
            for one in found[:limit]
        ]
        return ToolDocuments(documents=page, next=found[limit - 1].position if len(found) > limit else None)

    async def add(self, document_id: str, text: str, title: str) -> str:
        return await run_in_thread(lambda _: self._add(document_id, text, title))

    def _add(self, document_id: str, text: str, title: str) -> str:
        from ragkv.retrieval import Document

        rag = self._rag
        metadata = {"title": title} if title else {}
        with self._lock:
            report = rag.ingest(Document(document_id, text, metadata=metadata)).index
        return "added" if report.added else "changed" if report.changed else "unchanged"


class ServedCorpus:
    """The default collection of a REST service.

    `send` takes method, path and JSON body of a request, and gives the JSON of its response.
    """

    def __init__(self, send: Callable[[str, str, Mapping[str, Any] | None], Awaitable[Mapping[str, Any]]]) -> None:
        self._send = send

    async def search(self, query: str, k: int) -> ToolSearch:
        found = await self._send("POST", f"{_COLLECTION}/search", {"query": query, "k": k})
        return ToolSearch(sources=_numbered(found["hits"]))

    async def ask(self, question: str, k: int, max_tokens: int) -> ToolAnswer:
        found = await self._send("POST", "/v1/ask", {"question": question, "k": k, "max_tokens": max_tokens})
        sources, reuse = _numbered(found["sources"]), found["reuse"]
        return ToolAnswer(
            answer=found["answer"],
            sources=sources,
            citations=[_quote(sources, one["number"], one["start"], one["end"]) for one in found["citations"]],
            finish_reason=found["finish_reason"],
            prompt_tokens=reuse["tokens"],
            reused_tokens=reuse["exact"] + reuse["fused"],
            first_token_s=found["timing"]["first_token_s"],
            notes=reuse["notes"],
        )

    async def documents(self, after: int, limit: int) -> ToolDocuments:
        found = await self._send("GET", f"{_COLLECTION}/documents?limit={limit}&after={after}", None)
        page = [
            ToolDocument(id=one["id"], source=one["source"], passages=one["chunks"], characters=one["characters"])
            for one in found["data"]
        ]
        return ToolDocuments(documents=page, next=None if found["next"] is None else int(found["next"]))

    async def add(self, document_id: str, text: str, title: str) -> str:
        await self._send("POST", "/v1/collections", {"name": "default"})  # a tenant may have none yet
        body = {"text": text, **({"title": title} if title else {})}
        found = await self._send("PUT", f"{_COLLECTION}/documents/{quote(document_id, safe='')}", body)
        return "added" if found["added"] else "changed" if found["changed"] else "unchanged"


def _sources(hits: "Iterable[Hit]") -> list[ToolSource]:
    passages = ((hit.passage, float(hit.score)) for hit in hits)
    return [
        ToolSource(number=number, document_id=one.document_id, source=one.source, text=one.text, score=score)
        for number, (one, score) in enumerate(passages, 1)
    ]


def _numbered(found: Iterable[Mapping[str, Any]]) -> list[ToolSource]:
    names = ("document_id", "source", "text", "score")
    return [ToolSource(number=number, **{name: one[name] for name in names}) for number, one in enumerate(found, 1)]


def _quote(sources: list[ToolSource], number: int, start: int, end: int) -> ToolQuote:
    return ToolQuote(number=number, text=sources[number - 1].text[start:end], start=start, end=end)
