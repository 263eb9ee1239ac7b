"""Unpacks, rotates and places the stored tokens of all entries at once. The indices for it are
computed once a prompt.

The number of operations does not depend on the number of entries. If Triton is installed, one
kernel does all of it.
"""

import time
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from ragkv.model import Adapter, PromptKV, Recording, Rows, sent
from ragkv.model.device.kernels import placing_kernel
from ragkv.model.rope import RotaryTables
from ragkv.store.codecs import Codec
from ragkv.store.unpacking import TokenOffsets, unpacking

from ..plan import Span

if TYPE_CHECKING:
    from .staging import StagedReader


class DevicePlacing:
    """Places the N tokens of loaded spans, counted codec by codec."""

    def __init__(
        self,
        reader: "StagedReader",
        adapter: Adapter,
        tables: RotaryTables,
        spans: Sequence[Span],
        kv: PromptKV,
        record: Recording | None,
    ) -> None:
        entries = sorted(
            zip(spans, reader.codecs, reader.starts, strict=True), key=lambda one: one[1].name
        )
        device = adapter.device
        self._reader = reader
        self._adapter = adapter
        self._tables = tables
        self._kv = kv
        self._record = record
        self._rotations: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by kind of table
        self.seconds = 0.0
        self._codes = [
            _Codes(adapter, codec, [(span, start) for span, _, start in own])
            for codec, own in groupby(entries, key=lambda one: one[1])
        ]
        # the positions of the N tokens, (N,) on the host
        self.positions = _joined([torch.arange(span.start, span.stop) for span, *_ in entries])
        self._rows = Rows.unread(sent(self.positions, device), len(self.positions))
        # KCache allocates values when it writes them.
        is_usual = type(kv) is PromptKV and tables.start == 0
        can = device.type == "cuda" and adapter.rotation.in_halves and is_usual
        self.kernel = placing_kernel() if can else None  # `None`: some operations of torch
        self._recorded: tuple[torch.Tensor, torch.Tensor] | None = None
        if record is not None:
            placed = self.positions
            inside = ((placed >= record.start) & (placed < record.stop)).nonzero()[:, 0]
            if len(inside):
                places = record.places(placed[inside])
                self._recorded = sent(inside, device), sent(places, device)

    def place(self, layer: int) -> None:
        self._reader.take(layer)
        if not self._codes:
            return
        began = time.perf_counter()
        self._buffer = self._reader.buffer
        self._unpacked: torch.Tensor | None = None
        if self.kernel is not None:
            self._place_by_kernel(self.kernel, layer)
        else:
            raw = self._raw()
            k_rot = self._adapter.rotate(layer, raw[:1], *self._rotation(layer))
            self._kv.write(layer, self._rows, k_rot, raw[1:])
        if self._recorded is not None and self._record is not None:
            inside, places = self._recorded
            self._record.put_at(layer, places, self._raw()[:, :, inside])
        self.seconds += time.perf_counter() - began

    def stored(self, index: torch.Tensor) -> torch.Tensor:
        return self._raw().index_select(2, index)

    def _place_by_kernel(self, kernel: Any, layer: int) -> None:
        keys = self._kv.keys[layer]
        values = self._kv.values[layer]
        rotation = None
        if self._adapter.rotates(layer):
            rotation = self._tables.tables[self._adapter.rope_kind(layer)]
        rows = torch.split(self._rows.positions, [len(codes.tokens[0]) for codes in self._codes])
        for codes, positions in zip(self._codes, rows, strict=True):
            stored = kernel.StoredTokens(*codes.tokens, positions)
            kernel.place(self._buffer, codes.numbers, stored, rotation, keys, values)

    def _raw(self) -> torch.Tensor:
        """Stored keys and values of the layer, (2, G, N, D)."""
        if self._unpacked is None:
            found = [codes.unpack(self._buffer) for codes in self._codes]
            self._unpacked = found[0] if len(found) == 1 else torch.cat(found, dim=2)
        return self._unpacked

    def _rotation(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the N tokens, equal in layers of a kind."""
        kind = self._adapter.rope_kind(layer)
        if kind not in self._rotations:
            self._rotations[kind] = self._tables.rows(kind, self._rows.positions)
        return self._rotations[kind]


class _Codes:
    """The tokens of a device's buffer that one codec stored."""

    def __init__(self, adapter: Adapter, codec: Codec, entries: Sequence[tuple[Span, int]]) -> None:
        """`entries` are spans, and where their stored layers start in the buffer, in bytes."""
        facts = [
            (start, 0 if span.lease is None else span.lease.info.tokens) for span, start in entries
        ]
        counts = torch.tensor([len(span) for span, _ in entries])
        per_token = torch.tensor(facts).repeat_interleave(counts, dim=0)  # (N, 2)
        token = _joined([torch.arange(len(span)) + span.offset for span, _ in entries])
        at, tokens, token = sent(torch.stack((*per_token.T, token)), adapter.device)
        self.tokens = (at, tokens, token)
        offsets = TokenOffsets(at, tokens, token, adapter.kv_heads, adapter.head_dim, adapter.dtype)
        made = unpacking(codec, offsets)
        self.numbers = made.numbers  # the dtype of plain numbers, `None` for codes
        self.unpack = made.unpack


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.int64)
