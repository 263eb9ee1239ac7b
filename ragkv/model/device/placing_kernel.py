"""One Triton kernel that unpacks, rotates and places the stored KV of many entries in a layer.

It does what `Codec.unpack`, the rotation in halves and `PromptKV.write` do one after another in
some ten launches of torch, and reads and writes each number once. It knows the layouts of the
codecs `int8` and of plain numbers (`raw`, `bfloat16`). Import it only where Triton is installed.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

_TOKENS = 16  # of a program


class StoredTokens(NamedTuple):
    """N tokens in a buffer, and where they belong; each int64 (N,), on the device."""

    at: torch.Tensor  # first byte of the entry's stored layer
    tokens: torch.Tensor  # T of the entry
    token: torch.Tensor  # index in the entry
    positions: torch.Tensor  # in the prompt


def place(
    buffer: torch.Tensor,
    numbers: torch.dtype | None,
    stored: StoredTokens,
    rotation: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Fill the positions of `stored` in `keys` and `values`, each (1, G, S, D), from `buffer` (B,)
    uint8.

    `numbers` is the dtype of plain numbers, `None` for int8 codes. `rotation` is cos and sin
    of all positions, (2, S, rotary dims); without it keys stay as they are.
    """
    count = stored.at.numel()
    _, kv_heads, _, head_dim = keys.shape
    cos, sin = (keys, keys) if rotation is None else rotation  # keys are not read
    _place[triton.cdiv(count, _TOKENS), kv_heads](
        buffer,
        buffer.view(torch.int8),
        buffer.view(torch.float32),
        buffer if numbers is None else buffer.view(numbers),
        *stored,
        cos,
        sin,
        keys,
        values,
        count,
        keys.stride(1),
        values.stride(1),
        cos.stride(-2),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        ROTARY=0 if rotation is None else cos.shape[-1],
        ITEM=0 if numbers is None else numbers.itemsize,
        TOKENS=_TOKENS,
    )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _place(
    codes: Any,  # the buffer as uint8
    signed: Any,  # as int8
    floats: Any,  # as float32
    numbers: Any,  # as plain numbers
    at: Any,
    tokens: Any,
    token: Any,
    positions: Any,
    cos: Any,
    sin: Any,
    keys: Any,
    values: Any,
    count: Any,
    key_stride: Any,
    value_stride: Any,
    table_stride: Any,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    ITEM: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    here = row < count
    first = tl.load(at + row, mask=here, other=0)
    length = tl.load(tokens + row, mask=here, other=0)
    own = tl.load(token + row, mask=here, other=0)
    position = tl.load(positions + row, mask=here, other=0)
    dim = tl.arange(0, WIDTH)
    # the dimension that rotates with this one
    half: tl.constexpr = ROTARY // 2
    other_dim = tl.where(dim < half, dim + half, tl.where(dim < ROTARY, dim - half, dim))
    inside = here[:, None] & (dim < HEAD_DIM)[None, :]
    key_at = (head * length + own) * HEAD_DIM
    value_at = ((KV_HEADS + head) * length + own) * HEAD_DIM
    if ITEM == 0:
        channels: tl.constexpr = KV_HEADS * HEAD_DIM
        scales = first // 4
        scale_at = (scales + head * HEAD_DIM)[:, None]
        begin = first + 4 * (2 * channels + KV_HEADS * length)
        key_at = (begin + key_at)[:, None]
        scale = tl.load(floats + scale_at + dim[None, :], mask=inside, other=0.0)
        low = tl.load(floats + scale_at + channels + dim[None, :], mask=inside, other=0.0)
        code = tl.load(codes + key_at + dim[None, :], mask=inside, other=0)
        key = code.to(tl.float32) * scale + low
        scale = tl.load(floats + scale_at + other_dim[None, :], mask=inside, other=0.0)
        low = tl.load(floats + scale_at + channels + other_dim[None, :], mask=inside, other=0.0)
        code = tl.load(codes + key_at + other_dim[None, :], mask=inside, other=0)
        other = code.to(tl.float32) * scale + low
        token_scale = scales + 2 * channels + head * length + own
        scale = tl.load(floats + token_scale, mask=here, other=0.0)[:, None]
        code = tl.load(signed + (begin + value_at)[:, None] + dim[None, :], mask=inside, other=0)
        value = code.to(tl.float32) * scale
    else:
        begin = first // ITEM
        key_at = (begin + key_at)[:, None]
        key = tl.load(numbers + key_at + dim[None, :], mask=inside, other=0.0).to(tl.float32)
        other = tl.load(numbers + key_at + other_dim[None, :], mask=inside, other=0.0)
        other = other.to(tl.float32)
        value = tl.load(numbers + (begin + value_at)[:, None] + dim[None, :], mask=inside)
        value = value.to(tl.float32)
    dtype = keys.dtype.element_ty
    if ROTARY > 0:
        # rounded as a slice is that the host decodes
        key = key.to(dtype).to(tl.float32)
        other = other.to(dtype).to(tl.float32)
        turned = inside & (dim < ROTARY)[None, :]
        table_at = position[:, None] * table_stride + dim[None, :]
        cosine = tl.load(cos + table_at, mask=turned, other=1.0)
        sine = tl.load(sin + table_at, mask=turned, other=0.0)
        key = key * cosine + tl.where(dim < half, -other, other) * sine
    target = position[:, None] * HEAD_DIM + dim[None, :]
    tl.store(keys + head * key_stride + target, key.to(dtype), mask=inside)
    tl.store(values + head * value_stride + target, value.to(dtype), mask=inside)
