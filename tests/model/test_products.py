"""Attention by products: its rounding error, and when it is used."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from ragkv.model import attention
from ragkv.model.cpu import products
from ragkv.model.cpu.products import attend_by_products, products_pay
from ragkv.model.probe import adapt, full_pass
from tests import tiny_models

G, GROUP, ROWS, KEYS, D = 2, 3, 16, 400, 64
SCALING = D**-0.5
TOKENS = torch.tensor(tiny_models.tokens(60, seed=5))
needs_bfloat16 = pytest.mark.skipif(not products.multiplies_bfloat16(), reason="no bfloat16 products on this processor")


@pytest.fixture
def slow_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without AMX."""
    monkeypatch.setattr(products, "kernel_is_faster", lambda: False)


def made(sharpness: float = 1.0, common: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries (G, M, D), keys and values (G, N, D); every score is near `common`."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((G, n, D), generator=generator) for n in (GROUP * ROWS, KEYS, KEYS))
    shift = torch.full((D,), (common / SCALING / D) ** 0.5)
    return (q * sharpness + shift).bfloat16(), (k + shift).bfloat16(), v.bfloat16()


def causal() -> torch.Tensor:
    """The bias of rows at the positions of the last keys."""
    seen = torch.arange(KEYS) <= torch.arange(KEYS - ROWS, KEYS)[:, None]
    return torch.zeros((ROWS, KEYS)).masked_fill_(~seen, float("-inf")).bfloat16().repeat(GROUP, 1)


def error(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> float:
    scores = q.double() @ k.double().transpose(1, 2) * SCALING
    exact = (scores if bias is None else scores + bias.double()).softmax(dim=-1) @ v.double()
    return float((out.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("sharpness", "common"), [(1, 0), (4, 0), (12, 0), (1, 30), (2, 300)])
def test_attention_by_products_rounds_little_more_than_the_kernel(
    sharpness: float, common: float, masked: bool
) -> None:
    q, k, v = made(sharpness, common)
    bias = causal() if masked else None
    kernel = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias, scale=SCALING)[0]
    ours = error(attend_by_products(q, k, v, bias, SCALING), q, k, v, bias)
    assert ours < 4 * error(kernel, q, k, v, bias)
    rounded = torch.bmm(q, k.transpose(1, 2)) * SCALING  # without the offset
    plain = torch.bmm((rounded if bias is None else rounded + bias).softmax(dim=-1), v)
    if common or sharpness > 1:
        assert error(plain, q, k, v, bias) > 1.5 * ours


def test_masked_keys_change_only_the_rounding() -> None:
    q, k, v = made()
    bias = causal()
    bias[:, : KEYS - ROWS - 3] = float("-inf")  # a window: all sampled keys but few are outside
    k[:, :8] *= 40  # and give a bad offset
    assert error(attend_by_products(q, k, v, bias, SCALING), q, k, v, bias) < 0.2
    kept = slice(KEYS - ROWS - 3, None)
    own = attend_by_products(q, k[:, kept], v[:, kept], bias[:, kept], SCALING)
    assert error(own, q, k, v, bias) < 0.01


def queries(rows: int, heads: int = 4, **changes: Any) -> torch.Tensor:
    return torch.zeros((1, heads, rows, D), **{"dtype": torch.bfloat16, **changes})


@needs_bfloat16
@pytest.mark.usefixtures("slow_kernel")
def test_products_are_used_for_many_bfloat16_scores_on_a_cpu() -> None:
    assert products_pay(queries(80), 2, 1000)
    assert not products_pay(queries(80), 2, 100)
    assert not products_pay(queries(80), 2, products.MOST_SCORES_BYTES // 640 + 1)
    assert not products_pay(queries(80, dtype=torch.float32), 2, 1000)
    assert not products_pay(queries(80, device="meta"), 2, 1000)


@needs_bfloat16
def test_products_are_used_for_a_single_row_only_if_no_heads_share_keys() -> None:
    assert products_pay(queries(1), 4, 20)
    assert not products_pay(queries(1), 2, 100_000)


@needs_bfloat16
@pytest.mark.parametrize(("gain", "used"), [(0.7, True), (1.05, True), (1.2, False)])
def test_products_are_not_used_for_many_rows_where_the_kernel_is_clearly_faster(
    gain: float, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "gain_of_second", lambda *_: gain)
    monkeypatch.setattr(products, "kernel_is_faster", products.kernel_is_faster.__wrapped__)  # without its cache
    assert products_pay(queries(80), 2, 1000) is used
    assert products_pay(queries(1), 4, 1000)


def test_products_are_not_used_on_a_cpu_without_bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)
    assert not products_pay(queries(80), 2, 1000)


@needs_bfloat16
@pytest.mark.usefixtures("slow_kernel")
@pytest.mark.parametrize("family", [f for f in tiny_models.FAMILIES if f not in ("mixtral", "qwen3_moe")])
def test_products_do_not_move_a_bfloat16_model_further_from_float32(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def counted(*parts: Any) -> torch.Tensor:
        taken.append(1)
        return attend_by_products(*parts)

    def logits(dtype: torch.dtype) -> torch.Tensor:
        model = tiny_models.model(family)
        for weight in model.parameters():  # not the buffers: frequencies stay what they are
            weight.data = weight.data.bfloat16().to(dtype)
        adapter = adapt(model)
        kv = adapter.new_kv(len(TOKENS))
        full_pass(adapter, TOKENS[:30], kv)
        return adapter.logits(full_pass(adapter, TOKENS[30:], kv, 30))

    monkeypatch.setattr(attention, "attend_by_products", counted)
    monkeypatch.setattr(products, "FEWEST_SCORES", 0)
    exact = logits(torch.float32)
    assert not taken
    by_products = logits(torch.bfloat16)
    assert bool(taken) is (family != "gemma2")  # which caps its scores
    monkeypatch.setattr(attention, "products_pay", lambda *_: False)
    by_kernel = logits(torch.bfloat16)
    assert (by_products - exact).norm() < 1.5 * (by_kernel - exact).norm()
