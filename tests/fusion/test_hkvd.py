"""Narrowing selectors against a naive top-k of deviations, from the model's own projections over
whole tensors.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch

from ragkv import Engine
from ragkv.fusion import Selection, make_selector
from ragkv.registry import SELECTORS
from tests import tiny_models
from tests.fusion import helpers


@pytest.fixture(scope="module")
def engine() -> Engine:
    with helpers.engine() as engine:
        yield engine


@torch.no_grad()
def projections(ids: list[int], layer: int) -> torch.Tensor:
    """Keys before RoPE and values that `layer` of the model itself makes of the prompt `ids`, (S,
    2, G * D).
    """
    model: Any = tiny_models.model("llama")
    found: dict[str, torch.Tensor] = {}
    attention = model.model.layers[layer].self_attn
    attention.k_proj.register_forward_hook(lambda _m, _i, out: found.update(k=out[0]))
    attention.v_proj.register_forward_hook(lambda _m, _i, out: found.update(v=out[0]))
    model(torch.tensor([ids]))
    return torch.stack((found["k"], found["v"]), dim=1)


def deviations(layer: int) -> torch.Tensor:
    """sqrt(sum dK^2 + sum dV^2) of every candidate between its chunk encoded alone and a full
    prefill, (N,).
    """
    whole = projections(helpers.PREFIX + sum(helpers.CHUNKS, []), layer)[helpers.FIRST :]
    apart = torch.cat(
        [
            projections(helpers.PREFIX + chunk, layer)[len(helpers.PREFIX) :]
            for chunk in helpers.CHUNKS[1:]
        ]
    )
    return (whole - apart).square().sum(dim=(1, 2)).sqrt()


@pytest.mark.parametrize("ratio", [0.05, 0.15, 0.2, 0.5])
@pytest.mark.parametrize(
    "name",
    [name for name in SELECTORS if make_selector(name).selection is Selection.NARROWING],
)
def test_layer_one_recomputes_the_highest_naive_deviations(
    engine: Engine, name: str, ratio: float
) -> None:
    selected = engine.prefill(
        helpers.QUESTION, helpers.CHUNKS, ratio=ratio, selector=name
    ).selected_by_layer
    naive = (deviations(layer=1).topk(len(selected[1])).indices + helpers.FIRST).sort().values
    assert torch.equal(selected[1], naive)


def test_hkvd_recomputes_the_same_tokens_in_every_layer_after_its_check(engine: Engine) -> None:
    selected = engine.prefill(
        helpers.QUESTION, helpers.CHUNKS, ratio=0.15, selector="hkvd"
    ).selected_by_layer
    assert all(torch.equal(later, selected[1]) for later in selected[2:])


@pytest.mark.parametrize("ratio", [0.05, 0.15, 0.4, 0.9])
def test_gradual_hkvd_narrows_from_layer_to_layer_with_the_ratio_as_its_mean(
    engine: Engine, ratio: float
) -> None:
    selected = engine.prefill(
        helpers.QUESTION, helpers.CHUNKS, ratio=ratio, selector="hkvd-gradual"
    ).selected_by_layer
    for wide, narrow in pairwise(selected[1:]):
        assert set(narrow.tolist()) <= set(wide.tolist())
        assert len(narrow) <= len(wide)
    assert len(selected[0]) == helpers.N
    mean = sum(map(len, selected[1:])) / (len(selected) - 1)
    assert ratio * helpers.N <= mean < ratio * helpers.N + 1
