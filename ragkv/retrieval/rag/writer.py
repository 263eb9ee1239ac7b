"""Changes the index and the store together: documents put or deleted, and the KV of their passages."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ragkv.engine import Engine
from ragkv.retrieval import Document, FileRecord, Index, IngestReport, Passage, Removal
from ragkv.scheduling.encoding import WarmReport
from ragkv.types import Chunk

Progress = Callable[[int, int], None]  # done, total


@dataclass(frozen=True, slots=True)
class CorpusWriter:
    """One index and the engine whose store has the KV of its passages."""

    engine: Engine
    index: Index

    def put(
        self,
        documents: Iterable[Document],
        *,
        prune: bool = False,
        file: FileRecord | None = None,
        on_embed: Progress | None = None,
    ) -> tuple[IngestReport, int]:
        """Add and update documents in the index; the report, and how many entries were deleted from the store."""
        report = self.index.ingest(documents, prune=prune, progress=on_embed, file=file)
        return report, self._forget(report.forgotten_passages)

    def encode(self, document_ids: Iterable[str], on_encode: Progress | None = None) -> WarmReport:
        """Compute and store the KV of documents that is not stored."""
        passages = [passage for document in document_ids for passage in self.index.passages(document)]
        return self.engine.warm(list(map(self.chunk, passages)), on_encode)

    def delete(self, document_ids: str | Iterable[str]) -> tuple[Removal, int]:
        """Delete documents; what was removed, and how many entries were deleted from the store."""
        removal = self.index.delete(document_ids)
        return removal, self._forget(removal.forgotten_passages)

    def delete_file(self, path: str) -> tuple[Removal, int]:
        """Delete what came from a file; what was removed, and how many entries were deleted from the store."""
        removal = self.index.delete_file(path)
        return removal, self._forget(removal.forgotten_passages)

    def chunk(self, passage: Passage) -> Chunk:
        """The engine's chunk of a passage."""
        place = {"source": passage.source, "document": passage.document_id, "span": passage.span}
        return self.engine.chunk(passage.text, {**passage.metadata, **place})

    def _forget(self, passages: Iterable[Passage]) -> int:
        return self.engine.delete([self.chunk(passage) for passage in passages])
