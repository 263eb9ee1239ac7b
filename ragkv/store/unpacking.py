"""Unpacks the stored layers of many entries at once on a device.

A host decodes one slice after another (`codecs/`). A device gets the stored layers of many entries
in one buffer. The offset of each token's numbers in the buffer is computed once a prompt. Then the
number of operations that unpack a layer does not depend on the number of entries. The layouts are
those of the codecs.
"""

from dataclasses import dataclass

import torch

from .codecs import Codec
from .codecs.int8 import Int8Codec


@dataclass(frozen=True, slots=True)
class TokenOffsets:
    """Where the stored KV of N tokens is in a buffer of one layer."""

    at: torch.Tensor  # (N,) int64: the first byte of the token's entry, a multiple of 4
    tokens: torch.Tensor  # (N,) int64: T of its entry
    token: torch.Tensor  # (N,) int64: its index in the entry
    kv_heads: int  # G
    head_dim: int  # D
    dtype: torch.dtype  # of the keys and values

    def heads(self) -> torch.Tensor:
        """0 ... G - 1, (G, 1)."""
        return torch.arange(self.kv_heads, device=self.at.device)[:, None]

    def elements(self) -> torch.Tensor:
        """Index of each token's first number in arrays (2, G, T, D) of their entries, (2, G, N)."""
        kinds = torch.arange(2, device=self.at.device)[:, None, None]
        heads = kinds * self.kv_heads + self.heads()
        return (heads * self.tokens + self.token) * self.head_dim


class Unpacking:
    """Unpacks entries whose codec stores plain numbers."""

    def __init__(self, codec: Codec, offsets: TokenOffsets) -> None:
        # of a stored layer
        self.numbers: torch.dtype | None = codec.layout((2, 1, 1, 1), offsets.dtype).dtype
        self._head_dim = offsets.head_dim
        self._dtype = offsets.dtype
        self._first = offsets.at // self.numbers.itemsize + offsets.elements()  # (2, G, N)

    def unpack(self, buffer: torch.Tensor) -> torch.Tensor:
        """Keys and values (2, G, N, D) of the tokens in `buffer` (B,) uint8."""
        assert self.numbers is not None
        return _windows(buffer.view(self.numbers), self._head_dim)[self._first].to(self._dtype)


class Int8Unpacking(Unpacking):
    """Unpacks entries of the codec `int8`."""

    def __init__(self, codec: Codec, offsets: TokenOffsets) -> None:
        self.numbers = None  # they are codes
        self._head_dim = offsets.head_dim
        self._dtype = offsets.dtype
        channels = offsets.kv_heads * offsets.head_dim
        first = offsets.at // 4
        rows = offsets.kv_heads * offsets.tokens  # (N,)
        self._code_at = offsets.at + 4 * (2 * channels + rows) + offsets.elements()  # (2, G, N)
        key_at = first + offsets.heads() * offsets.head_dim  # (G, N)
        self._key_at = torch.stack((key_at, key_at + channels))  # of scale and low
        token_at = offsets.heads() * offsets.tokens + offsets.token
        self._value_at = first + 2 * channels + token_at  # (G, N)

    def unpack(self, buffer: torch.Tensor) -> torch.Tensor:
        floats = buffer.view(torch.float32)
        codes = _windows(buffer, self._head_dim)[self._code_at]  # (2, G, N, D)
        key_scale, low = _windows(floats, self._head_dim)[self._key_at]
        found = torch.empty(codes.shape, dtype=self._dtype, device=buffer.device)
        torch.addcmul(low, codes[0], key_scale, out=found[0])
        value_scale = floats[self._value_at][..., None]
        torch.mul(codes[1].view(torch.int8), value_scale, out=found[1])
        return found


def unpacking(codec: Codec, offsets: TokenOffsets) -> Unpacking:
    """How tokens at `offsets` are unpacked that `codec` stored."""
    made = Int8Unpacking if isinstance(codec, Int8Codec) else Unpacking
    return made(codec, offsets)


def _windows(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """A view (n - width + 1, width) of `numbers` (n,): row i begins at number i."""
    return numbers.as_strided((numbers.numel() - width + 1, width), (1, 1))
