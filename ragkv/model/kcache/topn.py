"""Attention of one decoded token with the V rows of its N largest weights (KCache section 3.1).

The softmax runs over all keys in float32. Each query head uses its N largest weights unchanged. The
rows that the query heads of one KV head need are fetched once: U rows, N <= U <= N H / G, instead
of all S. This file does not know where values are stored: a row is `position * G + KV head`, and
the caller's `fetch` reads it. On a device the host does not learn U, because it would wait.

The scores come from a matmul in the model's dtype, as in transformers' eager attention. In half
precision they are rounded before the softmax, which flash kernels do not do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TopRows:
    """The rows a token reads, with their weights."""

    # ascending: position * G + KV head, each once; (U,) int64, or on a device (N H,), filled up
    # with -1
    rows: torch.Tensor
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
    """The N largest weights of each query head, q_rot (G, H / G, D), over keys (G, S, D) of the
    positions from `start`.

    N is limited to S. Among equal weights any may be chosen.
    """
    kv_heads, keys = k_rot.shape[:2]
    scores = _scores(q_rot, k_rot).mul_(scaling)  # (G, H / G, S) float32
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    # Of scores, because softmax rounds some to ties.
    positions = scores.topk(min(top_n, keys), dim=-1, sorted=False).indices
    weights = scores.softmax(-1).gather(-1, positions)
    heads = torch.arange(kv_heads, device=k_rot.device)[:, None, None]
    wanted = (positions + start) * kv_heads + heads
    each_once = unique if wanted.is_cpu else unique_unread
    rows, places = each_once(wanted.flatten())
    return TopRows(rows, places.view(wanted.shape), weights)


def unique(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each of `rows` (M,) once, ascending (U,), and where in them each is, (M,)."""
    found, places = torch.unique(rows, return_inverse=True)
    return found, places


def unique_unread(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `unique`, with -1 behind the last up to M rows: no shape depends on numbers."""
    ordered, order = rows.sort()
    is_new = torch.ones_like(ordered)
    is_new[1:] = ordered[1:] != ordered[:-1]
    slots = is_new.cumsum(0) - 1
    found = torch.full_like(rows, -1).scatter_(0, slots, ordered)
    return found, torch.empty_like(rows).scatter_(0, order, slots)


def attend_top(choice: TopRows, fetch: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The weighted sum of the chosen rows, (G, H / G, D). `fetch` maps `choice.rows` to their
    values, (U, D) or more.
    """
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
        return torch.stack(
            [torch.mm(query, keys) for query, keys in zip(q_rot, transposed, strict=True)]
        ).float()
    return torch.bmm(q_rot, transposed).float()
