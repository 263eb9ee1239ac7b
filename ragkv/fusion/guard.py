"""The guard: a request whose chunks depend on their context more than usual is given a higher recompute ratio.

What recompute will leave undone is known before anything is loaded: the stored sensitivity of the tokens that are not
selected. The quality gate says how much of it a model bears (`GateResult.remaining_deviation`).
"""

import torch

from .plan import Candidates
from .selectors import budget

SLACK = 1e-6  # of the limit: sums in another order


def remaining_deviation(candidates: Candidates, chosen: torch.Tensor) -> float | None:
    """Expected deviation left a token once `chosen` (C,), indices, are recomputed; `None` if an entry has no scores."""
    scores = candidates.sensitivity
    if scores is None:
        return None
    return float((scores.sum() - scores[chosen].sum()).clamp_min(0.0) / max(1, len(candidates)))


def raised_ratio(candidates: Candidates, ratio: float, limit: float) -> float:
    """The least ratio, `ratio` or higher, that leaves at most `limit` a token if the highest scores are recomputed."""
    scores, count = candidates.sensitivity, len(candidates)
    if scores is None or count == 0:
        return ratio
    rest = scores.sum() - torch.sort(scores, descending=True).values.cumsum(0)  # (N,): left once 1 ... N are recomputed
    rest = torch.cat((scores.sum().unsqueeze(0), rest)) / count
    first = budget(ratio, count)
    enough = (rest[first:] <= limit * (1 + SLACK)).nonzero()
    needed = first + int(enough[0]) if len(enough) else count
    return ratio if needed == first else needed / count
