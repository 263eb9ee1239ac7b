"""Attention of scattered prompt rows over all keys, masked by absolute position.

Row i at position p_i sees exactly the keys j with j <= p_i, and j > p_i - window on sliding layers. Public CacheBlend
code masks scattered rows with a bottom-right triangle, which lets them see the future (CacheBlend section 4.2 leaves
the mask open). Registered through transformers' attention interface; what a layer takes for its mask is a `RowMask`,
so a pass carries its own state and nothing global changes. While many prompts decode together it is another one of
ours (`batching.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface

if TYPE_CHECKING:
    from .promptkv import Rows  # which attends over itself, by `attend_one`

IMPLEMENTATION = "ragkv_rows"
ROWS_PER_BLOCK = 64  # a block of rows reads keys up to its last position only: 1.6x over one block for scattered rows


class Mask(Protocol):
    """What stands where transformers expects a mask: it attends."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Queries (1, H, R, D) before RoPE, keys and values as the layer's `Cache` gave them -> (1, H, R, D)."""


@dataclass(frozen=True, slots=True)
class RowMask:
    """The mask of one prompt's rows: who they are, and how their queries are rotated."""

    rows: "Rows"
    window: int | None  # keys a row may look back on a sliding layer, itself included
    rotate: Callable[[torch.Tensor], torch.Tensor]  # (1, H, R, D) -> the same, at the rows' positions
    watch: "Watch | None" = None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Queries (1, H, R, D) over keys and values (1, G, S, D) of the whole prompt -> (1, H, R, D)."""
        q_rot = self.rotate(query)
        if self.watch is not None:
            self.watch.add(self, q_rot, key, scaling, softcap)
        return attend(q_rot, key, value, self.rows, self.window, scaling, softcap)


class Watch:
    """Collects what the last row of a pass attends to: the mean over heads and over the layers it saw."""

    def __init__(self, length: int, device: torch.device) -> None:
        self._sum = torch.zeros(length, device=device)
        self._layers = 0

    def add(
        self, mask: RowMask, q_rot: torch.Tensor, k_rot: torch.Tensor, scaling: float, softcap: float | None
    ) -> None:
        """One layer: queries (1, H, R, D), of which the last row's counts, over keys (1, G, S, D)."""
        kv_heads, stop = k_rot.shape[1], int(mask.rows.positions[-1]) + 1
        start = 0 if mask.window is None else max(0, stop - mask.window)
        last = q_rot[:, :, -1].reshape(kv_heads, -1, q_rot.shape[3])  # (G, H / G, D)
        scores = torch.matmul(last.float(), k_rot[0, :, start:stop].float().transpose(1, 2)) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        self._sum[start:stop] += scores.softmax(dim=-1).mean(dim=(0, 1))
        self._layers += 1

    def received(self) -> torch.Tensor:
        """Attention that each position got, (S,) float32, on the host; sums to 1."""
        return (self._sum / max(1, self._layers)).cpu()


def row_attention(
    module: torch.nn.Module,  # noqa: ARG001 - the interface's signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The interface's function: query (1, H, R, D) before RoPE -> (1, R, H, D)."""
    out = attention_mask.attend(query, key, value, scaling, softcap)
    return out.transpose(1, 2).contiguous(), None


def attend(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    rows: "Rows",
    window: int | None,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Exact attention of `rows` over keys whose index is their position: (1, H, R, D)."""
    count = q_rot.shape[2]
    if is_whole_prompt(rows, window) and softcap is None:
        k_rot, v, grouped = k_rot[:, :, :count], v[:, :, :count], q_rot.shape[1] != k_rot.shape[1]
        return functional.scaled_dot_product_attention(
            q_rot, k_rot, v, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    if count <= ROWS_PER_BLOCK:
        return _attend_block(q_rot, k_rot, v, rows.positions, window, scaling, softcap)
    blocks = [
        _attend_block(
            q_rot[:, :, at : at + ROWS_PER_BLOCK],
            k_rot,
            v,
            rows.positions[at : at + ROWS_PER_BLOCK],
            window,
            scaling,
            softcap,
        )
        for at in range(0, count, ROWS_PER_BLOCK)
    ]
    return torch.cat(blocks, dim=2)


def attend_one(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Exact attention of the row of the last position, q_rot (1, H, 1, D), over keys (1, G, S, D): (1, H, 1, D)."""
    low = 0 if window is None else max(0, k_rot.shape[2] - window)
    return _attend_span(q_rot, k_rot[:, :, low:], v[:, :, low:], None, scaling, softcap)


def is_whole_prompt(rows: "Rows", window: int | None) -> bool:
    """Whether the rows are all positions from 0 on and no window cuts them: then the plain causal kernel is exact."""
    return rows.start == 0 and len(rows) > 1 and (window is None or window >= len(rows))


def _attend_block(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    low = 0 if window is None else max(0, int(positions[0]) - window + 1)
    high = int(positions[-1]) + 1
    allowed = allowed_keys(positions, low, high, window)
    return _attend_span(q_rot, k_rot[:, :, low:high], v[:, :, low:high], allowed, scaling, softcap)


def _attend_span(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Rows (1, H, R, D) over those keys and values (1, G, N, D) of which `allowed` (R, N) says who sees which."""
    _, heads, count, head_dim = q_rot.shape
    kv_heads = k_rot.shape[1]
    group = heads // kv_heads
    # Fold the query heads of a KV head into rows: masked SDPA would copy K and V once per query head otherwise.
    q_rot = q_rot.reshape(1, kv_heads, group * count, head_dim)
    if allowed is not None and group > 1:
        allowed = allowed.repeat(group, 1)  # (group * R, S)
    if softcap is None:
        out = functional.scaled_dot_product_attention(q_rot, k_rot, v, attn_mask=allowed, scale=scaling)
    else:
        out = _softcapped(q_rot, k_rot, v, allowed, scaling, softcap)
    return out.reshape(1, heads, count, head_dim)


def allowed_keys(positions: torch.Tensor, low: int, high: int, window: int | None) -> torch.Tensor | None:
    """Which keys low ... high - 1 each row may see, (R, high - low) bool; `None` where that is all of them."""
    if positions.numel() == 1:
        return None  # low and high already are the row's own range
    keys = torch.arange(low, high, device=positions.device)
    allowed = keys <= positions[:, None]
    if window is not None:
        allowed &= keys > positions[:, None] - window
    return allowed


def _softcapped(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    scores = torch.matmul(q_rot, k_rot.transpose(2, 3)).float() * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; harmless when repeated."""
    AttentionInterface.register(IMPLEMENTATION, row_attention)
