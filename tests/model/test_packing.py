"""Packed weights: equal products, bounded memory, an unchanged model."""

import pytest
import torch

from ragkv.model import packing
from ragkv.model.packing import PackedLinear, Packing
from ragkv.model.probe import adapt, full_pass
from tests import tiny_models

CPU = torch.device("cpu")
TOKENS = torch.tensor(tiny_models.tokens(29, seed=3))
MUCH = 1 << 30
DENSE = [
    family for family in tiny_models.FAMILIES if family not in ("mixtral", "qwen3_moe")
]  # rounding changes the routing to experts
needs_operators = pytest.mark.skipif(not packing._is_possible(), reason="no packed bfloat16 on this processor")


def linear(rows: int = 4, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Linear:
    return torch.nn.Linear(6, rows, dtype=dtype)


def packed_bytes(*modules: torch.nn.Module) -> int:
    parts = [part for module in modules for part in module.modules() if isinstance(part, PackedLinear)]
    return sum(part.weight.numel() * part.weight.element_size() for part in parts)


@needs_operators
@pytest.mark.parametrize("family", DENSE)
def test_a_packed_model_gives_the_logits_of_the_plain_one(family: str) -> None:
    model = tiny_models.model(family).to(torch.bfloat16)
    before = {name: type(part) for name, part in model.named_modules()}
    logits = []
    for limit in (0, MUCH):
        adapter = adapt(model, limit)
        assert bool(packed_bytes(*adapter.layers, adapter._head)) is bool(limit)
        kv = adapter.new_kv(len(TOKENS))
        logits.append(adapter.logits(full_pass(adapter, TOKENS, kv)))
        logits.append(kv.keys[-1])
    torch.testing.assert_close(
        logits[2:], logits[:2], atol=2e-2, rtol=2e-2
    )  # a bias may be added before or after rounding
    assert {name: type(part) for name, part in model.named_modules()} == before


@needs_operators
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_packed_weights_are_equal_bit_for_bit(rows: int, bias: bool) -> None:
    plain = torch.nn.Linear(48, 20, bias=bias, dtype=torch.bfloat16)
    hidden = torch.randn((1, rows, 48), generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        assert torch.equal(PackedLinear(plain)(hidden), plain(hidden))


@needs_operators
def test_packed_copies_stay_below_the_memory_limit() -> None:
    adapter = adapt(tiny_models.model("llama").to(torch.bfloat16), MUCH)
    whole = packed_bytes(*adapter.layers, adapter._head)
    assert adapter.packed_bytes == whole
    limit = whole // 2
    some = adapt(adapter.model, limit)
    assert 0 < packed_bytes(*some.layers, some._head) <= limit


@needs_operators
def test_a_linear_layer_with_hooks_or_other_weights_is_not_packed() -> None:
    hooked, wrapped, quantised = linear(), linear(), linear()
    hooked.register_forward_hook(lambda *_: None)
    wrapped.forward = lambda hidden: hidden  # type: ignore[method-assign]
    quantised.weight = type("Quantised", (torch.nn.Parameter,), {})(quantised.weight)
    for module in (hooked, wrapped, quantised, linear(dtype=torch.float32), torch.nn.ModuleList([hooked])):
        assert Packing(MUCH, CPU).of(module) is module
    assert isinstance(Packing(MUCH, CPU).of(linear()), PackedLinear)


def test_nothing_is_packed_where_the_operators_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(packing.PackedLinear, "__init__", missing)
    plain = linear()
    assert Packing(MUCH, CPU).of(plain) is plain


def test_nothing_is_packed_for_another_device() -> None:
    plain = linear()
    assert Packing(MUCH, torch.device("cuda")).of(plain) is plain
