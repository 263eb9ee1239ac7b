"""The corpus behind the tools: the default collection of a REST service."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

_COLLECTION = "/v1/collections/default"
Found = dict[str, Any]  # what a tool gives, as JSON values


class ServedCorpus:
    """The documents that a service has, as the tools give them. Raises `RagKVError` for what cannot
    be done.
    """

    def __init__(
        self, send: Callable[[str, str, Mapping[str, Any] | None], Awaitable[Mapping[str, Any]]]
    ) -> None:
        """`send` takes method, path and JSON body of a request, and gives the JSON of its
        response.
        """
        self._send = send

    async def search(self, query: str, k: int) -> Found:
        """The best `k` passages, the best first."""
        found = await self._send("POST", f"{_COLLECTION}/search", {"query": query, "k": k})
        return {"sources": _numbered(found["hits"])}

    async def ask(self, question: str, k: int, max_tokens: int) -> Found:
        """The answer over `k` passages, which are in prompt order."""
        found = await self._send(
            "POST", "/v1/ask", {"question": question, "k": k, "max_tokens": max_tokens}
        )
        sources = _numbered(found["sources"])
        reuse = found["reuse"]
        return {
            "answer": found["answer"],
            "sources": sources,
            "citations": [
                {
                    **quote,
                    "text": sources[quote["number"] - 1]["text"][quote["start"] : quote["end"]],
                }
                for quote in (
                    {name: one[name] for name in ("number", "start", "end")}
                    for one in found["citations"]
                )
            ],
            "finish_reason": found["finish_reason"],
            "prompt_tokens": reuse["tokens"],
            "reused_tokens": reuse["exact"] + reuse["fused"],
            "notes": reuse["notes"],
        }

    async def documents(self, after: int, limit: int) -> Found:
        """The documents behind the place `after`."""
        found = await self._send(
            "GET", f"{_COLLECTION}/documents?limit={limit}&after={after}", None
        )
        page = [
            {"id": one["id"], "source": one["source"], "passages": one["chunks"]}
            for one in found["data"]
        ]
        return {"documents": page, "next": None if found["next"] is None else int(found["next"])}

    async def add(self, document_id: str, text: str, title: str) -> str:
        """Store a document; returns "added", "changed" or "unchanged"."""
        # a tenant may have none yet
        await self._send("POST", "/v1/collections", {"name": "default"})
        document = {"id": document_id, "text": text, **({"title": title} if title else {})}
        found = await self._send("POST", f"{_COLLECTION}/documents", {"documents": [document]})
        return "added" if found["added"] else "changed" if found["changed"] else "unchanged"


def _numbered(found: Iterable[Mapping[str, Any]]) -> list[Found]:
    """Passages with the numbers by which citations name them, from 1 on."""
    names = ("document_id", "source", "text", "score")
    return [
        {"number": number, **{name: one[name] for name in names}}
        for number, one in enumerate(found, 1)
    ]
