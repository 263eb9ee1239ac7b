"""Selection by what was measured at ingest: the tokens that depend most on what stands before their chunk (ours).

`docs/selection.md` has the measurements behind the two numbers here.
"""

import torch

from ..plan import Candidates
from .base import AskingSelector, StaticSelector, budget, top

ATTENTION_POWER = 0.3  # of the question's attention against the stored score: stale keys make it a weak witness
INHERITED_SHARE = 0.7  # what a token before an attended one inherits of its attention, a step


class Sensitivity(StaticSelector):
    """The highest stored scores, over all chunks jointly. No check layer: compute equals the ratio."""

    name = "sensitivity"
    needs_scores = True

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        count = budget(ratio, len(candidates))
        if count == 0 or candidates.sensitivity is None:
            return torch.empty(0, dtype=torch.int64)
        return top(candidates.sensitivity, count)


class QuerySensitivity(AskingSelector):
    """Stored scores weighted by the question's own attention, for one extra pass of the question's rows.

    A token that is attended to draws on those before it in its chunk (the pronoun of its sentence), so these inherit
    its attention, less with every step.
    """

    name = "sensitivity-query"
    needs_scores = True

    def select(self, candidates: Candidates, attention: torch.Tensor, ratio: float) -> torch.Tensor:
        count = budget(ratio, len(candidates))
        if count == 0 or candidates.sensitivity is None:
            return torch.empty(0, dtype=torch.int64)
        weight = inherited_attention(attention / attention.mean().clamp_min(1e-12), candidates.span_index)
        return top(weight.pow(ATTENTION_POWER) * candidates.sensitivity, count)


def inherited_attention(attention: torch.Tensor, span_index: torch.Tensor) -> torch.Tensor:
    """For each token of `attention` (N,), the largest of it and what it inherits from later tokens of its span."""
    inherited, handed = attention.tolist(), 0.0
    spans = span_index.tolist()
    for place in range(len(inherited) - 1, -1, -1):
        if place + 1 < len(spans) and spans[place] != spans[place + 1]:
            handed = 0.0
        handed = inherited[place] = max(handed * INHERITED_SHARE, inherited[place])
    return torch.tensor(inherited)
