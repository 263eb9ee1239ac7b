"""The corpus behind the tools: a home that this process opens, or the REST service that has it.

Both give the values that the tools return, and raise `RagKVError` for what cannot be done. Loads no torch at import.
"""

import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from ragkv.runtime import run_in_thread

if TYPE_CHECKING:
    from ragkv.retrieval import Hit
    from ragkv.retrieval.rag import Rag

_COLLECTION = "/v1/collections/default"
Found = dict[str, Any]  # what a tool gives, as JSON values


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

    async def search(self, query: str, k: int) -> Found:
        """The best `k` passages, the best first."""
        hits = await run_in_thread(lambda _: self._rag.index.search(query, k))
        return {"sources": _numbered(map(_source, hits))}

    async def ask(self, question: str, k: int, max_tokens: int) -> Found:
        """The answer over `k` passages, which are in prompt order. It ends early if the task is cancelled."""
        answered = await run_in_thread(
            lambda cancel: self._rag.ask(question, k, max_new_tokens=max_tokens, cancel=cancel)
        )
        answer = answered.answer
        quotes = [(one.chunk + 1, one.start, one.end) for one in answer.citations]
        reuse = {name: getattr(answer.reuse, name) for name in ("tokens", "exact", "fused", "notes")}
        return _answer(answer.text, map(_source, answered.hits), quotes, answer.finish_reason, reuse)

    async def documents(self, after: int, limit: int) -> Found:
        """The documents behind the place `after`."""
        found = await run_in_thread(lambda _: self._rag.index.document_page(after, limit + 1))
        page = [{"id": one.id, "source": one.source, "passages": one.passages} for one in found[:limit]]
        return {"documents": page, "next": found[limit - 1].position if len(found) > limit else None}

    async def add(self, document_id: str, text: str, title: str) -> str:
        """Store a document; returns "added", "changed" or "unchanged"."""
        return await run_in_thread(lambda _: self._add(document_id, text, title))

    def _add(self, document_id: str, text: str, title: str) -> str:
        from ragkv.retrieval import Document

        rag = self._rag
        metadata = {"title": title} if title else {}
        with self._lock:
            report = rag.ingest(Document(document_id, text, metadata=metadata)).index
        return "added" if report.added else "changed" if report.changed else "unchanged"


class ServedCorpus:
    """The default collection of a REST service; the methods are those of `HomeCorpus`.

    `send` takes method, path and JSON body of a request, and gives the JSON of its response.
    """

    def __init__(self, send: Callable[[str, str, Mapping[str, Any] | None], Awaitable[Mapping[str, Any]]]) -> None:
        self._send = send

    async def search(self, query: str, k: int) -> Found:
        found = await self._send("POST", f"{_COLLECTION}/search", {"query": query, "k": k})
        return {"sources": _numbered(found["hits"])}

    async def ask(self, question: str, k: int, max_tokens: int) -> Found:
        found = await self._send("POST", "/v1/ask", {"question": question, "k": k, "max_tokens": max_tokens})
        quotes = [(one["number"], one["start"], one["end"]) for one in found["citations"]]
        return _answer(found["answer"], found["sources"], quotes, found["finish_reason"], found["reuse"])

    async def documents(self, after: int, limit: int) -> Found:
        found = await self._send("GET", f"{_COLLECTION}/documents?limit={limit}&after={after}", None)
        page = [{"id": one["id"], "source": one["source"], "passages": one["chunks"]} for one in found["data"]]
        return {"documents": page, "next": None if found["next"] is None else int(found["next"])}

    async def add(self, document_id: str, text: str, title: str) -> str:
        await self._send("POST", "/v1/collections", {"name": "default"})  # a tenant may have none yet
        document = {"id": document_id, "text": text, **({"title": title} if title else {})}
        found = await self._send("POST", f"{_COLLECTION}/documents", {"documents": [document]})
        return "added" if found["added"] else "changed" if found["changed"] else "unchanged"


def _source(hit: "Hit") -> Found:
    """A passage in the form that the service gives."""
    passage = hit.passage
    own = {"document_id": passage.document_id, "source": passage.source, "text": passage.text}
    return {**own, "score": float(hit.score)}


def _numbered(found: Iterable[Mapping[str, Any]]) -> list[Found]:
    """Passages with the numbers by which citations name them, from 1 on."""
    names = ("document_id", "source", "text", "score")
    return [{"number": number, **{name: one[name] for name in names}} for number, one in enumerate(found, 1)]


def _answer(
    text: str,
    found: Iterable[Mapping[str, Any]],
    quotes: Iterable[tuple[int, int, int]],  # number of the source, start, end
    finish_reason: str,
    reuse: Mapping[str, Any],
) -> Found:
    """What `ask` gives."""
    sources = _numbered(found)
    return {
        "answer": text,
        "sources": sources,
        "citations": [
            {"number": number, "text": sources[number - 1]["text"][start:end], "start": start, "end": end}
            for number, start, end in quotes
        ],
        "finish_reason": finish_reason,
        "prompt_tokens": reuse["tokens"],
        "reused_tokens": reuse["exact"] + reuse["fused"],
        "notes": list(reuse["notes"]),
    }
