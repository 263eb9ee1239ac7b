"""Attention of scattered prompt rows over all keys, masked by absolute position.

Row i at position p_i sees exactly the keys j with j <= p_i, and j > p_i - window on sliding layers.
Public CacheBlend code masks scattered rows with a bottom-right triangle, which lets them see the
future (CacheBlend section 4.2 leaves the mask open).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ragkv.runtime import no_check

from .cpu.attention_speed import LEAST_ROWS, attends_in_float32
from .cpu.product_speed import multiplies_bfloat16
from .device.masked import attend_masked
from .rows import TILE_ROWS, Pause, Rows

# A block of scattered rows has at least so many.
FEWEST_ROWS = 28
MOST_ROWS = 96
# SDPA tiles so many rows and more by 64, fewer by 32, those of a KV head's query heads together.
# To reach them pays where a block spans at most this share of the keys that it reads: a tenth of
# SmolLM2's attention over 4,000 tokens.
TILED_ROWS = 192
TILED_SPAN = 0.25
# The rows that decode attend over whole blocks of so many keys, see `decoding_attention.py`.
KEY_BLOCK = 64
# Biases up to this size are kept from layer to layer of a pass; larger ones are made again in each
# layer.
CACHED_BYTES = 64 << 20


class Watch:
    """Collects the attention of the last rows of a pass: the mean over them, over heads and over
    the layers added.
    """

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        """Of the last `rows` rows, to each of `length` positions."""
        self._rows = rows
        self._sum = torch.zeros(length, device=device)
        self._layers = 0
        self._unseen: dict[int | None, torch.Tensor] = {}  # by window: (rows, S)

    def add(
        self,
        q_rot: torch.Tensor,
        k_rot: torch.Tensor,
        rows: Rows,
        window: int | None,
        scaling: float,
        softcap: float | None,
    ) -> None:
        """Add one layer: the last queries (1, H, R, D) of `rows` over keys (1, G, S, D)."""
        kv_heads = k_rot.shape[1]
        stop = rows.stop
        asking = rows.positions[-self._rows :, None]
        queries = q_rot[0, :, -self._rows :]
        queries = queries.reshape(kv_heads, -1, q_rot.shape[3])  # (G, H / G * rows, D)
        scores = torch.matmul(queries.float(), k_rot[0, :, :stop].float().transpose(1, 2)) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if (unseen := self._unseen.get(window)) is None:
            keys = torch.arange(stop, device=asking.device)
            unseen = keys > asking
            if window is not None:
                unseen |= keys <= asking - window
            self._unseen[window] = unseen
        scores = scores.view(kv_heads, -1, asking.numel(), stop).masked_fill(unseen, float("-inf"))
        self._sum[:stop] += scores.softmax(dim=-1).mean(dim=(0, 1, 2))
        self._layers += 1

    def received(self) -> torch.Tensor:
        """The attention each position received, (S,) float32 on the model's device; sums to 1."""
        return self._sum / max(1, self._layers)


def attend(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    rows: Rows,
    window: int | None,
    scaling: float,
    softcap: float | None = None,
    pause: Pause = no_check,
) -> torch.Tensor:
    """Exact attention of `rows` over the keys of all positions up to their last: (1, H, R, D)."""
    _, heads, count, head_dim = q_rot.shape
    kv_heads = k_rot.shape[1]
    if count == 1:
        seen = slice(None, rows.stop)
        return attend_one(q_rot, k_rot[:, :, seen], v[:, :, seen], window, scaling, softcap)
    if is_whole_prompt(rows, window) and softcap is None:
        return _attend_causally(q_rot, k_rot[:, :, :count], v[:, :, :count], scaling, pause)
    if q_rot.device.type != "cpu":
        return attend_masked(q_rot, k_rot, v, rows, window, scaling, softcap)
    # the layout the layer expects, so it copies nothing
    out = q_rot.new_empty((1, count, heads, head_dim))
    q_rot, k_rot, v = _as_fastest(q_rot, k_rot, v)
    for block, bias in _blocks(rows, window, q_rot, kv_heads):
        keys = slice(block.low, block.high)
        pause()
        done = attend_span(
            q_rot[:, :, block.start : block.stop],
            k_rot[:, :, keys],
            v[:, :, keys],
            bias,
            scaling,
            softcap,
        )
        out[:, block.start : block.stop] = done.transpose(1, 2)
    return out.transpose(1, 2)


def _as_fastest(
    q_rot: torch.Tensor, k_rot: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries (1, H, R, D), keys and values in the dtype in which this processor attends fastest.

    It depends on the model's dtype and the number of rows alone, so equal passes have equal bits.
    """
    if (
        q_rot.shape[2] < LEAST_ROWS
        or q_rot.device.type != "cpu"
        or not attends_in_float32(q_rot.dtype)
    ):
        return q_rot, k_rot, v
    return q_rot.float(), k_rot.float(), v.float()


def _attend_causally(
    q_rot: torch.Tensor, k_rot: torch.Tensor, v: torch.Tensor, scaling: float, pause: Pause
) -> torch.Tensor:
    """Attention of rows (1, H, R, D) over keys and values (1, G, R, D) up to their own."""
    _, heads, count, head_dim = q_rot.shape
    kv_heads = k_rot.shape[1]
    group = heads // kv_heads

    def of(queries: slice, shared: slice) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            *_as_fastest(q_rot[:, queries], k_rot[:, shared], v[:, shared]),
            is_causal=True,
            scale=scaling,
            enable_gqa=group > 1,
        )

    if count <= TILE_ROWS or q_rot.device.type != "cpu":
        return of(slice(None), slice(None)).to(q_rot.dtype)
    # the layout the layer expects, so it copies nothing
    out = q_rot.new_empty((1, count, heads, head_dim))
    for head in range(kv_heads):  # the same bits as all at once
        pause()
        queries = slice(head * group, head * group + group)
        out[:, :, queries] = of(queries, slice(head, head + 1)).transpose(1, 2)
    return out.transpose(1, 2)


def attend_one(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Exact attention of the last position's row, q_rot (1, H, 1, D), over keys (1, G, S, D): (1,
    H, 1, D).
    """
    if window is not None and (low := k_rot.shape[2] - window) > 0:
        k_rot = k_rot[:, :, low:]
        v = v[:, :, low:]
    return attend_span(q_rot, k_rot, v, None, scaling, softcap)


def whole_blocks(positions: int) -> int:
    """The positions of the blocks of `KEY_BLOCK` that so many positions begin."""
    return -(-positions // KEY_BLOCK) * KEY_BLOCK


def is_whole_prompt(rows: Rows, window: int | None) -> bool:
    """Whether the rows are all positions from 0 on, without a window: then the plain causal kernel
    is exact.
    """
    return rows.start == 0 and len(rows) > 1 and (window is None or window >= len(rows))


@dataclass(frozen=True, slots=True)
class RowBlock:
    """The rows start ... stop - 1 of a pass, computed together over the keys low ... high - 1."""

    start: int
    stop: int
    low: int
    high: int


def cut_blocks(
    positions: Sequence[int], window: int | None, most_rows: int, group: int = 1
) -> list[RowBlock]:
    """Blocks of the rows at ascending `positions`: many rows where these are dense, few where they
    are scattered.

    A block reads keys up to its last row's position, so about half of rows x span is computed but
    masked. On the other hand every block has a fixed cost. So a block ends where rows x span
    exceeds `most_rows` squared, and those of `group` query heads fill the kernel's tiles or span
    much of what they read.
    """
    blocks = []
    start = 0
    for stop in range(1, len(positions) + 1):
        low = 0 if window is None else max(0, positions[start] - window + 1)
        if stop < len(positions) and stop - start < most_rows:
            rows = stop + 1 - start
            span = positions[stop] - positions[start] + 1
            if (
                rows <= FEWEST_ROWS
                or rows * span <= most_rows**2
                or (
                    rows * group <= TILED_ROWS <= most_rows * group
                    and span <= TILED_SPAN * (positions[stop] + 1 - low)
                )
            ):
                continue
        blocks.append(RowBlock(start, stop, low, positions[stop - 1] + 1))
        start = stop
    return blocks


def _blocks(
    rows: Rows, window: int | None, q_rot: torch.Tensor, kv_heads: int
) -> Iterator[tuple[RowBlock, torch.Tensor | None]]:
    """The blocks of `rows` and their biases; both are equal in all layers of a pass, so the rows
    cache them.
    """
    dtype = q_rot.dtype
    group = q_rot.shape[1] // kv_heads
    cached = rows.cache.get((window, group, dtype))
    if cached is None:
        blocks = cut_blocks(rows.positions.tolist(), window, MOST_ROWS, group)
        scores = sum((b.stop - b.start) * (b.high - b.low) * group for b in blocks)
        keep = scores * dtype.itemsize <= CACHED_BYTES
        biases = [_bias(rows, block, window, group, dtype) if keep else None for block in blocks]
        cached = rows.cache[window, group, dtype] = list(zip(blocks, biases, strict=True))
    for block, bias in cached:
        yield block, _bias(rows, block, window, group, dtype) if bias is None else bias


def _bias(
    rows: Rows, block: RowBlock, window: int | None, group: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """0 where a row of the block sees a key and -inf elsewhere, (group * R, N); `None` if every row
    sees all.

    Not bool, because SDPA would convert it again in every layer, which cost 5 % of a fused prefill.
    """
    allowed = allowed_keys(rows.positions[block.start : block.stop], block.low, block.high, window)
    if allowed is None:
        return None
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
        ~allowed, float("-inf")
    )
    return bias.repeat(group, 1)


def allowed_keys(
    positions: torch.Tensor, low: int, high: int, window: int | None
) -> torch.Tensor | None:
    """Which of the keys low ... high - 1 each row sees, (R, high - low) bool; `None` if every row
    sees all.
    """
    if positions.numel() == 1:
        return None  # low and high are the row's own range
    keys = torch.arange(low, high, device=positions.device)
    allowed = keys <= positions[:, None]
    if window is not None:
        allowed &= keys > positions[:, None] - window
    return allowed


def attend_span(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of rows (1, H, R, D) over keys and values (1, G, N, D), `bias` (H / G * R, N) added
    to the scores.
    """
    _, heads, count, head_dim = q_rot.shape
    kv_heads = k_rot.shape[1]
    # Fold the query heads of a KV head into rows, else masked SDPA copies K and V once per query
    # head.
    q_rot = q_rot.reshape(1, kv_heads, heads // kv_heads * count, head_dim)
    if softcap is None:
        out = functional.scaled_dot_product_attention(
            q_rot, k_rot, v, attn_mask=bias, scale=scaling
        )
        return out.reshape(1, heads, count, head_dim)
    dtype = q_rot.dtype
    if dtype is torch.bfloat16 and q_rot.device.type == "cpu" and not multiplies_bfloat16():
        # products are several times as fast
        q_rot = q_rot.float()
        k_rot = k_rot.float()
        v = v.float()
    scores = torch.matmul(q_rot, k_rot.transpose(2, 3)).float() * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    return (
        torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)
        .to(dtype)
        .reshape(1, heads, count, head_dim)
    )
