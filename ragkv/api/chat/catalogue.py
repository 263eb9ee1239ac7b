"""The texts that one engine knows as chunks: ingested texts, passages of collections, and texts of requests.

Ingested texts and passages stay until they are forgotten, and are found in prompts in other writings too, see
`passage_matcher.py`. Of the texts that came with requests, the latest are remembered: their KV is stored after a cache
miss, so finding them again saves work.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ragkv.engine import Engine
from ragkv.scheduling.encoding import WarmReport
from ragkv.types import Chunk

from .forms import Forms
from .passage_matcher import MAX_FOUND, Found, PassageMatcher, joined, key_of
from .text_matcher import TextMatch, TextMatcher

MAX_REQUEST_TEXTS = 10_000  # texts from requests that are remembered


@dataclass(frozen=True, slots=True)
class DialogueDocument:
    """A document that came with a request or was ingested."""

    text: str
    metadata: Mapping[str, Any]


class ChunkCatalogue:
    """Chunks by their text. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._matcher = TextMatcher()
        self.passages = PassageMatcher()
        self._forms = Forms(engine)
        self._by_key: dict[str, str] = {}  # ingested texts by their letters and digits
        self._lock = threading.Lock()
        self._ingested: dict[str, Mapping[str, Any]] = {}  # text -> metadata
        self._from_requests: OrderedDict[str, Mapping[str, Any]] = OrderedDict()  # text -> metadata, oldest first
        self._chunks: dict[str, Chunk] = {}  # known texts that are tokenized already

    def ingest(self, documents: Iterable[DialogueDocument], encode: bool = True) -> WarmReport:
        """Register `documents` and, with `encode`, compute and store their KV. Returns when it is durable."""
        by_text = {document.text: document for document in documents if document.text}
        chunks = {text: self._engine.chunk(text) for text in by_text}  # raises before an invalid text is registered
        report = self._engine.warm(list(chunks.values())) if encode else WarmReport(0, 0, 0)
        with self._lock:
            self._chunks |= chunks
        self.register(by_text.values())
        return report

    def register(self, documents: Iterable[DialogueDocument]) -> None:
        """Know `documents` until they are forgotten. Their KV is stored already, or after the first cache miss."""
        metadata = {document.text: document.metadata for document in documents if document.text}
        with self._lock:
            self._ingested |= metadata
            for text in metadata:
                self._from_requests.pop(text, None)
        self._matcher.add(metadata)
        self.passages.add(metadata)
        with self._lock:
            self._by_key |= {key_of(text): text for text in metadata}

    @property
    def knows_texts(self) -> bool:
        """Whether any text was ingested or registered, or is a passage of a collection."""
        return bool(self._ingested) or self.passages.chars > 0

    def remember(self, documents: Iterable[DialogueDocument]) -> None:
        """Remember documents that came with a request, and forget the oldest beyond `MAX_REQUEST_TEXTS`."""
        with self._lock:
            new = {one.text: one.metadata for one in documents if one.text and one.text not in self._ingested}
            for text, metadata in new.items():
                self._from_requests[text] = metadata
                self._from_requests.move_to_end(text)
            excess = len(self._from_requests) - MAX_REQUEST_TEXTS
            dropped = [self._from_requests.popitem(last=False)[0] for _ in range(excess)]
            for text in dropped:
                self._chunks.pop(text, None)
        self._matcher.add(new)
        self._matcher.discard(dropped)

    def forget(self, texts: Iterable[str]) -> int:
        """Forget `texts` and delete their KV from every tier. Returns how many of them had KV stored."""
        dropped = [text for text in dict.fromkeys(texts) if text]
        keys = [key_of(text) for text in dropped]
        self._matcher.discard(dropped)
        self.passages.discard(keys)
        self._forms.delete()
        with self._lock:
            for key in keys:
                self._by_key.pop(key, None)
            for text in dropped:
                for known in (self._ingested, self._from_requests, self._chunks):
                    known.pop(text, None)
        return self._engine.delete([self._engine.chunk(text) for text in dropped]) if dropped else 0

    def forget_request_texts(self) -> None:
        """Forget the texts that came with requests. Ingested texts stay."""
        with self._lock:
            dropped, self._from_requests = list(self._from_requests), OrderedDict()
            for text in dropped:
                self._chunks.pop(text, None)
        self._matcher.discard(dropped)

    def find(self, prompt: str) -> list[TextMatch]:
        """The known texts in `prompt`, in order: word for word, then passages in other writings between them."""
        exact = [Found(match.start, match.stop, "", True) for match in self._matcher.find(prompt)[:MAX_FOUND]]
        found = joined(exact, self.passages.find(prompt))[:MAX_FOUND]
        return [
            TextMatch(one.start, one.stop, prompt[one.start : one.stop], one.key or None, one.word_for_word)
            for one in found
        ]

    def encode_ingested(self, *, wait: bool) -> None:
        """Compute the KV of all ingested and registered texts that is not stored: now, or between requests."""
        with self._lock:
            texts = list(self._ingested)
        chunks = [self.chunk(text) for text in texts]
        if wait:
            self._engine.warm(chunks)
        else:
            self._engine.entries.warm_soon(chunks)

    def form(self, text: str, token_ids: tuple[int, ...], key: str | None, *, is_passage: bool) -> Chunk:
        """The chunk of a prompt's own text, in which the passage `key` was found.

        `is_passage`: it is exactly the chunk that the collection has, so its KV is not deleted with other forms.
        """
        if not is_passage:
            self._forms.add(token_ids)
        with self._lock:
            known = self._by_key.get(key or key_of(text), "")
            metadata = self._ingested.get(known, {})
        return Chunk(token_ids, text, dict(metadata))

    def delete_forms(self) -> None:
        """Delete the KV of the forms in which passages stood in prompts."""
        self._forms.delete()

    def chunk(self, text: str, metadata: Mapping[str, Any] | None = None) -> Chunk:
        """The chunk of `text`, with the token ids it was ingested with. `metadata` defaults to the known metadata."""
        with self._lock:
            chunk = self._chunks.get(text)
            known = self._ingested.get(text, self._from_requests.get(text, {}))
        if chunk is None:
            chunk = self._engine.chunk(text)
            with self._lock:
                if text in self._ingested or text in self._from_requests:
                    self._chunks[text] = chunk
        return Chunk(chunk.token_ids, chunk.text, dict(known if metadata is None else metadata))
