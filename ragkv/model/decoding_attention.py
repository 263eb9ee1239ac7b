"""Attention of the rows that decode. Each row has the same bits as in a step of its own.

The rows of a prompt attend over whole blocks of `KEY_BLOCK` keys, those of one block together, and
a KV head has at least `LEAST_QUERIES` and at most `MOST_QUERIES` queries. Then MKL, which SDPA
calls, adds in the same order for any number of rows. SDPA tiles 32 queries.
"""

import math

import torch
from torch.nn import functional

from .attention import KEY_BLOCK, attend, attend_span, whole_blocks
from .rows import Rows

LEAST_QUERIES = 4
MOST_QUERIES = 32


def attend_decoding(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    rows: Rows,
    window: int | None,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Exact attention of rows in a step, (1, H, R, D); on a CPU each has the bits that it has in a
    step of its own.

    Keys and values (1, G, T, D) go on to the end of the last row's block; what follows its position
    is finite.
    """
    count = q_rot.shape[2]
    on_cpu = q_rot.device.type == "cpu"
    together = on_cpu and softcap is None and (window is None or rows.stop <= window)
    start = rows.stop - count
    most = 1 if on_cpu else count
    if together:
        most = min(
            max(1, MOST_QUERIES * k_rot.shape[1] // q_rot.shape[1]), KEY_BLOCK - start % KEY_BLOCK
        )
    if count > most:
        if (parts := rows.cache.get(most)) is None:  # all layers need them
            parts = rows.cache[most] = [
                Rows(rows.positions[:most], start),
                Rows(rows.positions[most:], start + most),
            ]
        split = zip(torch.split(q_rot, [most, count - most], dim=2), parts, strict=True)
        return torch.cat(
            [attend_decoding(q, k_rot, v, part, window, scaling, softcap) for q, part in split],
            dim=2,
        )
    if together:
        return _attend_blocks(q_rot, k_rot, v, rows, scaling)
    end = rows.stop if on_cpu else whole_blocks(rows.stop)
    return attend(q_rot, k_rot[:, :, :end], v[:, :, :end], rows, window, scaling, softcap)


def _attend_blocks(
    q_rot: torch.Tensor, k_rot: torch.Tensor, v: torch.Tensor, rows: Rows, scaling: float
) -> torch.Tensor:
    """Attention of few contiguous rows (1, H, R, D) over whole blocks of keys (1, G, T, D): (1, H,
    R, D).
    """
    (_, kv_heads, _, head_dim), stop = k_rot.shape, whole_blocks(rows.stop)
    queries = q_rot.reshape(1, kv_heads, -1, head_dim)
    if spare := max(0, LEAST_QUERIES - queries.shape[2]):
        queries = functional.pad(queries, (0, 0, 0, spare))
    if (bias := rows.cache.get(q_rot.dtype)) is None:
        last = functional.pad(rows.positions.repeat(q_rot.shape[1] // kv_heads), (0, spare))[
            :, None
        ]
        unseen = torch.arange(stop) > last
        bias = rows.cache[q_rot.dtype] = torch.zeros(unseen.shape, dtype=q_rot.dtype).masked_fill_(
            unseen, -math.inf
        )
    k_rot = k_rot.narrow(2, 0, stop)
    v = v.narrow(2, 0, stop)
    out = attend_span(queries, k_rot, v, bias, scaling, None)
    return (out.narrow(2, 0, out.shape[2] - spare) if spare else out).reshape(q_rot.shape)
