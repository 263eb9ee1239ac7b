"""What one engine knows as chunks: texts that were ingested, and texts that were given with a call.

Ingested texts stay until they are deleted. Texts given with calls are remembered too, the latest of them: their KV is
stored when they are missed, so they are worth finding again.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ragkv.engine import Engine, WarmReport
from ragkv.types import Chunk

from .recognition import Found, Texts

GIVEN_KEPT = 10_000  # texts of calls that are remembered


@dataclass(frozen=True, slots=True)
class Given:
    """A document that came with a request, or that was ingested."""

    text: str
    metadata: Mapping[str, Any]


class Catalogue:
    """Chunks by their text. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._texts = Texts()
        self._lock = threading.Lock()
        self._ingested: dict[str, Mapping[str, Any]] = {}  # metadata by text
        self._given: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._chunks: dict[str, Chunk] = {}  # of texts in one of both whose ids were needed

    def __len__(self) -> int:
        return len(self._ingested)

    def __contains__(self, text: str) -> bool:
        return text in self._ingested

    def ingest(self, documents: Iterable[Given], encode: bool = True) -> WarmReport:
        """Know `documents` for good and, with `encode`, compute and store their KV; returns when it is durable."""
        known = {one.text: one for one in documents if one.text}
        chunks = {text: self._engine.chunk(text) for text in known}  # refuses what is no chunk before it is known
        report = self._engine.warm(list(chunks.values())) if encode else WarmReport(0, 0, 0)
        with self._lock:
            self._chunks |= chunks
        self.know(known.values())
        return report

    def know(self, documents: Iterable[Given]) -> None:
        """Know `documents` for good; their KV is stored already, or will be when it is missed."""
        known = {one.text: one.metadata for one in documents if one.text}
        with self._lock:
            self._ingested |= known
            for text in known:
                self._given.pop(text, None)
        self._texts.add(known)

    def give(self, documents: Iterable[Given]) -> None:
        """Remember documents that came with a call."""
        with self._lock:
            fresh = {one.text: one.metadata for one in documents if one.text and one.text not in self._ingested}
            for text, metadata in fresh.items():
                self._given[text] = metadata
                self._given.move_to_end(text)
            gone = [self._given.popitem(last=False)[0] for _ in range(len(self._given) - GIVEN_KEPT)]
            for text in gone:
                self._chunks.pop(text, None)
        self._texts.add(fresh)
        self._texts.discard(gone)

    def forget(self, texts: Iterable[str]) -> int:
        """Drop `texts` and their KV from every tier; how many of them had KV stored."""
        gone = [text for text in dict.fromkeys(texts) if text]
        self._texts.discard(gone)
        with self._lock:
            for text in gone:
                for known in (self._ingested, self._given, self._chunks):
                    known.pop(text, None)
        return self._engine.delete([self._engine.chunk(text) for text in gone]) if gone else 0

    def forget_given(self) -> None:
        """Forget what calls brought; what was ingested stays."""
        with self._lock:
            gone, self._given = list(self._given), OrderedDict()
            for text in gone:
                self._chunks.pop(text, None)
        self._texts.discard(gone)

    def find(self, prompt: str) -> list[Found]:
        """The known texts in `prompt`."""
        return self._texts.find(prompt)

    def chunk(self, text: str, metadata: Mapping[str, Any] | None = None) -> Chunk:
        """The chunk of `text`, with the ids it was ingested with; `metadata` left out is what is known of it."""
        with self._lock:
            found = self._chunks.get(text)
            known = self._ingested.get(text, self._given.get(text, {}))
        if found is None:
            found = self._engine.chunk(text)
            with self._lock:
                if text in self._ingested or text in self._given:
                    self._chunks[text] = found
        return Chunk(found.token_ids, found.text, dict(known if metadata is None else metadata))
