"""A long layer pauses between its parts, and its results are the same bits."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from ragkv import Engine
from ragkv.errors import CancelledError
from ragkv.fusion import Fusing
from ragkv.model import Rows, attention, layers, rows
from ragkv.model.rows import pause, pausing
from tests import tiny_models


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, layers):
        monkeypatch.setattr(module, "TILE_ROWS", 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (6, 2), (3, 3), (4, 1)])
def test_attention_head_by_head_gives_the_same_bits(
    heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    count = rows.TILE_ROWS + 5
    generator = torch.Generator().manual_seed(heads)
    query, key, value = (
        torch.randn((1, n, count, 16), generator=generator).to(dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    row_range = Rows.span(0, count, torch.device("cpu"))
    seen = list[int]()
    with pausing(lambda: seen.append(1)):
        found = attention.attend(query, key, value, row_range, None, 0.25)
    whole = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.25, enable_gqa=heads != kv_heads
    )
    assert torch.equal(found, whole)
    assert len(seen) == kv_heads


def test_attention_of_scattered_rows_pauses_before_each_block() -> None:
    positions = list(range(0, 600, 2))
    kv = torch.randn((1, 2, 600, 16), generator=torch.Generator().manual_seed(1))
    query = kv[:, :, positions]
    seen = list[int]()
    with pausing(lambda: seen.append(1)):
        attention.attend(query, kv, kv, Rows.of(torch.tensor(positions)), None, 0.25)
    assert len(seen) == len(attention.cut_blocks(positions, None, attention.MOST_ROWS)) > 1


def test_a_thread_pauses_as_the_innermost_block_says_and_never_within_a_pause() -> None:
    calls: list[str] = []

    def outer() -> None:
        calls.append("outer")
        pause()  # what runs meanwhile on this thread may run layers too

    pause()
    with pausing(outer):
        pause()
        with pausing(lambda: calls.append("inner")):
            pause()
        pause()
    pause()
    assert calls == ["outer", "inner", "outer"]


@pytest.mark.usefixtures("small_tiles")
def test_others_decode_within_the_layers_of_a_long_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tiny_models.model("llama")) as engine:
        question = tiny_models.tokens(30, seed=5)
        alone = engine.prefill(question).logits
        layers = engine.model.adapter.layer_count
        called: list[int] = []
        monkeypatch.setattr(engine.scheduler.batch, "step_waiting", lambda: called.append(1))
        paused = engine.prefill(question)
        assert torch.equal(paused.logits, alone)
        # attention, four tiles, its end; the last layer computes one row
        assert len(called) >= 6 * (layers - 1)


@pytest.mark.usefixtures("small_tiles")
def test_a_request_that_is_cancelled_within_a_layer_ends_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Engine(tiny_models.model("llama")) as engine:
        question = tiny_models.tokens(30, seed=5)
        wanted = engine.prefill(question).logits
        ran = list[int]()
        part = Fusing.part

        def counted(one: Fusing, layer: int, *how: Any, **more: Any) -> Any:
            ran.append(layer)
            return part(one, layer, *how, **more)

        def cancelled() -> None:
            if ran:
                raise CancelledError("enough")

        monkeypatch.setattr(Fusing, "part", counted)
        with monkeypatch.context() as within:
            within.setattr(engine.scheduler.batch, "step_waiting", cancelled)
            with pytest.raises(CancelledError, match="enough"):
                engine.prefill(question)
        assert ran == [0]
        assert torch.equal(engine.prefill(question).logits, wanted)
