"""Layer slices read ahead of the fusor (CacheBlend section 5, "pipelining KV loading and recompute").

While layer l is fused, layers l+1 ... l+B are being read by threads into a ring of buffers that is allocated once a
request; on CUDA the buffers are pinned and copied on a stream of their own, with events, and no device-wide wait. What
already lies in memory is used where it lies. A damaged entry surfaces here as `EntryDamagedError` of its key.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ragkv.closing import Closing
from ragkv.errors import EntryDamagedError
from ragkv.store import Lease, aligned_empty


class LayerReader(Closing):
    """Reads the slices of several leases, layer by layer, for one request."""

    def __init__(
        self, leases: Sequence[Lease], layers: int, ahead: int, pool: ThreadPoolExecutor, device: torch.device
    ) -> None:
        self._leases, self._layers, self._ahead, self._pool = leases, layers, ahead, pool
        self._ring = [[self._buffer(lease, device) for lease in leases] for _ in range(min(ahead + 1, layers))]
        self._copier = _Copier(device) if device.type == "cuda" else None
        by_threads = [number for number, buffer in enumerate(self._ring[0]) if buffer is not None]
        # By thread, its leases: a task a slice would cost more than checking a slice of 256 KiB does.
        self._shares = [share for i in range(pool._max_workers) if (share := by_threads[i :: pool._max_workers])]
        self._pending: dict[int, list[Future[dict[int, torch.Tensor]]]] = {}
        self.waited_s = 0.0  # time the fusor stood still for slices
        self._reads: list[tuple[int, float]] = []  # bytes and seconds of each slice that a thread read
        for lease in leases:
            lease.begin()
        for layer in range(min(ahead, layers)):
            self._submit(layer)

    def layer(self, layer: int) -> list[torch.Tensor]:
        """The slices (2, G, T, D) of `layer`, one a lease, on the device; valid until the next call."""
        if layer + self._ahead < self._layers:  # with nothing read ahead, that is this very layer
            self._submit(layer + self._ahead)
        began = time.perf_counter()
        read = {number: found for future in self._pending.pop(layer) for number, found in future.result().items()}
        self.waited_s += time.perf_counter() - began
        slices = [read[i] if i in read else _slice(lease, layer) for i, lease in enumerate(self._leases)]
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
        together = max(1, min(by_threads, self._pool._max_workers))
        return sum(size for size, _ in self._reads), sum(seconds for _, seconds in self._reads) / together

    def close(self) -> None:
        """Wait for reads under way: their buffers must outlive them."""
        for futures in self._pending.values():
            for future in futures:
                if not future.cancel():
                    future.exception()
        self._pending.clear()

    def _submit(self, layer: int) -> None:
        self._pending[layer] = [self._pool.submit(self._read_all, share, layer) for share in self._shares]

    def _read_all(self, share: Sequence[int], layer: int) -> dict[int, torch.Tensor]:
        """The slices of a thread's leases, by the leases' numbers."""
        buffers = self._ring[layer % len(self._ring)]
        return {number: self._read(self._leases[number], layer, buffers[number]) for number in share}

    def _read(self, lease: Lease, layer: int, buffer: torch.Tensor | None) -> torch.Tensor:
        assert buffer is not None
        if self._copier is not None:
            self._copier.wait_reusable(buffer)
        began = time.perf_counter()
        found = _slice(lease, layer, buffer)
        self._reads.append((lease.stored_bytes // self._layers, time.perf_counter() - began))
        return found if self._copier is None else self._copier.send(found, layer, buffer)

    @staticmethod
    def _buffer(lease: Lease, device: torch.device) -> torch.Tensor | None:
        if lease.in_place and device.type == "cpu":
            return None  # used where it lies
        if device.type == "cpu":
            return aligned_empty(lease.info.shape, lease.info.dtype)  # else reads past the page cache would be copied
        return torch.empty(lease.info.shape, dtype=lease.info.dtype, pin_memory=True)


def _slice(lease: Lease, layer: int, buffer: torch.Tensor | None = None) -> torch.Tensor:
    """The slice of `layer`; whatever goes wrong in a tier is the damage of that entry, so a miss."""
    try:
        return lease.read_layer(layer, buffer)
    except Exception as error:
        if isinstance(error, EntryDamagedError) and error.key == lease.info.key:
            raise
        raise EntryDamagedError(lease.info.key, f"layer {layer} cannot be read ({error})") from error


class _Copier:
    """Host to device on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sent: dict[int, torch.cuda.Event] = {}  # by host buffer: its last copy
        self._ready: dict[int, list[torch.cuda.Event]] = {}  # by layer

    def wait_reusable(self, buffer: torch.Tensor) -> None:
        """Block this reader thread until the last copy out of `buffer` is over."""
        if (event := self._sent.get(buffer.data_ptr())) is not None:
            event.synchronize()

    def send(self, source: torch.Tensor, layer: int, buffer: torch.Tensor) -> torch.Tensor:
        """Start copying `source`; the result may be used after `arrived`."""
        with torch.cuda.stream(self._stream):
            target = source.to(self._device, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._sent[buffer.data_ptr()] = event
        self._ready.setdefault(layer, []).append(event)
        return target

    def arrived(self, layer: int, slices: list[torch.Tensor]) -> list[torch.Tensor]:
        """Make the current stream, not the host, wait for the copies of `layer`."""
        stream = torch.cuda.current_stream(self._device)
        for event in self._ready.pop(layer, []):
            stream.wait_event(event)
        for piece in slices:
            piece.record_stream(stream)
        return slices
