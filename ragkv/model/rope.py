"""Rotary tables: the model's own cos and sin for any range of positions, without changing the
model.

A rotary module may keep state (dynamic RoPE grows and never shrinks, longrope switches sets), so
every table is made with a fresh copy that is then discarded. Frequencies may depend on the prompt's
length. A digest identifies the frequencies of a table. Only KV with equal digests can be equal.
Keys are stored before RoPE and rotated to their positions with these tables (CacheBlend section
4.3, footnote 3 and appendix A). The paper rotates rotated keys again. Starting from raw keys gives
the same rotation without the first rounding.
"""

import copy
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .cpu.copied import FEW_ROWS
from .device.rotation import rotate_halves
from .rows import Rows

_LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """cos and sin of the positions `start ... start + n - 1`, per kind of layer, in float32."""

    tables: dict[str, torch.Tensor]  # kind -> cos and sin, (2, n, rotary dims)
    rope_digest: str  # digest of the frequencies
    start: int = 0

    def rows(self, kind: str, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each (1, R, rotary dims), of `positions` (R,)."""
        index = positions - self.start if self.start else positions
        cos, sin = self.tables[kind].index_select(1, index)
        return cos.unsqueeze(0), sin.unsqueeze(0)

    def of(self, kind: str, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each (1, R, rotary dims), of `rows`: views if they are contiguous."""
        if rows.start is None:
            return self.rows(kind, rows.positions)
        return self.span(kind, rows.start, rows.start + len(rows))

    def span(self, kind: str, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each (1, stop - start, rotary dims), of a contiguous range: views."""
        cos, sin = self.tables[kind]
        place = slice(start - self.start, stop - self.start)
        return cos[place].unsqueeze(0), sin[place].unsqueeze(0)


class Rope:
    """Makes rotary tables for one model."""

    def __init__(
        self, rotary: torch.nn.Module, kinds: tuple[str, ...], device: torch.device
    ) -> None:
        self._kinds = kinds  # ("",) if all layers share one table
        config: Any = rotary.config
        self._pristine: Any = type(rotary)(config).to(device)
        types = rotary.rope_type
        names = list(types.values()) if isinstance(types, dict) else [str(types)]
        self.depends_on_length = any(
            kind in str(name) for name in names for kind in _LENGTH_DEPENDENT
        )
        self._device = device
        self._lock = threading.Lock()
        self._static: RotaryTables | None = None

    def tables(self, length: int, start: int = 0) -> RotaryTables:
        """Tables of the positions `start ... length - 1` with the frequencies of a prompt of
        `length` tokens.
        """
        if self.depends_on_length:
            return self._make(length, start)
        with self._lock:
            if self._static is None or next(iter(self._static.tables.values())).shape[1] < length:
                self._static = self._make(1 << max(10, (length - 1).bit_length()), 0)
            return self._static

    def digest(self, length: int) -> str:
        """Digest of the frequencies of a prompt of `length` tokens."""
        return self.tables(length, start=max(0, length - 1)).rope_digest

    @torch.inference_mode(False)  # a step asks first, but training multiplies by its tables too
    def _make(self, length: int, start: int) -> RotaryTables:
        rotary = copy.deepcopy(self._pristine)
        like = torch.empty(0, dtype=torch.float32, device=self._device)
        positions = torch.arange(start, length, device=self._device).unsqueeze(0)
        # Position 1 is rotated by the frequencies themselves, for any range. The last position sets
        # the length.
        probe = torch.tensor([[1, length - 1]], device=self._device)
        digest = hashlib.blake2b(digest_size=8)
        tables = {}
        for kind in self._kinds:
            arguments = (kind,) if kind else ()
            cos, sin = rotary(like, positions, *arguments)
            tables[kind] = torch.cat((cos, sin))
            for part in rotary(like, probe, *arguments):
                digest.update(part[0, 0].cpu().numpy().tobytes())
        return RotaryTables(tables, digest.hexdigest(), start)


class Rotation:
    """Rotates queries and keys by cos and sin, each (1, R, rotary dims)."""

    def __init__(
        self,
        by_model: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        rotary_dims: int,
        device: torch.device,
    ) -> None:
        """`by_model` is the model's own function of queries, keys, cos and sin."""
        self._by_model = by_model
        self.in_halves = self._measured_halves(rotary_dims, device)

    def __call__(self, raw: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate (1, heads, R, D), computed in float32."""
        if raw.device.type != "cpu" and self.in_halves and not raw.requires_grad:
            return rotate_halves(raw, cos, sin)
        return self.in_float32(raw, cos, sin).type_as(raw)

    def in_float32(self, raw: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate as `__call__` does, but the result stays float32 and the caller rounds it."""
        rotary_dims = cos.shape[-1]
        whole = rotary_dims == raw.shape[-1]
        part = (raw if whole else raw[..., :rotary_dims]).float()
        rotated = (
            self._halves(part, cos, sin) if self.in_halves else self._keys_by_model(part, cos, sin)
        )
        return rotated if whole else torch.cat((rotated, raw[..., rotary_dims:].float()), dim=-1)

    def _keys_by_model(
        self, raw: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        # zero query heads: only keys are rotated
        _, rotated = self._by_model(raw[:, :0], raw, cos, sin)
        return rotated

    @staticmethod
    def _halves(raw: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """raw cos + rotate_half(raw) sin; for many rows with half of the memory passes of the
        model's own function.
        """
        raw_first, raw_second = raw.chunk(2, dim=-1)
        rotated = raw * cos
        half = raw.shape[-1] // 2
        if raw.shape[2] <= FEW_ROWS and raw.device.type == "cpu":
            return rotated.addcmul_(torch.cat((-raw_second, raw_first), dim=-1), sin)
        sin_first, sin_second = sin.chunk(2, dim=-1)
        # slices: training may not change chunks
        rotated[..., :half].addcmul_(raw_second, sin_first, value=-1)
        rotated[..., half:].addcmul_(raw_first, sin_second)
        return rotated

    def _measured_halves(self, rotary_dims: int, device: torch.device) -> bool:
        """Whether the model's rotary function equals `_halves`; tested on random numbers."""
        generator = torch.Generator().manual_seed(0)
        raw, cos, sin = (
            torch.randn((1, 3, rotary_dims), generator=generator).to(device) for _ in range(3)
        )
        raw = torch.stack((raw, -2 * raw), dim=1)  # (1, 2, 3, rotary dims)
        return rotary_dims % 2 == 0 and torch.allclose(
            self._keys_by_model(raw, cos, sin), self._halves(raw, cos, sin), atol=1e-5
        )
