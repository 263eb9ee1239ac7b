"""Attention as two matrix products and a softmax, for bfloat16 on a CPU that multiplies it fast.

PyTorch's kernel takes 3.7 ns of one thread per pair of row and key with 64 dimensions, these products take 2.2 ns,
because the kernel multiplies small tiles. The difficulty is rounding: a bfloat16 product returns bfloat16, and a score
of 100 with 8 bits is wrong by a quarter. So an offset near the row's largest score is subtracted from each row before
anything is rounded. The softmax does not change, and the scores with a large weight become small numbers. Their error
is then similar to that of the weights, which the kernel also rounds to bfloat16.
"""

import torch

from .product_speed import multiplies_bfloat16

SAMPLED = 8  # every 8th key estimates a row's offset: more keys cost time, fewer cost accuracy
FEWEST_SCORES = 1 << 18  # with fewer, the calls cost more than the products save
MOST_SCORES_BYTES = 64 << 20  # above, the kernel is used, which does not store the scores


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
    return enough and fits and plain and q.device.type == "cpu" and multiplies_bfloat16()


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
