"""A long layer pauses between its parts, and its results are the same bits."""

import pytest
import torch
from torch.nn import functional

from ragkv import Engine
from ragkv.errors import CancelledError
from ragkv.model import Rows, adapt, attention, layers, rows, run_layer
from ragkv.model.promptkv import PromptPart
from ragkv.runtime import no_check
from tests import tiny_models
from tests.faults import at_each_layer
from tests.scheduling.helpers import between_layers


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, layers):
        monkeypatch.setattr(module, "TILE_ROWS", 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (6, 2), (3, 3), (4, 1)])
def test_attention_head_by_head_gives_the_same_bits(
    heads: int, kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "attends_in_float32", lambda _: False)
    count = rows.TILE_ROWS + 5
    generator = torch.Generator().manual_seed(heads)
    query, key, value = (
        torch.randn((1, n, count, 16), generator=generator).to(dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    row_range = Rows.span(0, count, torch.device("cpu"))
    seen = list[int]()
    found = attention.attend(query, key, value, row_range, None, 0.25, pause=lambda: seen.append(1))
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
    attention.attend(
        query, kv, kv, Rows.of(torch.tensor(positions)), None, 0.25, pause=lambda: seen.append(1)
    )
    assert len(seen) == len(attention.cut_blocks(positions, None, attention.MOST_ROWS)) > 1


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("family", ["llama", "granite", "cohere2"])
def test_a_layer_of_any_form_pauses_between_the_tiles_of_its_mlp(family: str) -> None:
    """Usual layers are called part by part; others as transformers does, without an argument."""
    adapter = adapt(tiny_models.model(family))
    tokens = torch.tensor(tiny_models.tokens(30, seed=5))
    rows = Rows.span(0, 30, adapter.device)
    tables = adapter.rope.tables(30)
    seen = list[int]()
    with torch.no_grad():
        hidden = adapter.embed(tokens)
        kv = adapter.new_kv(30)
        part = PromptPart(kv, rows, adapter.windows)
        step = adapter.joint_pass(0, [part], *tables.of("", rows), lambda: seen.append(1))
        paused = adapter.call_layer(0, hidden, rows, step)
        whole = run_layer(adapter, 0, hidden, rows, adapter.new_kv(30), tables)
    assert torch.equal(paused, whole)
    assert len(seen) >= 4  # tiles of eight rows
    assert adapter._tiles.pause is no_check


@pytest.mark.usefixtures("small_tiles")
def test_others_decode_within_the_layers_of_a_long_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tiny_models.model("llama")) as engine:
        question = tiny_models.tokens(30, seed=5)
        alone = engine.prefill(question).logits
        layers = engine.model.adapter.layer_count
        called: list[int] = []
        between_layers(monkeypatch, engine, lambda: called.append(1))
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

        def cancelled() -> None:
            if ran:
                raise CancelledError("enough")

        at_each_layer(monkeypatch, ran.append)
        with monkeypatch.context() as within:
            between_layers(within, engine, cancelled)
            with pytest.raises(CancelledError, match="enough"):
                engine.prefill(question)
        assert ran == [0]
        assert torch.equal(engine.prefill(question).logits, wanted)
