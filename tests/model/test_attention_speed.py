"""Attention in the dtype in which this processor computes it faster."""

import pytest
import torch

from ragkv.model import attention
from ragkv.model.cpu import attention_speed
from ragkv.model.cpu.attention_speed import LEAST_ROWS, attends_in_float32
from ragkv.model.rows import TILE_ROWS, Rows

KEYS = 700
SCATTERED = torch.arange(0, KEYS, 9)
ALL = torch.arange(KEYS)
FEW = torch.arange(KEYS - LEAST_ROWS + 1, KEYS)


def attended(
    positions: torch.Tensor, dtype: torch.dtype, window: int | None, softcap: float | None
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn((1, heads, rows, 16), generator=generator).bfloat16().to(dtype)
        for heads, rows in ((4, len(positions)), (2, KEYS), (2, KEYS))
    )
    return attention.attend(q, k, v, Rows.of(positions), window, 0.25, softcap)


@pytest.mark.parametrize("positions", [SCATTERED, ALL, ALL[:TILE_ROWS], ALL[90:]], ids=len)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, None), (None, 2.0)])
def test_where_float32_is_faster_rows_have_its_attention_rounded_once(
    positions: torch.Tensor,
    window: int | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "attends_in_float32", lambda dtype: dtype is torch.bfloat16)
    found = attended(positions, torch.bfloat16, window, softcap)
    wanted = attended(positions, torch.float32, window, softcap)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, wanted.bfloat16())


def test_few_rows_attend_in_the_dtype_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for answer in (True, False):
        monkeypatch.setattr(attention, "attends_in_float32", lambda _, answer=answer: answer)
        found.append(attended(FEW, torch.bfloat16, None, None))
    assert torch.equal(*found)


def test_what_is_faster_is_measured_for_half_precision_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = attends_in_float32.__wrapped__
    for gain in (0.5, 2.0):
        monkeypatch.setattr(attention_speed, "gain_of_second", lambda *_, gain=gain: gain)
        assert measured(torch.bfloat16) is measured(torch.float16) is (gain > 1)
        assert measured(torch.float32) is measured(torch.float64) is False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_timed_ways_differ_by_rounding(dtype: torch.dtype) -> None:
    queries = torch.randn((3, attention_speed.HEAD_DIM)).to(dtype)
    own, wide = (way(queries) for way in attention_speed._ways(dtype))
    assert own.dtype is wide.dtype is dtype
    torch.testing.assert_close(own, wide, atol=0.01, rtol=0.01)
