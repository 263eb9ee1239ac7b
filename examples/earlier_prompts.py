"""What prefix caching has when a question comes: the blocks of an earlier prompt."""

from collections.abc import Sequence

from ragkv.engine import Engine
from ragkv.types import Chunk

EARLIER_QUESTION = "What is this about?"


def ask_before(engine: Engine, chunks: Sequence[Chunk]) -> None:
    """Give prefix caching the prompt that it lives on: an earlier question with the same first
    chunk, and the others behind it in the opposite order.
    """
    if chunks:
        engine.prefill(EARLIER_QUESTION, [chunks[0], *chunks[:0:-1]], reuse="prefix")


def ask_each_before(engine: Engine, chunks: Sequence[Chunk]) -> None:
    """Ask an earlier question about each chunk alone: MapReduce and MapRerank read the same
    beginnings, and reuse them with `reuse="prefix"`.
    """
    for chunk in chunks:
        ask_before(engine, [chunk])
