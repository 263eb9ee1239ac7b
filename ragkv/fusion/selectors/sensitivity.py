"""Selection by scores measured at ingest: the tokens that depend most on the text before their chunk (ours).

`docs/selection.md` has the measurements behind the two constants.
"""

import torch

from ..plan import Candidates
from .base import AskingSelector, StaticSelector, budget, top

# The question's attention counts to the power `ATTENTION_POWER`; low, because attention to stale keys misleads.
ATTENTION_POWER = 0.3
INHERITED_SHARE = 0.7  # A token inherits `INHERITED_SHARE` of the attention to the token behind it.


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


class QuerySensitivity(AskingSelector):
    """Stored scores weighted by the question's own attention, for one extra pass of the question's rows.

    An attended token depends on earlier tokens of its chunk, such as the pronoun of its sentence. So earlier tokens
    inherit its attention, less with every step.
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
    """The larger of each token's own `attention` (N,) and the share it inherits from later tokens of its span."""
    found, inherited = attention.tolist(), 0.0
    spans = span_index.tolist()
    for place in range(len(found) - 1, -1, -1):
        if place + 1 < len(spans) and spans[place] != spans[place + 1]:
            inherited = 0.0
        inherited = found[place] = max(inherited * INHERITED_SHARE, found[place])
    return torch.tensor(found)
