"""Layer slices read ahead of the fusor (CacheBlend section 5, "pipelining KV loading and recompute").

While layer l is fused, layers l+1 ... l+B are being read by threads, several at once where a tier asks for it, into a
ring of buffers that requests hand on; on CUDA the buffers are pinned and copied on a stream of their own, with events,
and no device-wide wait. What already lies in memory is used where it lies. A damaged entry surfaces here as
`EntryDamagedError` of its key.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from ragkv.errors import EntryDamagedError
from ragkv.runtime import Closing
from ragkv.store import ALIGNMENT, EntryInfo, Lease

from .readers import Readers

_Slices = dict[int, list[torch.Tensor]]  # by number of the lease: slices (2, G, T, D) of consecutive layers


class LayerReader(Closing):
    """Reads the slices of several leases, layer by layer, for one request; small ones of several layers at once."""

    def __init__(
        self, leases: Sequence[Lease], layers: int, ahead: int, readers: Readers, device: torch.device
    ) -> None:
        self._leases, self._layers, self._readers = leases, layers, readers
        self._together = min(layers, max((lease.layers_per_read for lease in leases), default=1))  # layers of a group
        self._ahead = -(-ahead // self._together)  # groups
        depth = min(layers, (self._ahead + 1) * self._together)
        # Each buffer begins at a page: else reads past the page cache would be copied.
        infos = [None if lease.in_place and device.type == "cpu" else lease.info for lease in leases]
        strides = [0 if info is None else info.layer_bytes + -info.layer_bytes % ALIGNMENT for info in infos]
        self._memory: torch.Tensor | None = readers.take(depth * sum(strides), device)
        rows = self._memory[: depth * sum(strides)].view(depth, sum(strides))
        self._ring = [_buffers(infos, row.split(strides)) for row in rows]
        self._copier = _Copier(device) if device.type == "cuda" else None
        by_threads = [number for number, buffer in enumerate(self._ring[0]) if buffer is not None]
        # By thread, its leases: a task a slice would cost more than checking a slice of 256 KiB does.
        self._shares = [share for i in range(readers.threads) if (share := by_threads[i :: readers.threads])]
        self._pending: dict[int, list[Future[_Slices]]] = {}  # by group
        self._read: _Slices = {}  # of the present group
        self.waited_s = 0.0  # time the fusor stood still for slices
        self._reads: list[tuple[int, float]] = []  # bytes and seconds of what a thread read at once
        for lease in leases:
            lease.prefetch()
        for group in range(self._ahead):
            self._submit(group)

    def layer(self, layer: int) -> list[torch.Tensor]:
        """The slices (2, G, T, D) of `layer`, one a lease, on the device; valid until the next call, or until closed.

        To be called for each layer in turn. Raises `EntryDamagedError`, of the layer or of one read together with it.
        """
        group, place = divmod(layer, self._together)
        if place == 0:
            self._submit(group + self._ahead)  # with nothing read ahead, that is this very group
            began = time.perf_counter()
            futures = self._pending[group]
            self._read = {number: slices for future in futures for number, slices in future.result().items()}
            del self._pending[group]
            self.waited_s += time.perf_counter() - began
        slices = [
            self._read[number][place] if number in self._read else _slices(lease, layer, [None])[0]
            for number, lease in enumerate(self._leases)
        ]
        return slices if self._copier is None else self._copier.arrived(layer, slices)

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes read, by the tier they came from."""
        counts: dict[str, int] = {}
        for lease in self._leases:
            counts[lease.kind.value] = counts.get(lease.kind.value, 0) + lease.stored_bytes
        return counts

    def measured(self) -> tuple[int, float]:
        """Bytes that threads read, and how long one pipe would have been busy with them."""
        by_threads = sum(not lease.in_place for lease in self._leases)
        together = max(1, min(by_threads, self._readers.threads))
        return sum(size for size, _ in self._reads), sum(seconds for _, seconds in self._reads) / together

    def close(self) -> None:
        """Wait for reads under way: their buffers must outlive them, and serve the next request."""
        for futures in self._pending.values():
            for future in futures:
                if not future.cancel():
                    future.exception()
        self._pending.clear()
        if self._memory is not None:
            self._readers.give_back(self._memory)
            self._memory = None

    def _submit(self, group: int) -> None:
        layers = range(self._layers)[group * self._together :][: self._together]
        if layers:
            self._pending[group] = [
                self._readers.pool.submit(self._read_share, share, layers) for share in self._shares
            ]

    def _read_share(self, share: Sequence[int], layers: range) -> _Slices:
        """Those layers of a thread's leases."""
        return {number: self._read_lease(number, layers) for number in share}

    def _read_lease(self, number: int, layers: range) -> list[torch.Tensor]:
        lease = self._leases[number]
        buffers = [self._ring[layer % len(self._ring)][number] for layer in layers]
        if self._copier is not None:
            self._copier.wait_reusable(buffers)
        began = time.perf_counter()
        found = _slices(lease, layers.start, buffers)
        self._reads.append((lease.stored_bytes // self._layers * len(layers), time.perf_counter() - began))
        return found if self._copier is None else self._copier.send(found, layers, buffers)


def _buffers(infos: Sequence[EntryInfo | None], pieces: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Of one layer: a buffer (2, G, T, D) a lease, or `None` where the slice is used where it lies."""
    return [
        None if info is None else piece[: info.layer_bytes].view(info.dtype).view(info.shape)
        for info, piece in zip(infos, pieces, strict=True)
    ]


def _slices(lease: Lease, first: int, buffers: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The slices of layers from `first` on; whatever goes wrong in a tier is the damage of that entry, so a miss."""
    try:
        return lease.read_layers(first, buffers)
    except Exception as error:
        if isinstance(error, EntryDamagedError) and error.key == lease.info.key:
            raise
        raise EntryDamagedError(lease.info.key, f"layer {first} cannot be read ({error})") from error


class _Copier:
    """Host to device on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sent: dict[int, torch.cuda.Event] = {}  # by host buffer: its last copy
        self._ready: dict[int, list[torch.cuda.Event]] = {}  # by layer

    def wait_reusable(self, buffers: Sequence[torch.Tensor | None]) -> None:
        """Block this reader thread until the last copies out of `buffers` are over."""
        for buffer in buffers:
            if buffer is not None and (event := self._sent.get(buffer.data_ptr())) is not None:
                event.synchronize()

    def send(
        self, sources: Sequence[torch.Tensor], layers: range, buffers: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Start copying `sources`; the results may be used after `arrived`."""
        targets = []
        for source, layer, buffer in zip(sources, layers, buffers, strict=True):
            with torch.cuda.stream(self._stream):
                targets.append(source.to(self._device, non_blocking=True))
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
            if buffer is not None:
                self._sent[buffer.data_ptr()] = event
            self._ready.setdefault(layer, []).append(event)
        return targets

    def arrived(self, layer: int, slices: list[torch.Tensor]) -> list[torch.Tensor]:
        """Make the current stream, not the host, wait for the copies of `layer`."""
        stream = torch.cuda.current_stream(self._device)
        for event in self._ready.pop(layer, []):
            stream.wait_event(event)
        for piece in slices:
            piece.record_stream(stream)
        return slices
