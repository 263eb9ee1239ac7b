"""The rule of every registered selector, written naively over plain lists, and checks of a selector
against its rule.

`check` fails for a selector without a rule: who registers a selector also writes down here which
tokens it must choose.
"""

import math
from collections.abc import Callable

import pytest
import torch

from ragkv.fusion import Candidates, Selection, Selector
from tests.fusion import helpers

RATIOS = [0.0, 0.01, 0.1, 0.15, 0.5, 1.0]
CASES = [
    helpers.candidates(count, spans) for count, spans in ((0, 1), (1, 1), (7, 2), (40, 3), (120, 5))
]


def budget(ratio: float, count: int) -> int:
    """The least whole number that is at least `ratio` of `count`."""
    return min(count, math.ceil(round(ratio * count, 6)))


def selected(selector: Selector, candidates: Candidates, ratio: float, seed: int = 0) -> list[int]:
    """The indices that a static or asking selector chooses; an asking one sees
    `attention_to(candidates)`.
    """
    if selector.selection is Selection.ASKING:
        return selector.select_asked(candidates, attention_to(candidates), ratio).tolist()
    return selector.select(candidates, ratio, seed).tolist()


def attention_to(candidates: Candidates) -> torch.Tensor:
    return torch.rand(len(candidates), generator=torch.Generator().manual_seed(7))


def weighed_attention(candidates: Candidates) -> list[float]:
    weights = 1 + 2 * torch.exp(-candidates.offset / 16)
    return (attention_to(candidates) * weights).tolist()


def highest(priority: Callable[[Candidates], list[float]]) -> Callable[[Selector], None]:
    """The rule: the tokens of highest priority, the earlier one of equals, as many as the budget
    allows.
    """

    def check(selector: Selector) -> None:
        for candidates in CASES:
            for ratio in RATIOS:
                values = priority(candidates)
                order = sorted(range(len(candidates)), key=lambda i, values=values: -values[i])
                wanted = sorted(order[: budget(ratio, len(candidates))])
                assert selected(selector, candidates, ratio) == wanted

    return check


def first_tokens(candidates: Candidates) -> list[float]:
    return [-float(offset) for offset in candidates.offset]


def uniform(selector: Selector) -> None:
    """The rule: every token is equally likely, and a seed always gives the same tokens."""
    candidates = helpers.candidates(40, spans=3)
    draws = 500
    chosen = [selected(selector, candidates, 0.25, seed) for seed in range(draws)]
    assert chosen[:5] == [selected(selector, candidates, 0.25, seed) for seed in range(5)]
    assert all(len(set(one)) == 10 for one in chosen)
    share = torch.bincount(torch.tensor(chosen).flatten(), minlength=40) / draws
    # five standard deviations
    assert ((share - 0.25).abs() < 5 * (0.25 * 0.75 / draws) ** 0.5).all()


def narrows(share: Callable[[float, int, int], float]) -> Callable[[Selector], None]:
    """The rule: `share(ratio, layer, layers)` of the candidates remain in each layer from 1 on."""

    def check(selector: Selector) -> None:
        assert selector.selection is Selection.NARROWING
        for layers in (2, 3, 4, 24):
            for ratio in RATIOS:
                for count in (0, 1, 40, 997):
                    remaining = count
                    for layer in range(1, layers):
                        keep = selector.keep(layer, layers, ratio, count)
                        remaining = remaining if keep is None else keep
                        assert remaining == budget(share(ratio, layer, layers), count)

    return check


def gradual(ratio: float, layer: int, layers: int) -> float:
    """Linear from r1 = min(1, 1.5 r) at layer 1 to 2 r - r1 at the last layer; the mean is r."""
    if layers == 2:
        return ratio
    first = min(1.0, 1.5 * ratio)
    return first + (2 * ratio - 2 * first) * (layer - 1) / (layers - 2)


RULES: dict[str, Callable[[Selector], None]] = {
    "random": uniform,
    "first-k": highest(first_tokens),
    "attention": highest(weighed_attention),
    "hkvd": narrows(lambda ratio, _layer, _layers: ratio),
    "hkvd-gradual": narrows(gradual),
}


def check(selector: Selector) -> None:
    """Compare `selector` with the rule of its name."""
    if selector.name not in RULES:
        pytest.fail(f"no reference for {selector.name}: write its rule in {__name__}")
    RULES[selector.name](selector)
