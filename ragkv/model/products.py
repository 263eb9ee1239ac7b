"""Attention as two matrix products and a softmax, for bfloat16 on a CPU that multiplies it.

PyTorch's kernel takes 3.7 ns of one thread for a pair of row and key of 64 dimensions, these take 2.2: the products run
at the speed of any others, the kernel's are of small tiles. What stands against it is rounding: a product of bfloat16
gives bfloat16, and a score of 100 in 8 bits is wrong by a quarter. So each row's scores are measured from an offset
near its greatest one, to which the product is added before anything is rounded: the softmax does not heed it, and
scores that weigh are small numbers. Their error is then like that of the weights, which the kernel rounds to bfloat16
too.
"""

from functools import cache

import torch

SAMPLED = 8  # of the keys, every so many-th tells a row's offset: nearer costs time, farther accuracy
FEWEST_SCORES = 1 << 18  # below, the calls cost what the products save
MOST_SCORES_BYTES = 64 << 20  # above, they are left to the kernel, which keeps none


def pays(q: torch.Tensor, kv_heads: int, keys: int) -> bool:
    """Whether rows (1, H, R, D) over so many keys are attended faster this way.

    One row is, three to four times, where each head has keys of its own, and mostly not where heads share them.
    """
    _, heads, count, _ = q.shape
    scores = heads * count * keys
    enough = heads == kv_heads if count == 1 else scores >= FEWEST_SCORES
    fits = scores * q.element_size() <= MOST_SCORES_BYTES
    return enough and fits and q.dtype is torch.bfloat16 and q.device.type == "cpu" and multiplies_bfloat16()


def attend_by_products(
    q_rot: torch.Tensor, k_rot: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Rows (G, M, D) over keys and values (G, N, D), `bias` (R, N) added to every R rows' scores -> (G, M, D)."""
    keys = k_rot.contiguous()  # a transposed part of a longer one would be copied column by column
    some = keys[:, ::SAMPLED].contiguous()
    offset = torch.bmm(q_rot, some.transpose(1, 2)).amax(dim=-1, keepdim=True).mul_(scaling)
    if bias is None:
        scores = offset.neg().repeat(1, 1, keys.shape[1])
    else:
        by_head = offset.view(keys.shape[0], -1, bias.shape[0], 1)  # (G, M / R, R, 1)
        scores = (bias - by_head).flatten(1, 2)
    scores.baddbmm_(q_rot, keys.transpose(1, 2), alpha=scaling)
    return torch.bmm(torch.softmax(scores, dim=-1, out=scores), v)


@cache
def multiplies_bfloat16() -> bool:
    """Whether this torch and processor multiply bfloat16, and not by way of float32: asked once."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
