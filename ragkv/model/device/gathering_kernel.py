"""Gathers rows from page-locked memory of the host, by a Triton kernel. The device itself reads
them over the bus, so the host need not know the rows and never waits.

If this is not possible, `ragkv.model.kcache.values` gathers on the host.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_ROWS = 4  # of a program


def gather(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Row `rows[i]` of `values` (n, D), which lie in page-locked memory, as row i (M, D) on the
    device of `rows` (M,); undefined where `rows[i]` is below 0.
    """
    count = rows.numel()
    width = values.shape[1]
    out = torch.empty((count, width), dtype=values.dtype, device=rows.device)
    _gather[(triton.cdiv(count, _ROWS),)](
        values,
        rows,
        out,
        count,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        ROWS=_ROWS,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gather(
    values: Any,
    rows: Any,
    out: Any,
    count: Any,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + place, mask=place < count, other=-1)
    dim = tl.arange(0, PADDED)
    inside = (row >= 0)[:, None] & (dim < WIDTH)[None, :]
    found = tl.load(values + row[:, None] * WIDTH + dim[None, :], mask=inside)
    tl.store(out + place[:, None] * WIDTH + dim[None, :], found, mask=inside)
