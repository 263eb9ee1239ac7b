"""Selection by what was measured at ingest: the tokens that depend most on what stands before their chunk (ours)."""

import torch

from ..plan import Candidates
from .base import StaticSelector, budget, top


class Sensitivity(StaticSelector):
    """The highest stored scores, over all chunks jointly. No check layer: compute equals the ratio."""

    name = "sensitivity"
    needs_scores = True

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:  # noqa: ARG002
        count = budget(ratio, len(candidates))
        if count == 0 or candidates.sensitivity is None:
            return torch.empty(0, dtype=torch.int64)
        return top(candidates.sensitivity, count)
