"""Attention of scattered prompt rows over all keys, masked by absolute position.

Row i at position p_i sees exactly the keys j with j <= p_i, and j > p_i - window on sliding layers. Public CacheBlend
code masks scattered rows with a bottom-right triangle, which lets them see the future (CacheBlend section 4.2 leaves
the mask open). Registered through transformers' attention interface; what a layer takes for its mask is a `RowMask`,
so a pass carries its own state and nothing global changes. While many prompts decode together it is another one of
ours (`batching.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface

from .products import attend_by_products, pays
from .rows import Rows

IMPLEMENTATION = "ragkv_rows"
FEWEST_ROWS = 28  # of a block of scattered rows; see `cut`. SDPA tiles 192 folded rows and more by 64, fewer by 32
MOST_ROWS = 96
MOST_ROWS_ON_DEVICE = 512  # where a launch costs more than keys read in vain
KEPT_BYTES = 64 << 20  # biases of a pass that may be kept from layer to layer; larger ones are made in each


class Mask(Protocol):
    """What stands where transformers expects a mask: it attends."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Queries (1, H, R, D) before RoPE, keys and values as the layer's `Cache` gave them -> (1, H, R, D)."""


@dataclass(frozen=True, slots=True)
class RowMask:
    """The mask of one prompt's rows: who they are, and how their queries are rotated."""

    rows: Rows
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
    rows: Rows,
    window: int | None,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Exact attention of `rows` over keys whose index is their position: (1, H, R, D)."""
    _, heads, count, head_dim = q_rot.shape
    kv_heads = k_rot.shape[1]
    if is_whole_prompt(rows, window) and softcap is None:
        return functional.scaled_dot_product_attention(
            q_rot, k_rot[:, :, :count], v[:, :, :count], is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
        )
    out = q_rot.new_empty((1, count, heads, head_dim))  # as the layer wants it, so that it copies nothing
    for block, bias in _blocks(rows, window, q_rot, kv_heads, softcap):
        keys = slice(block.low, block.high)
        done = _attend_span(
            q_rot[:, :, block.at : block.stop], k_rot[:, :, keys], v[:, :, keys], bias, scaling, softcap
        )
        out[:, block.at : block.stop] = done.transpose(1, 2)
    return out.transpose(1, 2)


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


def is_whole_prompt(rows: Rows, window: int | None) -> bool:
    """Whether the rows are all positions from 0 on and no window cuts them: then the plain causal kernel is exact."""
    return rows.start == 0 and len(rows) > 1 and (window is None or window >= len(rows))


@dataclass(frozen=True, slots=True)
class Block:
    """The rows at ... stop - 1 of a pass, taken together over the keys low ... high - 1."""

    at: int
    stop: int
    low: int
    high: int


def cut(places: Sequence[int], window: int | None, most_rows: int) -> list[Block]:
    """Blocks of the rows at `places`, ascending: many rows where they lie densely, few where they lie scattered.

    A block reads keys up to its last row's position, so that about half of rows x span is computed in vain, while every
    block costs something by itself: it ends where rows x span outgrow `most_rows` squared.
    """
    blocks, at = [], 0
    for stop in range(1, len(places) + 1):
        if stop < len(places) and stop - at < most_rows:
            rows = stop + 1 - at
            if rows <= FEWEST_ROWS or rows * (places[stop] - places[at] + 1) <= most_rows**2:
                continue
        low = 0 if window is None else max(0, places[at] - window + 1)
        blocks.append(Block(at, stop, low, places[stop - 1] + 1))
        at = stop
    return blocks


def _blocks(
    rows: Rows, window: int | None, q_rot: torch.Tensor, kv_heads: int, softcap: float | None
) -> Iterator[tuple[Block, torch.Tensor | None]]:
    """The blocks of `rows` and the bias of each; both are the same in all layers of a pass, so the rows keep them."""
    dtype, group = q_rot.dtype, q_rot.shape[1] // kv_heads
    kept = rows.blocks.get((window, group, dtype))
    if kept is None:
        most = MOST_ROWS if rows.positions.device.type == "cpu" else MOST_ROWS_ON_DEVICE
        blocks = cut(rows.positions.tolist(), window, most)
        # SDPA takes no bias that is the same for some of the rows; products do, and so a bias of one head's rows.
        repeats = [
            1 if _by_products(q_rot[:, :, b.at : b.stop], kv_heads, b.high - b.low, softcap) else group for b in blocks
        ]
        scores = sum((b.stop - b.at) * (b.high - b.low) * n for b, n in zip(blocks, repeats, strict=True))
        keep = scores * dtype.itemsize <= KEPT_BYTES
        biases = [_bias(rows, b, window, n, dtype) if keep else None for b, n in zip(blocks, repeats, strict=True)]
        kept = rows.blocks[window, group, dtype] = list(zip(blocks, repeats, biases, strict=True))
    for block, n, bias in kept:
        yield block, _bias(rows, block, window, n, dtype) if bias is None else bias


def _bias(rows: Rows, block: Block, window: int | None, repeats: int, dtype: torch.dtype) -> torch.Tensor | None:
    """0 where a row of the block sees a key and -inf elsewhere, (repeats * R, N); `None` where it sees all.

    Not bool: SDPA would make this of it in every layer anew, which cost 5 % of a fused prefill.
    """
    allowed = allowed_keys(rows.positions[block.at : block.stop], block.low, block.high, window)
    if allowed is None:
        return None
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
    return bias.repeat(repeats, 1) if repeats > 1 else bias


def allowed_keys(positions: torch.Tensor, low: int, high: int, window: int | None) -> torch.Tensor | None:
    """Which keys low ... high - 1 each row may see, (R, high - low) bool; `None` where that is all of them."""
    if positions.numel() == 1:
        return None  # low and high already are the row's own range
    keys = torch.arange(low, high, device=positions.device)
    allowed = keys <= positions[:, None]
    if window is not None:
        allowed &= keys > positions[:, None] - window
    return allowed


def _attend_span(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Rows (1, H, R, D) over those keys and values (1, G, N, D); `bias` is added to the scores.

    It is (H / G * R, N), or (R, N) where `_by_products` holds.
    """
    _, heads, count, head_dim = q_rot.shape
    kv_heads = k_rot.shape[1]
    # Fold the query heads of a KV head into rows: masked SDPA would copy K and V once per query head otherwise.
    by_products = _by_products(q_rot, kv_heads, k_rot.shape[2], softcap)
    q_rot = q_rot.reshape(1, kv_heads, heads // kv_heads * count, head_dim)
    if by_products:
        out = attend_by_products(q_rot[0], k_rot[0], v[0], bias, scaling)
    elif softcap is None:
        out = functional.scaled_dot_product_attention(q_rot, k_rot, v, attn_mask=bias, scale=scaling)
    else:
        out = _softcapped(q_rot, k_rot, v, bias, scaling, softcap)
    return out.reshape(1, heads, count, head_dim)


def _by_products(q_rot: torch.Tensor, kv_heads: int, keys: int, softcap: float | None) -> bool:
    """Whether rows (1, H, R, D) over so many keys are attended by products."""
    return softcap is None and pays(q_rot, kv_heads, keys)


def _softcapped(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    scores = torch.matmul(q_rot, k_rot.transpose(2, 3)).float() * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; harmless when repeated."""
    AttentionInterface.register(IMPLEMENTATION, row_attention)
