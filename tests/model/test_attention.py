"""Attention with a soft cap on a processor that does not multiply bfloat16."""

import pytest
import torch

from ragkv.model import attention
from ragkv.model.rows import Rows


@pytest.mark.parametrize("positions", [(5,), (1, 2, 5, 9)])
def test_products_of_a_soft_cap_are_computed_in_float32(
    positions: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn((1, heads, rows, 8), generator=generator).bfloat16()
        for heads, rows in ((4, len(positions)), (2, 10), (2, 10))
    )
    rows = Rows.of(torch.tensor(positions))
    monkeypatch.setattr(attention, "multiplies_bfloat16", lambda: False)
    found = attention.attend(q, k, v, rows, None, 0.35, 3.0)
    wanted = attention.attend(q.float(), k.float(), v.float(), Rows.of(rows.positions), None, 0.35, 3.0)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, wanted.bfloat16())
    monkeypatch.setattr(attention, "multiplies_bfloat16", lambda: True)
    in_bfloat16 = attention.attend(q, k, v, Rows.of(rows.positions), None, 0.35, 3.0)
    torch.testing.assert_close(in_bfloat16, found, atol=0.03, rtol=0.03)
