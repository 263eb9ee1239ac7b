"""The contract of a selector: it chooses which of N candidate tokens are recomputed, ceil(ratio N) per layer.

There are three kinds, which differ in when they know their tokens:

- A `StaticSelector` knows them before anything is loaded. They are recomputed from layer 0 on; keys and values of
  layer 0 do not depend on context, so nothing is approximate there.
- A `CheckingSelector` lets every candidate pass layer 0 and then narrows them down by KV deviation, which is
  `sqrt(sum dK^2 + sum dV^2)` of fresh against stored KV, K before RoPE, in float32 (CacheBlend section 4.3). It only
  decides how many tokens remain in each layer; the fusor keeps those with the highest deviation.
- An `AskingSelector` gets the question's attention from a first pass of the computed rows over all reused KV. From then
  on it works like a static one.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from ..plan import Candidates

SLACK = 1e-6  # A limit of deviation may be exceeded by the share `SLACK`: sums in another order are rounded otherwise.


def budget(ratio: float, count: int) -> int:
    """ceil(ratio N), at most N; robust against a ratio such as 0.1 + 0.2."""
    return min(count, math.ceil(ratio * count - 1e-9))


def with_floor(ratio: float, count: int, floor_tokens: int) -> float:
    """The ratio that recomputes at least `floor_tokens` of N = `count` candidates, or all of fewer; 0 stays 0.

    A ratio is a share, and of a prompt of short chunks a share is a token or two: less than one reference to another
    chunk needs. So few more rows cost next to nothing, because the weights are read in any case.
    """
    if ratio <= 0.0 or budget(ratio, count) >= min(floor_tokens, count):
        return ratio
    return min(1.0, floor_tokens / count)


def remaining_deviation(candidates: Candidates, chosen: torch.Tensor) -> float | None:
    """Expected deviation per candidate that recomputing `chosen` (C,), indices, leaves; `None` without scores."""
    scores = candidates.sensitivity
    if scores is None:
        return None
    return float((scores.sum() - scores[chosen].sum()).clamp_min(0.0) / max(1, len(candidates)))


def raised_ratio(candidates: Candidates, ratio: float, limit: float) -> float:
    """The guard: the lowest ratio >= `ratio` whose highest scores leave a deviation of at most `limit` per candidate.

    A request whose chunks depend on their context more than usual recomputes more. The quality gate measured how much
    deviation the model tolerates (`Point.remaining_deviation`).
    """
    scores, count = candidates.sensitivity, len(candidates)
    if scores is None or count == 0:
        return ratio
    rest = scores.sum() - torch.sort(scores, descending=True).values.cumsum(0)  # (N,): after recomputing 1 ... N
    rest = torch.cat((scores.sum().unsqueeze(0), rest)) / count
    first = budget(ratio, count)
    enough = (rest[first:] <= limit * (1 + SLACK)).nonzero()
    needed = first + int(enough[0]) if len(enough) else count
    return ratio if needed == first else needed / count


class Selector(ABC):
    """Chooses which candidates are recomputed."""

    name: ClassVar[str]
    uses_ratio: ClassVar[bool] = True  # whether the choice depends on the ratio
    needs_scores: ClassVar[bool] = False  # whether every entry must have its sensitivity


class StaticSelector(Selector):
    """Knows its tokens before loading."""

    @abstractmethod
    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        """`budget(ratio, N)` indices into the candidates, ascending."""


class CheckingSelector(Selector):
    """Narrows the candidates down by deviation measured at question time."""

    @abstractmethod
    def keep(self, layer: int, layers: int, ratio: float, count: int) -> int | None:
        """How many of the N = `count` candidates are recomputed in `layer` >= 1; `None`: as in the layer before."""


class AskingSelector(Selector):
    """Knows its tokens after a first pass that measures the question's attention; that pass counts as compute."""

    @abstractmethod
    def select(self, candidates: Candidates, attention: torch.Tensor, ratio: float) -> torch.Tensor:
        """`budget(ratio, N)` indices into the candidates, ascending.

        `attention` (N,) float32 is the attention of the prompt's last row to each candidate, averaged over heads and
        over the later half of the layers.
        """


def top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest `scores` (N,), ascending; ties go to the earlier token."""
    order = torch.sort(scores, descending=True, stable=True).indices[:count]
    return order.sort().values
