"""Attention of one decoded token with the V rows of its N largest weights (KCache section 3.1).

The softmax runs over all keys in float32. Each query head uses its N largest weights unchanged. The rows that the query
heads of one KV head need are fetched once: U rows, N <= U <= N H / G, instead of all S. This file does not know where
values are stored: a row is `position * G + KV head`, and the caller's `fetch` reads it.

The scores come from a matmul in the model's dtype, as in transformers' eager attention. In half precision they are
rounded before the softmax, which flash kernels do not do (on CUDA they are float32).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Since torch 2.8, CUDA multiplies half-precision factors to float32 scores.
FLOAT32_SCORES = hasattr(torch.ops.aten.bmm, "dtype")

MANY_KEYS = 4096
BLOCKS = ((32, 8), (8, 4))  # Pairs of keys in a block, and how many times N blocks there must be at least.


@dataclass(frozen=True, slots=True)
class TopRows:
    """The rows a token reads, with their weights."""

    rows: torch.Tensor  # (U,) int64, ascending: position * G + KV head, each once
    places: torch.Tensor  # (G, H / G, N) int64: index into `rows` of the row of each weight
    weights: torch.Tensor  # (G, H / G, N) float32


def choose(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    top_n: int,
    scaling: float,
    softcap: float | None = None,
    start: int = 0,
) -> TopRows:
    """The N largest weights of each query head, q_rot (G, H / G, D), over keys (G, S, D) of the positions from `start`.

    N is limited to S. Among equal weights any may be chosen.
    """
    kv_heads, keys = k_rot.shape[:2]
    scores = _scores(q_rot, k_rot).mul_(scaling)  # (G, H / G, S) float32
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    positions = _largest(scores, min(top_n, keys))  # of scores, because softmax rounds some to ties
    weights = scores.softmax(-1).gather(-1, positions)
    heads = torch.arange(kv_heads, device=k_rot.device)[:, None, None]
    rows, places = torch.unique((positions + start) * kv_heads + heads, return_inverse=True)
    return TopRows(rows, places, weights)


def attend_top(choice: TopRows, fetch: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The weighted sum of the chosen rows, (G, H / G, D). `fetch` maps rows (U,) to their values (U, D)."""
    values = fetch(choice.rows)
    kv_heads, group, count = choice.places.shape
    spread = values.index_select(0, choice.places.flatten()).view(kv_heads * group, count, -1)
    weights = choice.weights.to(values.dtype).view(kv_heads * group, 1, count)
    return torch.bmm(weights, spread).view(kv_heads, group, -1)


def _scores(q_rot: torch.Tensor, k_rot: torch.Tensor) -> torch.Tensor:
    """q k^T as float32, (G, H / G, S)."""
    transposed = k_rot.transpose(1, 2)
    if q_rot.dtype == torch.float32:
        return torch.bmm(q_rot, transposed)
    if q_rot.is_cpu:  # head by head: bmm in half precision is 5 to 15x slower on a CPU
        return torch.stack([torch.mm(query, keys) for query, keys in zip(q_rot, transposed, strict=True)]).float()
    return (
        torch.bmm(q_rot, transposed, out_dtype=torch.float32)
        if FLOAT32_SCORES
        else torch.bmm(q_rot, transposed).float()
    )


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest of scores (..., S), unordered: (..., count).

    They lie in the `count` blocks with the largest maxima. So with many keys on a CPU only these blocks are searched,
    which is up to 2.5x faster than `topk` (16,384 keys, N 16 to 512).
    """
    keys = scores.shape[-1]
    block = next((size for size, least in BLOCKS if keys >= MANY_KEYS and keys // size >= least * count), None)
    if block is None or not scores.is_cpu:
        return scores.topk(count, dim=-1, sorted=False).indices
    whole = keys - keys % block
    maxima = scores[..., :whole].view(*scores.shape[:-1], -1, block).amax(-1)
    blocks = maxima.topk(count, dim=-1, sorted=False).indices
    inside = (blocks.unsqueeze(-1) * block + torch.arange(block)).flatten(-2)
    rest = torch.arange(whole, keys).expand(*inside.shape[:-1], -1)
    candidates = torch.cat((inside, rest), dim=-1)
    return candidates.gather(-1, scores.gather(-1, candidates).topk(count, dim=-1, sorted=False).indices)
