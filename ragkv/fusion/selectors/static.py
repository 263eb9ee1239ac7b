"""Selectors that know their tokens before loading: the baselines none, all, random and first-k."""

import torch

from ..plan import Candidates
from .base import StaticSelector, budget, top


class Nothing(StaticSelector):
    """Full KV reuse (PromptCache-style, position-aligned): recomputes nothing, at any ratio."""

    name = "none"
    uses_ratio = False

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64)


class Everything(StaticSelector):
    """Recomputes every candidate, at any ratio."""

    name = "all"
    uses_ratio = False

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        return torch.arange(len(candidates))


class Random(StaticSelector):
    """A random share, the same for equal seeds and candidate counts."""

    name = "random"

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(candidates), generator=generator)
        return order[: budget(ratio, len(candidates))].sort().values


class FirstK(StaticSelector):
    """The first tokens of every chunk, equally many of each (EPIC's LegoLink)."""

    name = "first-k"

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        return top(-candidates.offset, budget(ratio, len(candidates)))
