"""Selectors choose which of N candidate tokens are recomputed: ceil(ratio N) per layer. A setting
names the selector.

The three kinds differ in when they know their tokens:

- A `StaticSelector` knows them before anything is loaded. They are recomputed from layer 0 on. Keys
  and values of layer 0 do not depend on context, so they are exact anyway.
- A `CheckingSelector` lets every candidate pass layer 0 and then narrows them down by KV deviation
  (CacheBlend section 4.3). Deviation is `sqrt(sum dK^2 + sum dV^2)` of fresh against stored KV,
  with K before RoPE, in float32. The selector only decides how many tokens remain in each layer.
  The fusor keeps those with the highest deviation.
- An `AskingSelector` (ours, docs/research/selection.md) gets the question's attention. A first pass
  runs the computed rows over the lower layers of all reused KV to measure it. From then on the
  selector works like a static one.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from ragkv.errors import ConfigError

from .plan import Candidates

# Where in a model's depth the question asks. The layers above choose no better, and they load while
# those below are recomputed (docs/research/selection.md).
ASKED = (0.5, 0.83)


def budget(ratio: float, count: int) -> int:
    """ceil(ratio N), at most N; robust against a ratio such as 0.1 + 0.2."""
    return min(count, math.ceil(ratio * count - 1e-9))


def with_floor(ratio: float, count: int, floor_tokens: int) -> float:
    """The ratio that recomputes at least `floor_tokens` of N = `count` candidates, or all of fewer;
    0 stays 0.

    In a prompt of short chunks a ratio is a token or two, which is less than one reference to
    another chunk needs. A few more rows cost next to nothing, because the weights are read in any
    case.
    """
    if ratio <= 0.0 or budget(ratio, count) >= min(floor_tokens, count):
        return ratio
    return min(1.0, floor_tokens / count)


class Selector(ABC):
    """Chooses which candidates are recomputed."""

    name: ClassVar[str]
    uses_ratio: ClassVar[bool] = True  # whether the choice depends on the ratio
    recomputes_all: ClassVar[bool] = False  # whatever the ratio: the result is exact


class StaticSelector(Selector):
    """Knows its tokens before loading."""

    @abstractmethod
    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        """`budget(ratio, N)` indices into the candidates, ascending."""


class CheckingSelector(Selector):
    """Narrows the candidates down by deviation measured at question time."""

    @abstractmethod
    def keep(self, layer: int, layers: int, ratio: float, count: int) -> int | None:
        """How many of the N = `count` candidates are recomputed in `layer` >= 1; `None`: as in the
        layer before.
        """


class AskingSelector(Selector):
    """Knows its tokens after a first pass that measures the question's attention; that pass counts
    as compute.
    """

    def __init__(self, asked: tuple[float, float] = ASKED) -> None:
        """`asked` is where in the depth of the model, from 0 to 1, the asked layers begin and
        end.
        """
        self._asked = asked

    def layers(self, count: int) -> range:
        """The asked layers of a model that has `count`."""
        start, stop = (round(share * count) for share in self._asked)
        return range(start, max(start + 1, stop))

    @abstractmethod
    def select(self, candidates: Candidates, attention: torch.Tensor, ratio: float) -> torch.Tensor:
        """`budget(ratio, N)` indices into the candidates, ascending.

        `attention` (N,) float32 is the attention of the question's rows to each candidate, averaged
        over rows, heads and the asked layers.
        """


def top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest `scores` (N,), ascending; ties go to the earlier token."""
    order = torch.sort(scores, descending=True, stable=True).indices[:count]
    return order.sort().values


class Nothing(StaticSelector):
    """Full KV reuse (PromptCache-style, position-aligned): recomputes nothing, at any ratio."""

    name = "none"
    uses_ratio = False

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64)


class Everything(StaticSelector):
    """Recomputes every candidate, at any ratio."""

    name = "all"
    recomputes_all = True
    uses_ratio = False

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        return torch.arange(len(candidates))


class Random(StaticSelector):
    """A random share, the same for equal seeds and candidate counts."""

    name = "random"

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(candidates), generator=generator)
        return order[: budget(ratio, len(candidates))].sort().values


class FirstK(StaticSelector):
    """The first tokens of every chunk, equally many of each (EPIC's LegoLink)."""

    name = "first-k"

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        return top(-candidates.offset, budget(ratio, len(candidates)))


class HKVD(CheckingSelector):
    """Checks once, at layer 1 (CacheBlend section 4.3); its tokens are recomputed in every later
    layer.
    """

    name = "hkvd"

    def keep(self, layer: int, layers: int, ratio: float, count: int) -> int | None:
        return budget(ratio, count) if layer == 1 else None


class GradualHKVD(CheckingSelector):
    """The paper's gradual filtering (figure 9): each layer filters the tokens of the layer before.

    The share falls linearly from r1 = min(1, 1.5 r) at layer 1 to 2 r - r1 at the last layer, so
    its mean is r. The paper says "slightly higher" and "slightly less" without numbers; these
    numbers are ours.
    """

    name = "hkvd-gradual"

    def keep(self, layer: int, layers: int, ratio: float, count: int) -> int | None:
        steps = layers - 2
        if steps <= 0:
            return budget(ratio, count)
        first = min(1.0, 1.5 * ratio)
        last = 2 * ratio - first
        return budget(first + (last - first) * (layer - 1) / steps, count)


class Attention(AskingSelector):
    """The tokens that the question attends to most, for one extra pass of the question's rows."""

    name = "attention"

    def select(self, candidates: Candidates, attention: torch.Tensor, ratio: float) -> torch.Tensor:
        return top(attention, budget(ratio, len(candidates)))


SELECTORS: dict[str, type[Selector]] = {
    selector.name: selector
    for selector in (Attention, HKVD, GradualHKVD, FirstK, Random, Nothing, Everything)
}


def make_selector(name: str | Selector) -> Selector:
    """The selector of that name, or a given instance; raises `ConfigError` with the known names."""
    if isinstance(name, Selector):
        return name
    if name not in SELECTORS:
        raise ConfigError(f"Unknown selector {name!r}. Known: {', '.join(sorted(SELECTORS))}.")
    return SELECTORS[name]()
