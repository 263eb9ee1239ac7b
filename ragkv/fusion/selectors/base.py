"""The contract of a selector: which of N candidate tokens are recomputed, under one budget of ceil(ratio N) a layer.

Three kinds. A `StaticSelector` knows its tokens before anything is loaded, and they are recomputed from layer 0 on
(keys and values of layer 0 do not depend on context, so nothing is approximate there). A `CheckingSelector` has every
candidate pass layer 0 and then narrows by KV deviation, `sqrt(sum dK^2 + sum dV^2)` of fresh against stored, K before
RoPE, in float32; it only says how many stay at which layer (CacheBlend section 4.3). An `AskingSelector` is told what
the question attends to, from one pass of the computed rows over what is reused, and then is as a static one.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from ..plan import Candidates


def budget(ratio: float, count: int) -> int:
    """ceil(ratio N), at most N; proof against a ratio such as 0.1 + 0.2."""
    return min(count, math.ceil(ratio * count - 1e-9))


class Selector(ABC):
    """Chooses which candidates are recomputed."""

    name: ClassVar[str]
    needs_scores: ClassVar[bool] = False  # whether every entry must have its sensitivity


class StaticSelector(Selector):
    """Knows its tokens before loading."""

    @abstractmethod
    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        """Indices into the candidates, ascending, `budget(ratio, N)` of them."""


class CheckingSelector(Selector):
    """Narrows by deviation measured at question time."""

    @abstractmethod
    def keep(self, layer: int, layers: int, ratio: float, count: int) -> int | None:
        """How many of the N = `count` candidates are recomputed in `layer` >= 1; `None`: those of the layer before."""


class AskingSelector(Selector):
    """Knows its tokens once the question has looked at what is reused; that pass is counted in the compute."""

    @abstractmethod
    def select(self, candidates: Candidates, attention: torch.Tensor, ratio: float) -> torch.Tensor:
        """Indices into the candidates, ascending, `budget(ratio, N)` of them.

        `attention` (N,) float32 is what the prompt's last row pays to each candidate, the mean over heads and over the
        later half of the layers.
        """


def top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest `scores` (N,), ascending; of equals the earlier ones."""
    order = torch.sort(scores, descending=True, stable=True).indices[:count]
    return order.sort().values
