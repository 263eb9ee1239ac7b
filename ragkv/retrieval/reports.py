"""What the index says it did and holds. Values only."""

from dataclasses import dataclass

from .document import Passage


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What an ingestion changed. Document ids in order of appearance."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    deleted: tuple[str, ...]  # only with `prune`
    new_passages: tuple[Passage, ...]  # encode these
    removed_passages: tuple[Passage, ...]  # of changed and deleted documents
    forgotten_passages: tuple[Passage, ...]  # those of them whose text no document holds any more: drop their KV
    embedded_texts: int  # distinct texts sent to the embedder


@dataclass(frozen=True, slots=True)
class Removal:
    """What a deletion took away."""

    deleted: tuple[str, ...]  # document ids that were there
    passages: tuple[Passage, ...]  # passages that are gone
    forgotten_passages: tuple[Passage, ...]  # those of them whose text no document holds any more: drop their KV


@dataclass(frozen=True, slots=True)
class IndexStats:
    """What an index holds."""

    documents: int
    passages: int
    texts: int  # distinct texts of passages
    embedded_texts: int  # of these, with vectors
    embedder: str | None  # the name of the embedder it was built with
    dimension: int | None
