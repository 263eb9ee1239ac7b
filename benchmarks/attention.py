"""Attention of scattered rows in bfloat16: PyTorch's kernel against two products and a softmax.

    python -m benchmarks.attention [--quick] [--threads 1]

One block of rows, evenly spread over the last third of the keys, as in a fused prefill. The table has nanoseconds per
pair of row and key of a head, medians of alternating runs, and the relative error against float64.
"""

from functools import partial

import torch
from torch.nn import functional

from benchmarks import report
from ragkv.model.cpu.products import attend_by_products, multiplies_bfloat16

HEADS = ((14, 2, 64), (32, 8, 64), (32, 8, 128), (16, 16, 64))  # query heads, KV heads, dimensions
BLOCKS = ((1, 1600), (8, 1600), (28, 300), (28, 1600), (37, 3104), (96, 3104))  # rows, keys


def main() -> None:
    parser = report.parser(__doc__, quick="three runs of each", threads=1, runs=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not multiplies_bfloat16():
        print("This processor does not multiply bfloat16, so products are not used on it.")
    rows = []
    for heads, kv_heads, head_dim in HEADS:
        for count, keys in BLOCKS:
            q, k, v, bias = _block(heads // kv_heads, kv_heads, head_dim, count, keys)
            ways = {"kernel": _kernel, "products": attend_by_products}
            calls = {name: partial(way, q, k, v, bias, head_dim**-0.5) for name, way in ways.items()}
            with torch.inference_mode():
                seconds = report.alternate(calls, 3 if options.quick else options.runs)
                errors = {name: _error(call(), q, k, v, bias, head_dim**-0.5) for name, call in calls.items()}
            pair = {name: f"{1e9 * value / (heads * count * keys):.2f}" for name, value in seconds.items()}
            gain = f"{seconds['kernel'] / seconds['products']:.2f}x"
            rows.append((f"{heads}/{kv_heads} x {head_dim}", count, keys, pair["kernel"], pair["products"], gain,
                         f"{errors['kernel']:.4f}", f"{errors['products']:.4f}"))  # fmt: skip
    report.table(("heads", "rows", "keys", "kernel ns", "products ns", "gain", "kernel error", "products error"), rows)
    print("written:", report.save(f"attention-{options.threads}", [list(row) for row in rows]))


def _block(
    group: int, kv_heads: int, head_dim: int, count: int, keys: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Random queries (G, group * R, D), keys and values (G, N, D), and the bias of the rows' positions."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((kv_heads, n, head_dim) for n in (group * count, keys, keys))
    q, k, v = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    if count == 1:
        return q, k, v, None
    places = torch.linspace(keys * 2 // 3, keys - 1, count).long()
    bias = torch.zeros((count, keys)).masked_fill_(torch.arange(keys) > places[:, None], float("-inf"))
    return q, k, v, bias.bfloat16().repeat(group, 1)


def _kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias, scale=scaling)[0]


def _error(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> float:
    scores = q.double() @ k.double().transpose(1, 2) * scaling
    exact = (scores if bias is None else scores + bias.double()).softmax(dim=-1) @ v.double()
    return float((out.double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
