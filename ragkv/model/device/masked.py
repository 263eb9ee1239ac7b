"""Attention of scattered rows on a device, in few launches and without reading a position back.

One bias (R, N) serves all heads and all layers of a pass. Query heads of one KV head are in the
batch dimension, where bias and keys need no copies. If the KV allows it, N is a multiple of
`KEY_BLOCK`, because otherwise torch would pad the bias in every layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..rows import Rows

# Numbers of a bias. More rows are computed in several parts.
MOST_BIAS = 1 << 27


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The rows start ... stop - 1 of a pass, and their bias."""

    start: int
    stop: int
    keys: int  # they see none from here on
    bias: torch.Tensor  # (stop - start, keys): 0 where a row sees a key, -inf elsewhere


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of all rows of a pass, which are equal in all layers with the same window."""

    parts: tuple[MaskedRows, ...]

    @classmethod
    def of(cls, rows: Rows, keys: int, window: int | None, dtype: torch.dtype) -> "Masks":
        """The masks of `rows` over `keys` keys."""
        return cls(
            tuple(
                _masked(rows.positions, start, stop, _seen(rows.start, stop, keys), window, dtype)
                for start, stop in _parts(len(rows), max(1, MOST_BIAS // keys))
            )
        )

    def narrowed(self, kept: torch.Tensor) -> "Masks | None":
        """The masks of the rows of ascending index `kept` (C,), with one launch; `None` if the
        masks are in several parts.
        """
        if len(self.parts) > 1:
            return None
        (all_rows,) = self.parts
        return Masks(
            (MaskedRows(0, kept.numel(), all_rows.keys, all_rows.bias.index_select(0, kept)),)
        )


def _parts(rows: int, most: int) -> Iterator[tuple[int, int]]:
    return ((start, min(rows, start + most)) for start in range(0, rows, most))


def _seen(first: int | None, stop: int, keys: int) -> int:
    return keys if first is None else min(keys, first + stop + -(first + stop) % 16)


def _masked(
    positions: torch.Tensor,
    start: int,
    stop: int,
    keys: int,
    window: int | None,
    dtype: torch.dtype,
) -> MaskedRows:
    place = torch.arange(keys, device=positions.device)
    own = positions[start:stop, None]
    unseen = place > own
    if window is not None:
        unseen |= place <= own - window
    bias = torch.zeros(unseen.shape, dtype=dtype, device=positions.device)
    return MaskedRows(start, stop, keys, bias.masked_fill_(unseen, float("-inf")))


def attend_masked(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    rows: Rows,
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of `rows` (1, H, R, D) over keys and values (1, G, N, D): (1, H, R, D)."""
    name = (window, k_rot.shape[2], q_rot.dtype)
    masks: Masks | None = rows.masks.get(name)
    if masks is None:
        masks = rows.masks[name] = Masks.of(rows, k_rot.shape[2], window, q_rot.dtype)
    _, heads, count, head_dim = q_rot.shape
    kv_heads = k_rot.shape[1]
    group = heads // kv_heads
    queries = q_rot.view(kv_heads, group, count, head_dim).transpose(0, 1)  # (H / G, G, R, D)
    parts = [
        _attend(
            queries[:, :, mask.start : mask.stop],
            k_rot[:, :, : mask.keys].expand(group, -1, -1, -1),
            v[:, :, : mask.keys].expand(group, -1, -1, -1),
            mask.bias,
            scaling,
            softcap,
        )
        for mask in masks.parts
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    # the layout the layer expects, so it copies nothing
    out = out.permute(2, 1, 0, 3).reshape(1, count, heads, head_dim)
    return out.transpose(1, 2)


def _attend(
    queries: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Queries (B, G, R, D) over keys and values (B, G, N, D) -> (B, G, R, D)."""
    if softcap is None:
        return functional.scaled_dot_product_attention(
            queries, k_rot, v, attn_mask=bias.expand(*queries.shape[:2], -1, -1), scale=scaling
        )
    scores = torch.matmul(queries, k_rot.transpose(2, 3)).float() * scaling
    scores = torch.tanh(scores / softcap) * softcap + bias
    return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)
