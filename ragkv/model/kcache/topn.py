"""Attention of one decoded token with the V rows of its N largest weights (KCache section 3.1).

Softmax runs over all keys, in float32; of its weights each query head keeps the N largest, as they are. The rows that
the query heads of one KV head ask for are fetched once, so U of them, N <= U <= N H / G, are read where all S would be.
Knows nothing of where values lie: a row is `position * G + KV head`, and whoever holds them fetches it.

The scores are those of a matmul in the model's dtype, as transformers' eager attention has them; in half precision
they are rounded before the softmax, which flash kernels do not do (on CUDA they come in float32).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

FLOAT32_SCORES = hasattr(torch.ops.aten.bmm, "dtype")  # of half-precision factors, on CUDA; since torch 2.8

MANY_KEYS = 4096
BLOCKS = ((32, 8), (8, 4))  # keys a block, and how many blocks there must be for each of the N


@dataclass(frozen=True, slots=True)
class Choice:
    """The rows a token reads, and how much of each."""

    rows: torch.Tensor  # (U,) int64, ascending: position * G + KV head, each once
    places: torch.Tensor  # (G, H / G, N) int64: where in `rows` the row of a weight is
    weights: torch.Tensor  # (G, H / G, N) float32


def choose(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    top_n: int,
    scaling: float,
    softcap: float | None = None,
    *,
    start: int = 0,
    allowed: torch.Tensor | None = None,
    renormalise: bool = False,
) -> Choice:
    """The N largest weights of each query head, q_rot (G, H / G, D), over keys (G, S, D) of positions `start` on.

    N is at most S. `allowed` (G, 1, S) bool says which keys may be seen. Of equal weights any may be chosen.
    """
    kv_heads, keys = k_rot.shape[:2]
    scores = _scores(q_rot, k_rot).mul_(scaling)  # (G, H / G, S) float32
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    positions = _largest(scores, min(top_n, keys))  # softmax keeps the order, and makes ties
    weights = scores.softmax(-1).gather(-1, positions)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    heads = torch.arange(kv_heads, device=k_rot.device)[:, None, None]
    rows, places = torch.unique((positions + start) * kv_heads + heads, return_inverse=True)
    return Choice(rows, places, weights)


def attend_top(choice: Choice, fetch: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The weighted sum of the chosen rows, (G, H / G, D). `fetch` takes rows (U,) and gives their values (U, D)."""
    values = fetch(choice.rows)
    kv_heads, group, count = choice.places.shape
    spread = values.index_select(0, choice.places.flatten()).view(kv_heads * group, count, -1)
    weights = choice.weights.to(values.dtype).view(kv_heads * group, 1, count)
    return torch.bmm(weights, spread).view(kv_heads, group, -1)


def _scores(q_rot: torch.Tensor, k_rot: torch.Tensor) -> torch.Tensor:
    """q k^T as float32, (G, H / G, S)."""
    turned = k_rot.transpose(1, 2)
    if q_rot.dtype == torch.float32:
        return torch.bmm(q_rot, turned)
    if q_rot.is_cpu:  # one head after another: bmm of half-precision factors is 5 to 15x slower there
        return torch.stack([torch.mm(query, keys) for query, keys in zip(q_rot, turned, strict=True)]).float()
    return torch.bmm(q_rot, turned, out_dtype=torch.float32) if FLOAT32_SCORES else torch.bmm(q_rot, turned).float()


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` largest of scores (..., S) are, in no order: (..., count).

    They lie in the `count` blocks whose maxima are largest, so over many keys on a CPU only those blocks are looked
    through: up to 2.5x over `topk` (16,384 keys, N 16 to 512).
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
