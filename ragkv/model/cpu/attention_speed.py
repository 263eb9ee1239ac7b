"""Finds the dtype in which this processor attends faster: the model's own, or float32.

torch's kernel for CPUs multiplies 16 bits through MKL. Some processors have no fast instructions
for 16 bits, or MKL does not use them. There float32 is faster, although keys and values must be
converted first. On a Xeon with AVX512_BF16 and without AMX, 16 bits reach .6 to .75 of the speed of
float32.
"""

from functools import cache, partial

import torch
from torch.nn import functional

from .product_speed import Product, gain_of_second

# The rows, keys and dimensions of the attention that is timed; several query heads share the keys.
ROWS = 192
KEYS = 1024
HEAD_DIM = 64
# Fewer rows attend in the model's own dtype: converting keys would take longer than is gained.
LEAST_ROWS = 16


@cache
def attends_in_float32(dtype: torch.dtype) -> bool:
    """Whether many rows in `dtype` attend faster in float32 here, converted there and back."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    queries = torch.ones((ROWS, HEAD_DIM), dtype=dtype, device="cpu")
    subject = {"attention": [KEYS, HEAD_DIM], "dtype": str(dtype)}
    return gain_of_second(subject, partial(_ways, dtype), queries) > 1


def _ways(dtype: torch.dtype) -> list[Product]:
    """Attention of queries (R, D) in `dtype` and in float32."""
    keys = torch.ones((1, 1, KEYS, HEAD_DIM), dtype=dtype, device="cpu")

    def attend(queries: torch.Tensor, computed_in: torch.dtype) -> torch.Tensor:
        wide = keys.to(computed_in)
        out = functional.scaled_dot_product_attention(
            queries[None, None].to(computed_in), wide, wide
        )
        return out.to(dtype)

    return [partial(attend, computed_in=each) for each in (dtype, torch.float32)]
