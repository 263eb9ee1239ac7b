"""Copies in four bits: of weights on a grid, and equal products for layers that are joined."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from ragkv.model import Adapter
from ragkv.model.cpu import copied, packing
from ragkv.model.cpu.copied import joined
from ragkv.model.cpu.int4 import ATTRIBUTE, Grid, int4_copy
from ragkv.model.cpu.packing import Copies
from ragkv.model.decode.batching import DecodeRow, decode_rows
from ragkv.model.probe import adapt
from ragkv.runtime import FairLock
from ragkv.scheduling import DecodeBatch
from tests import tiny_models


def linear(weights: torch.Tensor, grid: Grid | None, bias: bool = False) -> torch.nn.Linear:
    layer = torch.nn.Linear(*reversed(weights.shape), bias=bias, dtype=torch.bfloat16)
    layer.weight.data = weights.bfloat16()
    setattr(layer, ATTRIBUTE, grid)
    return layer


def on_grid(
    outputs: int, used: int, middle: float, inputs: int = 96, scale: float = 1.0
) -> tuple[torch.Tensor, Grid]:
    """Weights (outputs, inputs) of `used` steps a block, about `middle` steps away from zero, and
    their grid.
    """
    shape = (outputs, inputs // 32, 32)
    chance = torch.Generator().manual_seed(used)
    counts = torch.randint(0, used + 1, shape, generator=chance)
    counts[..., 0], counts[..., 1] = 0, used
    steps = scale * torch.linspace(0.01, 0.3, inputs // 32)[:, None]
    weights = ((counts - 8 + middle) * steps).flatten(1)
    return weights, Grid.through(counts.flatten(1).to(torch.uint8), weights)


needs_int4 = pytest.mark.skipif(
    int4_copy(linear(torch.ones(32, 32), Grid.of_one_value(1.0, 32, 32))) is None,
    reason="torch has no int4 for CPUs",
)


@needs_int4
@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("used", "middle"), [(15, 0), (15, 9), (12, 3), (1, 0)])
def test_weights_on_a_grid_are_multiplied_as_exactly_as_in_bfloat16(
    used: int, middle: float, bias: bool
) -> None:
    weights, grid = on_grid(64, used, middle)
    rows = torch.randn(3, 96).bfloat16()
    plain = linear(weights, grid, bias)
    copy = int4_copy(plain)
    assert copy is not None and copy.bytes < 0.7 * weights.numel()
    exact = torch.nn.functional.linear(
        rows.double(), weights.double(), plain.bias.double() if bias else None
    )
    # an error is relative to what was added, not to the sum
    summed = rows.double().abs() @ weights.double().abs().T
    assert float(((copy.product(rows) - exact).abs() / summed).max()) < 2**-7


@needs_int4
def test_weights_without_a_grid_or_off_theirs_are_not_copied() -> None:
    weights, grid = on_grid(64, 15, 0)
    assert int4_copy(linear(weights, grid)) is not None
    assert int4_copy(linear(weights, None)) is None
    for other in (torch.randn(64, 96), torch.cat((weights[:63], torch.randn(1, 96)))):
        assert int4_copy(linear(other, grid)) is None
    in_float32 = torch.nn.Linear(96, 64)
    in_float32.weight.data = weights
    setattr(in_float32, ATTRIBUTE, grid)
    assert int4_copy(in_float32) is None


@torch.no_grad()
def adapter_on_grids(kv_heads: int = 1) -> Adapter:
    """Of a model in bfloat16 whose weights have four bits."""
    shape = dict(hidden_size=256, intermediate_size=128, num_attention_heads=4, vocab_size=192)
    model = (
        LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=2, num_key_value_heads=kv_heads, initializer_range=0.1, **shape
            )
        )
        .bfloat16()
        .eval()
    )
    for part in model.model.modules():
        if isinstance(part, torch.nn.Linear):
            outputs, inputs = part.weight.shape
            weights, grid = on_grid(outputs, 15, 0, inputs, scale=0.3)
            part.weight.copy_(weights)
            setattr(part, ATTRIBUTE, grid)
    return adapt(model, 1 << 30)


@needs_int4
@torch.no_grad()
def test_a_model_decodes_few_rows_by_joined_copies_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "useful_copies", lambda _: Copies(int4_rows=copied.FEW_ROWS))
    adapter = adapter_on_grids()
    logits = []
    plain = adapter._plain
    assert plain is not None and plain[0]._qkv is not None and plain[0]._gate_up is not None
    for adapter._plain in (plain, None):
        kv = adapter.new_kv(40)
        for count in (1, copied.FEW_ROWS, copied.FEW_ROWS + 1):
            logits.append(decode_rows(adapter, [DecodeRow(kv, 3, drafts=(5,) * (count - 1))]))
    assert all(torch.equal(*pair) for pair in zip(logits[:3], logits[3:], strict=True))
    assert joined([torch.nn.Linear(4, 4)] * 2) is None


def check_steps_from_every_length() -> None:
    """Steps with all the drafts that there is room for give the bits of single rows, wherever they
    begin.
    """
    # in float32
    adapters = {family: adapt(tiny_models.model(family)) for family in tiny_models.FAMILIES}
    packing.useful_copies = lambda _: Copies(int4_rows=copied.FEW_ROWS)
    adapters |= {f"int4 of {kv_heads}": adapter_on_grids(kv_heads) for kv_heads in (1, 2, 4)}
    for name, adapter in adapters.items():
        kv = adapter.new_kv(400)
        single = adapter.new_kv(400)
        for own, other in zip((*kv.keys, *kv.values), (*single.keys, *single.values), strict=True):
            other.copy_(own.normal_())
        slot = batch_of(adapter).slot(kv)
        lengths = (*range(70), *range(188, 194), *range(268, 274), *range(364, 370))
        # a step clears what is behind it
        for kv.length in reversed(lengths if name.startswith("int4") else range(40)):
            single.length, drafts = kv.length, tuple(range(5, 5 + slot.room))
            together = decode_rows(adapter, [DecodeRow(kv, 3, drafts=drafts)])
            one_by_one = [
                decode_rows(adapter, [DecodeRow(single, token)]) for token in (3, *drafts)
            ]
            assert torch.equal(together, torch.cat(one_by_one)), (name, single.length, drafts)
            if not drafts:
                break
        print(f"{name}: {slot.room} drafts")


@needs_int4
# all that the processor has, or no more than most have
@pytest.mark.parametrize("capability", [None, "avx2"])
def test_a_step_with_drafts_gives_the_bits_of_steps_of_single_rows(capability: str | None) -> None:
    environment = os.environ | ({"ATEN_CPU_CAPABILITY": capability} if capability else {})
    code = "from tests.model.test_int4 import check_steps_from_every_length as check; check()"
    subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=Path(__file__).parents[2], check=True
    )


@pytest.mark.parametrize("alike", [True, False])
def test_no_drafts_are_taken_where_rows_change_each_others_products(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, alike: bool
) -> None:
    monkeypatch.setattr(torch.nn.Linear, "forward", row_by_row)
    adapter = adapt(tiny_models.model("llama"))
    plain = adapter.logits
    monkeypatch.setattr(
        adapter, "logits", lambda hidden: plain(hidden) + (0 if alike else hidden.shape[1])
    )
    with caplog.at_level("INFO"):
        assert batch_of(adapter).slot(adapter.new_kv(40)).room == (15 if alike else 0)
    assert ("No drafts" in caplog.text) is not alike


def test_the_first_step_of_a_batch_has_no_drafts() -> None:
    adapter = adapt(tiny_models.model("llama"))
    kv = adapter.new_kv(40)
    with DecodeBatch(adapter, FairLock()).slot(kv) as slot:
        assert slot.room == 0
        slot.verify(3)
        assert slot.room == batch_of(adapter).slot(kv).room


def batch_of(adapter: Adapter) -> DecodeBatch:
    """A batch as its first step leaves it."""
    batch = DecodeBatch(adapter, FairLock())
    batch.most_rows = batch.rows_alike()
    return batch


def row_by_row(layer: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """What a linear layer gives on a processor whose products do not depend on the number
    of rows.
    """
    rows = hidden.reshape(-1, hidden.shape[-1]).split(1)
    return torch.cat([functional.linear(row, layer.weight, layer.bias) for row in rows]).view(
        *hidden.shape[:-1], -1
    )


@needs_int4
def test_drafts_have_room_as_far_as_a_step_has_rows_and_the_kv_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "useful_copies", lambda _: Copies(int4_rows=copied.FEW_ROWS))
    adapter = adapter_on_grids()
    kv = adapter.new_kv(40)
    batch = batch_of(adapter)
    kv.length = 2
    first = batch.slot(kv)
    second = batch.slot(adapter.new_kv(40))
    assert first.room == 1  # two rows each
    second.close()
    assert first.room == copied.FEW_ROWS - 1
    kv.length = kv.capacity - 1
    assert first.room == 0


@torch.no_grad()
def test_a_float16_copy_gives_a_row_the_same_bits_whatever_the_others() -> None:
    copy = packing.float16_copy(torch.nn.Linear(96, 64, dtype=torch.bfloat16))
    rows = torch.randn(6, 96)
    if copy is None:
        pytest.skip("this torch multiplies by no float16 copies")
    assert all(
        torch.equal(copy.product(rows[:count]), copy.product(rows)[:count]) for count in range(1, 6)
    )
