"""Selectors that know their tokens before anything is loaded: baselines of the papers."""

import torch

from .plan import Candidates
from .selectors import Selector, beginnings, budget


class Random(Selector):
    """A random share, the same for equal seeds and candidate counts."""

    name = "random"

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(candidates), generator=generator)
        return order[: budget(ratio, len(candidates))].sort().values


class FirstK(Selector):
    """The first tokens of every chunk, equally many of each (EPIC's LegoLink)."""

    name = "first-k"

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        return beginnings(candidates, budget(ratio, len(candidates)))
