"""Reads layer slices ahead of the fusor (CacheBlend section 5, "pipelining KV loading and
recompute"), and places them in a prompt's KV.

While layer l is fused, reader threads read the layers l+1 ... l+B into a ring of buffers that
requests reuse one after another. Slices that are in memory already are used in place. A damaged
entry raises `EntryDamagedError` with its key. For a GPU, `device/staging.py` reads instead, and
`device/placing.py` places.

The layers read ahead are the read buffer of CachedAttention section 3.2.1. The paper's `S_buf = B
(T_load L_hist - T_pref L_new)` is the number of bytes by which loading falls behind computing in a
pass. Here S_buf is counted in layers: the number of layers, times the share of loading that
computing does not hide. Reading starts before the request gets the compute lock, so the buffer
fills while other requests compute.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from ragkv.errors import EntryDamagedError, EntryUnreachableError
from ragkv.model import Adapter, PromptKV, Recording
from ragkv.model.rope import RotaryTables
from ragkv.runtime import Closing, openmp
from ragkv.store.tiers import Lease

from .plan import Span

if TYPE_CHECKING:
    from .device.placing import DevicePlacing

Placing: TypeAlias = "HostPlacing | DevicePlacing"

MOST_BYTES = 256 * 1024**2  # size of one request's read buffers, whatever was measured
UNMEASURED = 2  # layers read ahead before the first measurement
WEIGHT = 0.3  # weight of the latest measurement in a running mean
REUSABLE_BUFFERS = 2
# Larger buffers are given back, so that one long prompt does not hold memory for ever.
REUSABLE_BYTES = 64 * 1024**2

_Slices = dict[int, torch.Tensor]  # by index of the lease: the slice (2, G, T, D) of one layer


@dataclass(eq=False)
class Readers(Closing):
    """An engine's reader threads and their reusable buffers.

    Buffers are reused because the system fills fresh memory with zeros, page by page, at the first
    write. For a request that reads small slices the buffers are a third of the bytes it reads, and
    the disk would wait meanwhile.
    """

    threads: int
    _reusable: deque[torch.Tensor] = field(
        default_factory=partial(deque, maxlen=REUSABLE_BUFFERS), init=False
    )
    _pool: ThreadPoolExecutor | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)  # guards the pool

    @property
    def pool(self) -> ThreadPoolExecutor:
        """The threads; they start with the first slice that is read."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    self.threads, "ragkv-reader", initializer=openmp.use_one_thread
                )
            return self._pool

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """A host buffer of at least `size` bytes, uninitialized; page-locked for a CUDA
        `device`.
        """
        # torch reuses these itself: it knows which of them a copy still reads
        if device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        try:
            buffer = self._reusable.popleft()
        except IndexError:
            buffer = torch.empty(0, dtype=torch.uint8)
        return buffer if buffer.numel() >= size else torch.empty(size, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer that no thread reads or writes any more."""
        if buffer.numel() <= REUSABLE_BYTES and not buffer.is_pinned():
            self._reusable.append(buffer)

    def close(self) -> None:
        with self._lock:
            pool = self._pool
        if pool is not None:
            pool.shutdown()
        self._reusable.clear()


class LayerReader(Closing):
    """Reads the slices of several leases for one request, layer by layer."""

    def __init__(
        self,
        leases: Sequence[Lease],
        layers: int,
        ahead: int,
        readers: Readers,
        device: torch.device,
    ) -> None:
        """`ahead` is how many layers are read before they are needed."""
        self._leases = leases
        self._layers = layers
        self._readers = readers
        self._ahead = ahead
        depth = min(layers, ahead + 1)
        strides = [aligned(self._ring_bytes(lease)) for lease in leases]
        self._buffer: torch.Tensor | None = readers.take(depth * sum(strides), device)
        rows = self._buffer[: depth * sum(strides)].view(depth, sum(strides))
        self._ring = [
            [
                self._in_ring(lease, piece) if len(piece) else None
                for lease, piece in zip(leases, row.split(strides), strict=True)
            ]
            for row in rows
        ]
        threaded = [i for i, lease in enumerate(leases) if self._is_threaded(lease)]
        # Each thread gets several leases: one task per slice would cost more than checking a slice
        # of 256 KiB.
        self._shares = [
            share for i in range(readers.threads) if (share := threaded[i :: readers.threads])
        ]
        # the slices (2, G, T, D) of the layer taken last, one per lease
        self.slices: list[torch.Tensor] = []
        self._pending: dict[int, list[Future[_Slices]]] = {}  # by layer
        self.waited_s = 0.0  # time the fusor waited for slices
        self._read_s: list[float] = []  # the time of each slice that a thread read
        for lease in leases:
            lease.prefetch()
        for layer in range(ahead):
            self._submit(layer)

    def placing(
        self,
        adapter: Adapter,
        tables: RotaryTables,
        spans: Sequence[Span],
        kv: PromptKV,
        record: Recording | None,
    ) -> "Placing":
        """Returns an object that places the layers of `spans` in `kv`. There is a span for each
        lease. `record` gets their raw KV.
        """
        return HostPlacing(self, adapter, tables, spans, kv, record)

    def take(self, layer: int) -> None:
        """Wait until `layer` is read. Its `slices` are valid until the next call or `close`.

        Must be called for every layer in ascending order. Raises `EntryDamagedError`.
        """
        read = self._read_by_threads(layer)
        self.slices = [
            read[index] if index in read else read_slice(lease, layer, None)
            for index, lease in enumerate(self._leases)
        ]

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes read from each tier. What lies in memory counts once, for however many ranges it is
        used.
        """
        counts: dict[str, int] = {}
        in_place = {id(lease): lease for lease in self._leases if lease.in_place}
        for lease in (*in_place.values(), *(one for one in self._leases if not one.in_place)):
            counts[lease.kind] = counts.get(lease.kind, 0) + lease.stored_bytes
        return counts

    @property
    def read_bytes(self) -> int:
        """Bytes that the threads read; slices in memory are used where they lie."""
        return sum(lease.stored_bytes for lease in self._leases if not lease.in_place)

    @property
    def read_s(self) -> float:
        """Seconds that reading would take one slice after another at the joint bandwidth."""
        count = sum(not lease.in_place for lease in self._leases)
        return sum(self._read_s) / max(1, min(count, self._readers.threads))

    def close(self) -> None:
        """Wait for running reads, because the next request gets their buffer; then return the
        buffer.
        """
        for futures in self._pending.values():
            for future in futures:
                if not future.cancel():
                    future.exception()
        self._pending.clear()
        if self._buffer is not None:
            self._readers.give_back(self._buffer)
            self._buffer = None

    def _submit(self, layer: int) -> None:
        if layer >= self._layers:
            return
        futures = self._pending[layer] = []
        for share in self._shares:
            try:
                futures.append(self._readers.pool.submit(self._read_share, share, layer))
            except RuntimeError as error:  # The system has no thread to give.
                # Another thread may still read what was queued, so nobody gets this buffer again.
                self._buffer = None
                self.close()
                key = self._leases[share[0]].info.key
                raise EntryUnreachableError(key, f"no thread can read it ({error})") from error

    def _read_by_threads(self, layer: int) -> _Slices:
        """Begin the layer that is read ahead now; what the threads read of `layer`."""
        self._submit(layer + self._ahead)  # without read-ahead this is the layer itself
        began = time.perf_counter()
        read = {
            index: piece
            for future in self._pending[layer]
            for index, piece in future.result().items()
        }
        del self._pending[layer]
        self.waited_s += time.perf_counter() - began
        return read

    def _read_share(self, share: Sequence[int], layer: int) -> _Slices:
        return {index: self._read_lease(index, layer) for index in share}

    def _read_lease(self, index: int, layer: int) -> torch.Tensor:
        began = time.perf_counter()
        found = read_slice(self._leases[index], layer, self._ring[layer % len(self._ring)][index])
        self._read_s.append(time.perf_counter() - began)
        return found

    def _ring_bytes(self, lease: Lease) -> int:
        """Bytes of a layer in the ring; 0 if it is used in place."""
        return 0 if lease.in_place else lease.info.layer_bytes

    def _in_ring(self, lease: Lease, piece: torch.Tensor) -> torch.Tensor:
        """The tensor that a layer is read into, in a piece of the ring."""
        info = lease.info
        return piece[: info.layer_bytes].view(info.dtype).view(info.shape)

    def _is_threaded(self, lease: Lease) -> bool:
        return not lease.in_place


class HostPlacing:
    """Puts slices at their spans' positions in a prompt's KV; `DevicePlacing` does on a device."""

    def __init__(
        self,
        reader: LayerReader,
        adapter: Adapter,
        tables: RotaryTables,
        spans: Sequence[Span],
        kv: PromptKV,
        record: Recording | None,
    ) -> None:
        self._reader = reader
        self._adapter = adapter
        self._tables = tables
        self._spans = spans
        self._kv = kv
        self._record = record
        self._rotations: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by kind of table
        self.seconds = 0.0  # spent on placing, without waiting for what is read

    def place(self, layer: int) -> None:
        """Wait until `layer` is read, and put it in place with rotated keys. Must be called for
        every layer in ascending order. Raises `EntryDamagedError`.
        """
        self._reader.take(layer)
        if not self._spans:
            return
        began = time.perf_counter()
        self._parts = parts = [
            piece[:, :, span.offset :][:, :, : len(span)]
            for span, piece in zip(self._spans, self._reader.slices, strict=True)
        ]
        # (1, G, sum T, D): one rotation for all
        k_raw = torch.cat([part[0] for part in parts], dim=1).unsqueeze(0)
        rotated = self._adapter.rotate_in_float32(layer, k_raw, *self._rotation(layer))
        k_rots = torch.split(rotated, [len(span) for span in self._spans], dim=2)
        for span, k_rot, part in zip(self._spans, k_rots, parts, strict=True):
            self._kv.put(layer, span.start, k_rot, part[1].unsqueeze(0))
            if self._record is not None:
                self._record.put(layer, span.start, part)
        self.seconds += time.perf_counter() - began

    @property
    def positions(self) -> torch.Tensor:
        """The positions of the N tokens that are placed, (N,) on the host."""
        return torch.cat([torch.arange(span.start, span.stop) for span in self._spans])

    def stored(self, index: torch.Tensor) -> torch.Tensor:
        """Stored keys and values (2, G, C, D) of the tokens of `index` (C,) in the layer placed
        last.
        """
        return torch.cat(self._parts, dim=2).index_select(2, index)

    def _rotation(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin of the spans' positions, (1, sum T, rotary dims): equal in layers of a kind."""
        kind = self._adapter.rope_kind(layer)
        if kind not in self._rotations:
            parts = [self._tables.span(kind, span.start, span.stop) for span in self._spans]
            cos, sin = (torch.cat(tables, dim=1) for tables in zip(*parts, strict=True))
            self._rotations[kind] = cos, sin
        return self._rotations[kind]


def aligned(size: int) -> int:
    """The least multiple of 64 bytes: a slice that begins there can have any dtype."""
    return size + -size % 64


def read_slice(
    lease: Lease, layer: int, buffer: torch.Tensor | None, stored: bool = False
) -> torch.Tensor:
    """The slice of a layer, or the layer as it is stored; every error of a tier is a miss. One
    that is no damage, such as too little memory, is an `EntryUnreachableError`.
    """
    try:
        return lease.read_stored(layer, buffer) if stored else lease.read_layer(layer, buffer)
    except Exception as error:
        if isinstance(error, EntryDamagedError) and error.key == lease.info.key:
            raise
        raise EntryUnreachableError(
            lease.info.key, f"layer {layer}: {type(error).__name__} ({error})"
        ) from error


def layers_ahead(load_s: float, compute_s: float, layers: int) -> int:
    """S_buf in layers of the request's own KV, at least 1: one layer is read while the one before
    is computed.

    `load_s` is T_load L_hist and `compute_s` T_pref L_new; a layer takes load_s / layers at any
    bandwidth B.
    """
    share = 0.0 if load_s <= 0.0 else max(0.0, load_s - compute_s) / load_s
    return min(layers, max(1, math.ceil(share * layers)))


@dataclass(eq=False)
class Speeds:
    """Running means of how fast an engine reads and computes; `None` before the first
    measurement. Read-ahead follows them and not the controller's profile, which may be missing.
    """

    _byte_s: float | None = field(default=None, init=False)
    # seconds of a row in a layer, placing reused KV included
    row_layer_s: float | None = field(default=None, init=False)

    def add_read(self, size_bytes: int, seconds: float) -> None:
        """Add a measurement of reading."""
        self._byte_s = _mean(self._byte_s, size_bytes, seconds)

    def add_compute(self, row_layers: int, seconds: float) -> None:
        """Add a measurement of computing; `row_layers` are the rows, summed over layers."""
        self.row_layer_s = _mean(self.row_layer_s, row_layers, seconds)

    def ahead(self, size_bytes: int, row_layers: int, layers: int, least: int = 0) -> int:
        """Layers to read ahead in a pass that reads `size_bytes` and computes `row_layers` over
        `layers` layers; `least` if their buffers are not too large.
        """
        wanted = UNMEASURED
        if self._byte_s is not None and self.row_layer_s is not None and size_bytes:
            load_s = self._byte_s * size_bytes
            wanted = layers_ahead(load_s, self.row_layer_s * row_layers, layers)
        return max(1, min(max(wanted, least), MOST_BYTES * layers // max(1, size_bytes)))


def _mean(before: float | None, amount: int, seconds: float) -> float | None:
    if amount <= 0 or seconds <= 0.0:
        return before
    latest = seconds / amount
    return latest if before is None else (1 - WEIGHT) * before + WEIGHT * latest
