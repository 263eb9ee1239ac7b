"""The corpus behind the tools of `ragkv mcp`: the home itself, or the server that has it. Loads no torch at import."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from ragkv.errors import CancelledError, InputError, RagKVError
from ragkv.types import Answer

from .options import EngineOptions
from .output import print_note
from .running_server import Refused, hits_of, send, served_answer, server_of

if TYPE_CHECKING:
    from ragkv.retrieval import Hit
    from ragkv.retrieval.rag import Rag
    from ragkv.runtime.server_file import ServerAddress

REQUEST_S = 600.0
_COLLECTION = "/v1/collections/default"


@dataclass(frozen=True, slots=True)
class Listed:
    """A stored document."""

    id: str
    source: str
    passages: int
    characters: int


@dataclass(frozen=True, slots=True)
class Page:
    """A page of documents."""

    documents: tuple[Listed, ...]
    next: int | None  # where the next page begins; None: this is the last one


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer and the passages of its prompt, in prompt order."""

    answer: Answer
    hits: "tuple[Hit, ...]"


class Corpus(Protocol):
    """What the tools do. Every method raises `RagKVError` for what cannot be done."""

    def search(self, query: str, k: int) -> "tuple[Hit, ...]":
        """The best `k` passages, the best first."""

    def ask(self, question: str, k: int, max_tokens: int, cancel: threading.Event) -> Asked:
        """The answer over `k` passages. It ends early once `cancel` is set."""

    def documents(self, after: int, limit: int) -> Page:
        """The documents behind the place `after`."""

    def add(self, document_id: str, text: str, title: str) -> str:
        """Store a document; returns "added", "changed" or "unchanged"."""


@contextmanager
def open_corpus(options: EngineOptions) -> Iterator[Corpus]:
    """The corpus of a home, through its server if it has one that answers without a key."""
    address = server_of(options.home, options.model)
    if address is not None and (served := ServedCorpus(address)).answers():
        print_note(f"the server at {address.url} (pid {address.pid}), which has this home, answers.")
        yield served
        return
    with HomeCorpus(options) as corpus:
        yield corpus


class HomeCorpus:
    """The home, read by this process. The first tool that is called loads the model: clients wait for none before."""

    def __init__(self, options: EngineOptions) -> None:
        self._options, self._stack, self._lock = options, ExitStack(), threading.Lock()
        self._opened: Rag | None = None

    def __enter__(self) -> "HomeCorpus":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def _rag(self) -> "Rag":
        with self._lock:
            if self._opened is None:
                self._opened = self._stack.enter_context(self._options.rag(reads=True))
            return self._opened

    def search(self, query: str, k: int) -> "tuple[Hit, ...]":
        return self._rag.retrieve(query, k, order="score")

    def ask(self, question: str, k: int, max_tokens: int, cancel: threading.Event) -> Asked:
        answered = self._rag.ask(question, k, max_new_tokens=max_tokens, cancel=cancel)
        return Asked(answered.answer, answered.hits)

    def documents(self, after: int, limit: int) -> Page:
        found = self._rag.index.document_page(after, limit + 1)
        listed = tuple(Listed(one.id, one.source, one.passages, one.characters) for one in found[:limit])
        return Page(listed, found[limit - 1].position if len(found) > limit else None)

    def add(self, document_id: str, text: str, title: str) -> str:
        from ragkv.retrieval import Document

        rag = self._rag
        metadata = {"title": title} if title else {}
        with self._lock:
            report = rag.ingest(Document(document_id, text, metadata=metadata)).index
        return "added" if report.added else "changed" if report.changed else "unchanged"


class ServedCorpus:
    """The home through the server that has it."""

    def __init__(self, address: "ServerAddress") -> None:
        self._address = address

    def answers(self) -> bool:
        """Whether the server answers without a key; if not, a note says why."""
        try:
            self._send("GET", f"{_COLLECTION}/documents?limit=1")
        except RagKVError as error:
            print_note(f"the server at {self._address.url} is not asked: {error}")
            return False
        return True

    def search(self, query: str, k: int) -> "tuple[Hit, ...]":
        return hits_of(self._send("POST", f"{_COLLECTION}/search", {"query": query, "k": k})["hits"])

    def ask(self, question: str, k: int, max_tokens: int, cancel: threading.Event) -> Asked:
        if cancel.is_set():
            raise CancelledError("The request was cancelled.")
        answered = served_answer(
            self._send("POST", "/v1/ask", {"question": question, "k": k, "max_tokens": max_tokens})
        )
        return Asked(answered.answer, answered.hits)

    def documents(self, after: int, limit: int) -> Page:
        found = self._send("GET", f"{_COLLECTION}/documents?limit={limit}&after={after}")
        listed = tuple(Listed(one["id"], one["source"], one["chunks"], one["characters"]) for one in found["data"])
        return Page(listed, None if found["next"] is None else int(found["next"]))

    def add(self, document_id: str, text: str, title: str) -> str:
        body = {"text": text, **({"title": title} if title else {})}
        found = self._send("PUT", f"{_COLLECTION}/documents/{quote(document_id, safe='')}", body)
        return "added" if found["added"] else "changed" if found["changed"] else "unchanged"

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            return send(self._address, method, path, body, REQUEST_S)
        except Refused as error:
            raise InputError(str(error)) from error
        except (OSError, ValueError) as error:
            raise RagKVError(f"The server at {self._address.url} does not answer: {error}. Start it again.") from error


__all__ = ["Asked", "Corpus", "HomeCorpus", "Listed", "Page", "ServedCorpus", "open_corpus"]
