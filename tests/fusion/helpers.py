"""Helpers of the fusion tests: a tiny engine, its chunks, and candidates."""

from typing import Any

import torch

from ragkv import Engine, EngineConfig
from ragkv.fusion import Candidates
from tests import tiny_models
from tests.fixed import fixed

CHUNKS = [tiny_models.tokens(count, seed) for seed, count in enumerate((30, 26, 34, 41))]
SHORT_CHUNKS = [
    tuple(tiny_models.tokens(n, seed)) for n, seed in ((12, 1), (17, 2), (9, 3), (14, 4))
]
QUESTION = tiny_models.tokens(7, seed=9)
PREFIX = [1]
FIRST = len(PREFIX) + len(CHUNKS[0])  # candidates start here, because the first chunk is exact
N = sum(map(len, CHUNKS[1:]))


def cold_engine(family: str = "llama", **fusion: Any) -> Engine:
    """A tiny engine with an empty store, which selects the first tokens unless told otherwise."""
    settings = fixed(**{"selector": "first-k", **fusion})
    return Engine(tiny_models.model(family), config=EngineConfig(fusion=settings))


def engine(family: str = "llama", **fusion: Any) -> Engine:
    """A tiny engine with warm chunks."""
    made = cold_engine(family, **fusion)
    made.entries.encode(CHUNKS)
    return made


def candidates(count: int, spans: int = 1, start: int = 5) -> Candidates:
    """`count` candidates from position `start` on, in `spans` spans of about equal length."""
    place = torch.arange(count)
    index = place * spans // max(1, count)
    first = torch.searchsorted(index, index)  # where a candidate's span begins
    return Candidates(place + start, place - first)
