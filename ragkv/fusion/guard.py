"""The guard: raises the recompute ratio of a request whose chunks depend on their context more than usual.

The stored sensitivity of the tokens that are not recomputed tells the expected remaining deviation before anything is
loaded. The quality gate measured how much of it the model tolerates (`GateResult.remaining_deviation`).
"""

import torch

from .plan import Candidates
from .selectors import budget

SLACK = 1e-6  # relative, on the limit: sums in another order differ by rounding


def remaining_deviation(candidates: Candidates, chosen: torch.Tensor) -> float | None:
    """Expected deviation per candidate that recomputing `chosen` (C,), indices, leaves; `None` without scores."""
    scores = candidates.sensitivity
    if scores is None:
        return None
    return float((scores.sum() - scores[chosen].sum()).clamp_min(0.0) / max(1, len(candidates)))


def raised_ratio(candidates: Candidates, ratio: float, limit: float) -> float:
    """The lowest ratio >= `ratio` whose highest scores leave a deviation of at most `limit` per candidate."""
    scores, count = candidates.sensitivity, len(candidates)
    if scores is None or count == 0:
        return ratio
    rest = scores.sum() - torch.sort(scores, descending=True).values.cumsum(0)  # (N,): after recomputing 1 ... N
    rest = torch.cat((scores.sum().unsqueeze(0), rest)) / count
    first = budget(ratio, count)
    enough = (rest[first:] <= limit * (1 + SLACK)).nonzero()
    needed = first + int(enough[0]) if len(enough) else count
    return ratio if needed == first else needed / count
