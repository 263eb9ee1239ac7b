"""Selectors choose which of N candidate tokens are recomputed: ceil(ratio N) per layer. A setting
names the selector.

The three kinds differ in when they know their tokens (`Selection`):

- A static one knows them before anything is loaded (`static_selectors.py`). They are recomputed
  from layer 0 on. Keys and values of layer 0 do not depend on context, so they are exact anyway.
- A narrowing one lets every candidate pass layer 0, and then drops those of low KV deviation
  (`hkvd.py`, CacheBlend section 4.3).
- An asking one (ours, docs/research/selection.md) gets the question's attention. A first pass runs
  the computed rows over the lower layers of all reused KV to measure it. From then on the selector
  works like a static one. `Attention` is the default.
"""

import math
from dataclasses import dataclass
from enum import Enum
from pkgutil import resolve_name
from typing import ClassVar

import torch

from ragkv.errors import ConfigError
from ragkv.model import sent
from ragkv.registry import SELECTORS

from .plan import Candidates

# Where in a model's depth the question asks. The layers above choose no better, and they load while
# those below are recomputed (docs/research/selection.md).
ASKED = (0.5, 0.83)
# Attention to token t of a fused span is multiplied by 1 + `BEGINNING_WEIGHT` e^(-t /
# `BEGINNING_TOKENS`): the KV of beginnings changes most with what precedes them
# (docs/research/log.md).
BEGINNING_WEIGHT = 2.0
BEGINNING_TOKENS = 16.0


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


class Selection(Enum):
    """When a selector knows its tokens, which decides how much work there is while entries load."""

    STATIC = "static"  # before anything is loaded
    # every candidate passes layer 0; later layers recompute the ratio's share
    NARROWING = "narrowing"
    ASKING = "asking"  # after a first pass over the layers up to the last asked one


class Selector:
    """Chooses which candidates are recomputed.

    Its kind follows from the methods that a class writes: `select` makes a static one, `keep` a
    narrowing one, `asked_layers` and `select_asked` an asking one.
    """

    name: ClassVar[str]  # in reports; by default that of the class
    selection: ClassVar[Selection] = Selection.STATIC  # follows from the methods

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):  # a subclass of a named selector is another one
            cls.name = cls.__name__
        asks = cls.select_asked is not Selector.select_asked
        if asks is (cls.asked_layers is Selector.asked_layers):
            raise TypeError(
                f"{cls.__name__}: write both of asked_layers and select_asked, or none."
            )
        if asks:
            cls.selection = Selection.ASKING
        elif cls.keep is not Selector.keep:
            cls.selection = Selection.NARROWING
        elif cls.select is Selector.select:
            raise TypeError(
                f"{cls.__name__}: write select, keep, or asked_layers and select_asked."
            )

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        """Of a static selector: `budget(ratio, N)` indices into the candidates, ascending."""
        return torch.empty(0, dtype=torch.int64)

    def keep(self, layer: int, layers: int, ratio: float, count: int) -> int | None:
        """Of a narrowing selector: how many of the N = `count` candidates are recomputed in `layer`
        >= 1; `None`: as in the layer before.
        """
        return None

    def asked_layers(self, layers: int) -> range:
        """Of an asking selector: the layers, of a model's `layers`, that measure attention."""
        return range(0)

    def select_asked(
        self, candidates: Candidates, attention: torch.Tensor, ratio: float
    ) -> torch.Tensor:
        """Of an asking selector: `budget(ratio, N)` indices into the candidates, ascending.

        `attention` (N,) float32 is the attention of the question's rows to each candidate, averaged
        over rows, heads and the asked layers. It is -1 for a candidate that is recomputed already,
        which must not be chosen again.
        """
        raise NotImplementedError


def top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest `scores` (N,), ascending; ties go to the earlier token."""
    order = torch.sort(scores, descending=True, stable=True).indices[:count]
    return order.sort().values


def beginnings(candidates: Candidates, count: int) -> torch.Tensor:
    """Indices of `count` candidates, ascending: the first tokens of every chunk, equally many of
    each.
    """
    return top(-candidates.offset, count)


class Attention(Selector):
    """The tokens that the question attends to most, for one extra pass of the question's rows,
    which counts as compute. Attention to the beginnings of chunks weighs more.
    """

    name = "attention"

    def __init__(self, asked: tuple[float, float] = ASKED) -> None:
        """`asked` is where in the depth of the model, from 0 to 1, the asked layers begin and
        end.
        """
        self._asked = asked

    def asked_layers(self, layers: int) -> range:
        start, stop = (round(share * layers) for share in self._asked)
        return range(start, max(start + 1, stop))

    def select_asked(
        self, candidates: Candidates, attention: torch.Tensor, ratio: float
    ) -> torch.Tensor:
        return top(weighed(attention, candidates), budget(ratio, len(candidates)))


def weighed(attention: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """`attention` (N,) to the candidates, that to beginnings of chunks multiplied."""
    weights = 1 + BEGINNING_WEIGHT * torch.exp(-candidates.offset / BEGINNING_TOKENS)
    return attention * sent(weights, attention.device)


@dataclass(frozen=True, slots=True)
class Recompute:
    """How the candidates of one plan are recomputed. The controller decides it."""

    selector: Selector
    ratio: float  # the share of the candidates that each layer recomputes
    # candidates that are recomputed before the question chooses: the beginnings of chunks
    early: int = 0
    reasons: tuple[str, ...] = ()  # why that ratio; empty if nothing was left to decide
    expected_s: float | None = None  # what the pass should take; None if that was not estimated


def make_selector(name: str | Selector) -> Selector:
    """The selector of that name, or a given instance; raises `ConfigError` with the known names."""
    if isinstance(name, Selector):
        return name
    if name not in SELECTORS:
        raise ConfigError(
            f"Unknown selector {name!r}. Known: {', '.join(sorted(SELECTORS))}. To recompute no "
            "token or every one, give ratio 0 or 1."
        )
    made: Selector = resolve_name(SELECTORS[name])()
    return made
