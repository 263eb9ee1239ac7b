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
