"""The codec that stores eight bits a number."""

import torch

from .base import Codec, Layout

_INT8_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # float64 would lose bits in float32
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # smaller scales would be rounded to zero


class Int8Codec(Codec):
    """Eight bits a number, with a scale for each key channel and each value token.

    Some channels of keys are large, or far from zero, for all tokens. Values have no such channels.
    (KIVI, Liu et al. 2024, finds this for keys after RoPE. We store keys before it.) So each key
    channel has a scale and its lowest value over the slice's tokens, and each value token has a
    symmetric scale. A stored layer has, in this order, all little-endian:

        key scale (G, D) float32 | key low (G, D) float32 | value scale (G, T) float32 |
        keys (G, T, D) uint8 | values (G, T, D) int8

    and up to three bytes of padding, so that its length is a multiple of four.

    A decoded number differs from the original by at most half a scale, and is then rounded to the
    model's dtype. NaN, infinities and ranges too large for float32 have no such scale: `encode`
    returns `None`, and the entry is stored raw.
    """

    name = "int8"
    lossless = False

    def layout(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Layout:
        return Layout((self.nbytes(shape, dtype),), torch.uint8)

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
        _, kv_heads, tokens, head_dim = shape
        size = 4 * kv_heads * (2 * head_dim + tokens) + 2 * kv_heads * tokens * head_dim
        # so that scales are aligned in every row of a tensor of layers
        return size + -size % 4

    def encode(self, layer: torch.Tensor) -> torch.Tensor | None:
        if layer.dtype not in _INT8_DTYPES:
            return None
        two, kv_heads, tokens, head_dim = layer.shape
        layout = self.layout((two, kv_heads, tokens, head_dim), layer.dtype)
        stored = torch.zeros(layout.shape, dtype=layout.dtype, device=layer.device)
        if not layer.numel():
            return stored
        # (G, T, D)
        keys = layer[0].float()
        values = layer[1].float()
        low, high = keys.aminmax(dim=1, keepdim=True)  # (G, 1, D); NaN if any number is NaN
        key_scale = ((high - low) / 255).clamp_min(_LEAST_SCALE)
        # (G, T, 1)
        value_scale = (values.abs().amax(dim=2, keepdim=True) / 127).clamp_min(_LEAST_SCALE)
        scales = torch.cat([part.flatten() for part in (key_scale, low, value_scale)])
        if not scales.isfinite().all():
            return None
        key_codes = ((keys - low) / key_scale).round_().clamp_(0, 255).to(torch.uint8)
        value_codes = (values / value_scale).round_().clamp_(-127, 127).to(torch.int8)
        parts = [
            scales.view(torch.uint8),
            key_codes.flatten(),
            value_codes.flatten().view(torch.uint8),
        ]
        torch.cat(parts, out=stored[: sum(part.numel() for part in parts)])
        return stored

    def decode(self, stored: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        _, kv_heads, tokens, head_dim = out.shape
        channels = kv_heads * head_dim
        rows = kv_heads * tokens
        scales = stored[: 4 * (2 * channels + rows)].view(torch.float32)
        key_scale, low = scales[: 2 * channels].view(2, kv_heads, 1, head_dim)
        value_scale = scales[2 * channels :].view(kv_heads, tokens, 1)
        codes = stored[4 * (2 * channels + rows) :][: 2 * rows * head_dim].view(
            2, kv_heads, tokens, head_dim
        )
        # (G, T, D); one broadcasting addcmul takes ten times as long as mul_ and add_
        work = codes[0].float()
        out[0].copy_(work.mul_(key_scale).add_(low))
        out[1].copy_(work.copy_(codes[1].view(torch.int8)).mul_(value_scale))
        return out
