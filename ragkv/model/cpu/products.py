"""Attention as two matrix products and a softmax, for bfloat16 on a CPU that multiplies it fast.

PyTorch's kernel takes 3.7 ns of one thread per pair of row and key with 64 dimensions, these products take 2.2 ns,
because the kernel multiplies small tiles. Where it has better ones, as it may with AMX, it is used: both are timed once
on a machine. The difficulty is rounding: a bfloat16 product returns bfloat16, and a score
of 100 with 8 bits is wrong by a quarter. So an offset near the row's largest score is subtracted from each row before
anything is rounded. The softmax does not change, and the scores with a large weight become small numbers. Their error
is then similar to that of the weights, which the kernel also rounds to bfloat16.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.nn import functional

from .product_speed import gain_of_second, multiplies_bfloat16

SAMPLED = 8  # Every 8th key estimates a row's offset: more keys cost time, fewer cost accuracy.
FEWEST_SCORES = 1 << 18  # With fewer scores than this, the calls cost more than the products save.
MOST_SCORES_BYTES = 64 << 20  # Above this size the kernel is used, because it does not store the scores.
# The attention that is timed has so many KV heads, query heads of each, rows, keys and dimensions.
TIMED = (2, 7, 32, 1024, 64)
KERNEL_GAIN = 1.1  # The kernel is used where it is so many times as fast.


def products_pay(q: torch.Tensor, kv_heads: int, keys: int, softcap: float | None = None) -> bool:
    """Whether `attend_by_products` can be used for rows (1, H, R, D) over `keys` keys, and is faster.

    Products cannot cap scores. One row is three to four times faster if each head has its own keys, and mostly not
    faster if heads share them.
    """
    _, heads, count, _ = q.shape
    scores = heads * count * keys
    enough = heads == kv_heads if count == 1 else scores >= FEWEST_SCORES
    fits = scores * q.element_size() <= MOST_SCORES_BYTES
    plain = softcap is None and q.dtype is torch.bfloat16
    usable = enough and fits and plain and q.device.type == "cpu" and multiplies_bfloat16()
    return usable and (count == 1 or not kernel_is_faster())


@cache
def kernel_is_faster() -> bool:
    """Whether torch's kernel takes clearly less time than products for many rows; timed on this machine once."""
    kv_heads, group, count, keys, head_dim = TIMED

    def both() -> Sequence[Callable[[torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        k, v = torch.randn((2, kv_heads, keys, head_dim), generator=generator).bfloat16()
        bias, scaling = torch.zeros((count, keys), dtype=torch.bfloat16), head_dim**-0.5
        wide = bias.repeat(group, 1)

        def by_products(rows: torch.Tensor) -> torch.Tensor:
            return attend_by_products(rows.view(kv_heads, -1, head_dim), k, v, bias, scaling)

        def by_kernel(rows: torch.Tensor) -> torch.Tensor:
            q = rows.view(1, kv_heads, -1, head_dim)
            return functional.scaled_dot_product_attention(q, k[None], v[None], attn_mask=wide, scale=scaling)

        return by_products, by_kernel

    rows = torch.ones((kv_heads * group * count, head_dim), dtype=torch.bfloat16)
    return gain_of_second({"attention": list(TIMED)}, both, rows) >= KERNEL_GAIN


def attend_by_products(
    q_rot: torch.Tensor, k_rot: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Rows (G, M, D) over keys and values (G, N, D), with `bias` (R, N) added to every R rows' scores -> (G, M, D)."""
    keys = k_rot.contiguous()  # the transpose of a view would be copied column by column
    some = keys[:, ::SAMPLED].contiguous()
    offset = torch.bmm(q_rot, some.transpose(1, 2)).amax(dim=-1, keepdim=True).mul_(scaling)
    if bias is None:
        scores = offset.neg().repeat(1, 1, keys.shape[1])
    else:
        by_head = offset.view(keys.shape[0], -1, bias.shape[0], 1)  # (G, M / R, R, 1)
        scores = (bias - by_head).flatten(1, 2)
    scores.baddbmm_(q_rot, keys.transpose(1, 2), alpha=scaling)
    return torch.bmm(torch.softmax(scores, dim=-1, out=scores), v)
