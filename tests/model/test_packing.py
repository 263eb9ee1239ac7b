"""Copies of weights: equal products, bounded memory, an unchanged model."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv.model.cpu import copied, packing, product_speed
from ragkv.model.cpu.copied import FEW_ROWS, CopiedLinear, PackedLinear
from ragkv.model.cpu.packing import (
    FLOAT32_ROWS,
    LOST,
    Copies,
    copies_reach_float32,
    float16_copy,
    useful_copies,
    with_copies,
)
from ragkv.model.probe import adapt, full_pass
from tests import tiny_models
from tests.faults import raising

CPU = torch.device("cpu")
TOKENS = torch.tensor(tiny_models.tokens(29, seed=3))
MUCH = 1 << 30
DENSE = [
    family for family in tiny_models.FAMILIES if family not in ("mixtral", "qwen3_moe")
]  # rounding changes the routing to experts
needs_operators = pytest.mark.skipif(
    not packing._packs_bfloat16(), reason="no packed bfloat16 on this processor"
)


def linear(rows: int = 4, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Linear:
    return torch.nn.Linear(6, rows, dtype=dtype)


def widened(module: Any) -> Any:
    """`module` with the weights of a bfloat16 checkpoint that was loaded in float32."""
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return module


needs_float16 = pytest.mark.skipif(
    float16_copy(widened(torch.nn.Linear(2, 2))) is None,
    reason="no float16 copies on this processor",
)


def copied_bytes(*modules: torch.nn.Module) -> int:
    # a float16 copy holds the packed layer, if any
    parts = [part for module in modules for part in module.modules()]
    return sum(
        2 * part.weight.numel() for part in parts if isinstance(part, PackedLinear | CopiedLinear)
    )


def with_copy(
    module: torch.nn.Module, limit_bytes: int = MUCH, device: torch.device = CPU
) -> torch.nn.Module:
    return with_copies([module], limit_bytes, device)[0][0]


@needs_operators
@pytest.mark.parametrize("family", DENSE)
def test_a_packed_model_gives_the_logits_of_the_plain_one(family: str) -> None:
    # when a bias is added differs
    assert_copies_change_nothing(tiny_models.model(family).to(torch.bfloat16), 2e-2)


@needs_float16
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_float16_copies_do_not_change_the_logits_of_a_bfloat16_checkpoint_in_float32(
    family: str,
) -> None:
    assert_copies_change_nothing(widened(tiny_models.model(family)), 1e-5)


def assert_copies_change_nothing(model: Any, tolerance: float) -> None:
    before = {name: type(part) for name, part in model.named_modules()}
    logits = []
    for limit in (0, MUCH):
        adapter = adapt(model, limit)
        assert bool(copied_bytes(*adapter.layers, adapter._head)) is bool(limit)
        kv = adapter.new_kv(len(TOKENS))
        logits.append(adapter.logits(full_pass(adapter, TOKENS, kv)))
        logits.append(kv.keys[-1][:, :, : len(TOKENS)])
    torch.testing.assert_close(logits[2:], logits[:2], atol=tolerance, rtol=tolerance)
    assert {name: type(part) for name, part in model.named_modules()} == before


@needs_operators
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_packed_weights_are_equal_bit_for_bit(rows: int, bias: bool) -> None:
    plain = torch.nn.Linear(48, 20, bias=bias, dtype=torch.bfloat16)
    hidden = torch.randn((1, rows, 48), generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        assert torch.equal(PackedLinear(plain)(hidden), plain(hidden))


@needs_float16
class TestFloat16Copies:
    def test_their_products_are_those_of_float32(self) -> None:
        for bias in (False, True):
            plain = widened(torch.nn.Linear(48, 20, bias=bias))
            layer = layer_over_copy(plain, most_rows=FLOAT32_ROWS)
            for rows in (0, 1, 5, FLOAT32_ROWS, FLOAT32_ROWS + 1):
                hidden = torch.randn((1, rows, 48), generator=torch.Generator().manual_seed(0))
                exact = torch.nn.functional.linear(
                    hidden.double(), plain.weight.double(), double(plain.bias)
                )
                with torch.no_grad():
                    torch.testing.assert_close(layer(hidden).double(), exact, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("scale", [2.0**-40, 1e-3, 1.0, 1e4, 2.0**40])
    def test_weights_of_any_size_are_held_and_none_loses_more_than_float32_sums_do(
        self, scale: float
    ) -> None:
        plain = widened(torch.nn.Linear(64, 64, bias=False))
        with torch.no_grad():
            plain.weight.normal_().mul_(scale).copy_(plain.weight.bfloat16())
            plain.weight[0] *= 2.0**-14  # a row that is small next to the others keeps its digits
            layer = layer_over_copy(plain, most_rows=1)
            held = torch.stack([layer(row[None])[0] for row in torch.eye(64)], dim=1)
            assert ((held - plain.weight).norm(dim=1) <= plain.weight.norm(dim=1) * LOST).all()

    def test_weights_that_float16_does_not_hold_are_not_copied(self) -> None:
        precise, wide, infinite, empty = (torch.nn.Linear(64, 64, bias=False) for _ in range(4))
        with torch.no_grad():
            # one weight with more digits
            precise.weight.copy_(widened(precise).weight)[5, 6] = 1 / 3
            # a row far below the greatest weight
            wide.weight.zero_()[0, 0], wide.weight[7] = 1.0, 2.0**-36 * 1.125
            infinite.weight.fill_(1.0)[0, 0] = math.inf
            empty.weight.zero_()
        assert [float16_copy(plain) for plain in (precise, wide, infinite, empty)] == [None] * 4


def layer_over_copy(plain: torch.nn.Linear, most_rows: int) -> CopiedLinear:
    copy = float16_copy(plain)
    assert copy is not None
    return CopiedLinear(plain, copy, most_rows)


def double(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.double()


@needs_operators
def test_a_linear_layer_with_hooks_or_other_weights_is_not_packed() -> None:
    hooked = linear()
    wrapped = linear()
    quantised = linear()
    hooked.register_forward_hook(lambda *_: None)
    wrapped.forward = lambda hidden: hidden  # type: ignore[method-assign]
    quantised.weight = type("Quantised", (torch.nn.Parameter,), {})(quantised.weight)
    for module in (
        hooked,
        wrapped,
        quantised,
        linear(dtype=torch.float16),
        torch.nn.ModuleList([hooked]),
    ):
        assert with_copy(module) is module
    assert isinstance(with_copy(plain := linear()), PackedLinear | CopiedLinear)
    assert with_copy(plain, device=torch.device("cuda")) is plain


@pytest.fixture
def _measured_again() -> Iterator[None]:
    """Nothing that is measured or tried with other functions is remembered."""
    tried = (packing._packs_bfloat16, packing.useful_copies, packing.copies_reach_float32)
    for function in tried:
        function.cache_clear()
    yield
    for function in tried:
        function.cache_clear()


@pytest.mark.usefixtures("_measured_again")
def test_nothing_is_copied_where_the_operators_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = raising(AttributeError("no such operator"))
    monkeypatch.setattr(PackedLinear, "__init__", missing)
    monkeypatch.setattr(copied.Float16Copy, "product", missing)
    for dtype in (torch.bfloat16, torch.float32):
        plain = linear(dtype=dtype)
        assert with_copy(plain) is plain
    assert not copies_reach_float32()


@needs_float16
@pytest.mark.usefixtures("_measured_again")
def test_without_products_in_bfloat16_its_layers_read_float16_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "multiplies_bfloat16", lambda: False)
    for gain, reached in ((1.0, True), (0.95, True), (0.8, False)):
        monkeypatch.setattr(packing, "_gain_of", lambda *_, gain=gain: gain)
        packing.copies_reach_float32.cache_clear()
        assert copies_reach_float32() is reached
    plain = torch.nn.Linear(48, 20, dtype=torch.bfloat16)
    layer = with_copy(plain)
    assert isinstance(layer, CopiedLinear)
    for rows in (1, FLOAT32_ROWS + 1, 600):  # whatever their number
        hidden = torch.randn((1, rows, 48), generator=torch.Generator().manual_seed(0)).bfloat16()
        with torch.no_grad():
            found = layer(hidden)
            exact = torch.nn.functional.linear(
                hidden.double(), plain.weight.double(), double(plain.bias)
            )
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=2**-8)  # rounded once


@needs_float16
@pytest.mark.usefixtures("_measured_again")
def test_whether_copies_pay_is_measured_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "multiplies_bfloat16", lambda: True)
    for without_s, copy_s, float32_rows, bfloat16_rows in (
        (2.0, 1.0, math.inf, FEW_ROWS),
        (1.0, 2.0, FLOAT32_ROWS, 0),
    ):
        monkeypatch.setattr(
            product_speed, "cache_folder", lambda _, name=str(copy_s): tmp_path / name
        )
        for dtype, rows in ((torch.float32, float32_rows), (torch.bfloat16, bfloat16_rows)):
            times = iter((without_s, copy_s) * product_speed.PAIR_ROUNDS * 2)  # also of four bits
            monkeypatch.setattr(product_speed, "_seconds", lambda *_, times=times: next(times))
            for _ in range(2):  # the second one reads what the first has kept
                packing.useful_copies.cache_clear()
                assert useful_copies(dtype).float16_rows == rows


@needs_operators
@needs_float16
def test_a_bfloat16_layer_with_both_copies_uses_float16_for_one_and_two_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = torch.nn.Linear(48, 20, dtype=torch.bfloat16)
    monkeypatch.setattr(
        packing, "useful_copies", lambda _: Copies(packed=True, float16_rows=FEW_ROWS)
    )
    [layer], size = with_copies([plain], MUCH, CPU)
    assert isinstance(layer, CopiedLinear) and isinstance(layer.many, PackedLinear)
    assert size == 2 * 2 * plain.weight.numel()
    hidden = torch.randn(
        (1, FEW_ROWS + 1, 48), generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    with torch.no_grad():
        assert torch.equal(layer(hidden), plain(hidden))
        # it is not asked
        few = hidden[:, :FEW_ROWS]
        layer.many = torch.nn.Identity()
        in_float32 = torch.nn.functional.linear(
            few.float(), plain.weight.float(), plain.bias.float()
        )
        # rounded once
        torch.testing.assert_close(layer(few), in_float32.bfloat16(), atol=1e-6, rtol=2**-7)


@needs_operators
@needs_float16
def test_every_layer_gets_the_copy_for_any_rows_before_one_gets_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        packing, "useful_copies", lambda _: Copies(packed=True, float16_rows=FEW_ROWS)
    )
    parts = [linear() for _ in range(3)]
    size = 2 * parts[0].weight.numel()
    kinds = {
        2 * size + 1: [PackedLinear, PackedLinear, torch.nn.Linear],
        4 * size: [CopiedLinear, PackedLinear, PackedLinear],
        6 * size: [CopiedLinear] * 3,
    }
    for limit, wanted in kinds.items():
        made, taken = with_copies(parts, limit, CPU)
        assert [type(part) for part in made] == wanted
        assert taken == limit // size * size == copied_bytes(*made)


@needs_float16
def test_copies_leave_memory_free_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [widened(linear(dtype=torch.float32)) for _ in range(3)]
    size = 2 * parts[0].weight.numel()
    monkeypatch.setattr(packing, "available_bytes", lambda: packing.SPARE_BYTES + 2 * size)
    assert with_copies(parts, MUCH, CPU)[1] == 2 * size
    assert "of memory are free" in caplog.text
    caplog.clear()
    assert with_copies(parts[:2], MUCH, CPU)[1] == 2 * size
    assert caplog.text == ""


@needs_float16
def test_bfloat16_layers_that_stay_slow_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packing, "useful_copies", lambda _: Copies(float16_rows=math.inf))
    plain = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight.zero_()[0, 0], plain.weight[7] = 1.0, 2.0**-36 * 1.125
    assert with_copy(plain) is plain
    assert "1 linear layers in bfloat16 are slow" in caplog.text


@needs_float16
def test_layers_that_share_their_weights_in_a_model_are_copied_once() -> None:
    shared = widened(linear(dtype=torch.float32))
    made, size = with_copies([shared, torch.nn.ModuleList([shared])], MUCH, CPU)
    assert made[1][0] is made[0] and size == 2 * shared.weight.numel()  # type: ignore[index]
