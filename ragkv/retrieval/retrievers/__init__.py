"""The door of the retrievers: a contract and its siblings, chosen by name."""

from ragkv.errors import ConfigError

from .base import Corpus, Numbers, Retriever, Scored, Vectors
from .bm25 import Bm25
from .dense import Dense
from .fused import Fused, fuse

RETRIEVERS: dict[str, type[Retriever]] = {retriever.name: retriever for retriever in (Bm25, Dense, Fused)}


def retriever_type(name: str) -> type[Retriever]:
    """A retriever's class by its registered name; raises `ConfigError` naming the known ones."""
    if name not in RETRIEVERS:
        raise ConfigError(f"Unknown retriever {name!r}. Known: {', '.join(sorted(RETRIEVERS))}.")
    return RETRIEVERS[name]


__all__ = [
    "RETRIEVERS",
    "Bm25",
    "Corpus",
    "Dense",
    "Fused",
    "Numbers",
    "Retriever",
    "Scored",
    "Vectors",
    "fuse",
    "retriever_type",
]
