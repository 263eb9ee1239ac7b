"""Selection by the question's attention, and by scores measured at ingest (both ours; docs/selection.md)."""

import torch

from ..plan import Candidates
from .base import AskingSelector, StaticSelector, budget, top


class Sensitivity(StaticSelector):
    """The highest stored scores over all chunks together. Without a check layer, compute equals the ratio."""

    name = "sensitivity"
    needs_scores = True

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        count = budget(ratio, len(candidates))
        if count == 0 or candidates.sensitivity is None:
            return torch.empty(0, dtype=torch.int64)
        return top(candidates.sensitivity, count)


class Attention(AskingSelector):
    """The tokens that the question attends to most, for one extra pass of the question's rows. Needs no scores."""

    name = "attention"

    def select(self, candidates: Candidates, attention: torch.Tensor, ratio: float) -> torch.Tensor:
        return top(attention, budget(ratio, len(candidates)))
