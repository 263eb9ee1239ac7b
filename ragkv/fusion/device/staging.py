"""Reads the stored layers of all entries into one buffer of a device, side by side.

The layers are copied in their stored form, and unpacked on the device (`placing.py`). On CUDA the
host's buffers are page-locked and copied on a stream of their own. Events order the copies, so the
host never waits.
"""

import time
from collections.abc import Sequence

import torch

from ragkv.model import Adapter, PromptKV, Recording
from ragkv.model.rope import RotaryTables
from ragkv.store.codecs import Codec
from ragkv.store.tiers import Lease, TierKind

from ..pipeline import LayerReader, Placing, Readers, aligned, read_slice
from ..plan import Span
from .placing import DevicePlacing


class StagedReader(LayerReader):
    """Reads the stored layers of all leases into one `buffer` on the device, lease i from byte
    `starts[i]` on. It has no `slices`.
    """

    def __init__(
        self,
        leases: Sequence[Lease],
        layers: int,
        ahead: int,
        readers: Readers,
        device: torch.device,
    ) -> None:
        self._sizes = [aligned(_stored_bytes(lease)) for lease in leases]
        self.codecs: list[Codec] = [lease.codec for lease in leases]
        self.starts = [sum(self._sizes[:index]) for index in range(len(leases))]
        self._copier = _Copier(device)
        self._targets: dict[int, torch.Tensor] = {}  # by layer
        super().__init__(leases, layers, ahead, readers, device)

    def placing(
        self,
        adapter: Adapter,
        tables: RotaryTables,
        spans: Sequence[Span],
        kv: PromptKV,
        record: Recording | None,
    ) -> Placing:
        return DevicePlacing(self, adapter, tables, spans, kv, record)

    def take(self, layer: int) -> None:
        self._read_by_threads(layer)
        self.buffer = self._targets.pop(layer)  # (B,) uint8: of the layer taken last
        self._copier.arrived(layer, self.buffer)

    def _ring_bytes(self, lease: Lease) -> int:
        return 0 if lease.kind == TierKind.MEMORY else _stored_bytes(lease)

    def _in_ring(self, lease: Lease, piece: torch.Tensor) -> torch.Tensor:
        layout = lease.codec.layout(lease.info.shape, lease.info.dtype)
        return piece[: _stored_bytes(lease)].view(layout.dtype).view(layout.shape)

    def _is_threaded(self, lease: Lease) -> bool:
        """A copy out of memory that is not page-locked blocks."""
        return True

    def _submit(self, layer: int) -> None:
        if layer < self._layers:
            self._targets[layer] = self._copier.allocate(sum(self._sizes))
        super()._submit(layer)

    def _read_share(self, share: Sequence[int], layer: int) -> dict[int, torch.Tensor]:
        part = (layer % len(self._ring), share[0])
        self._copier.wait_reusable(part)
        sources = [self._read_stored(index, layer) for index in share]
        places = self._targets[layer].split_with_sizes(self._sizes)
        targets = [
            places[index][: source.numel()] for index, source in zip(share, sources, strict=True)
        ]
        self._copier.send(targets, sources, layer, part)
        return {}

    def _read_stored(self, index: int, layer: int) -> torch.Tensor:
        """The bytes of a stored layer in host memory."""
        lease = self._leases[index]
        out = self._ring[layer % len(self._ring)][index]
        began = time.perf_counter()
        found = read_slice(lease, layer, out, stored=True)
        if out is not None:
            self._read_s.append(time.perf_counter() - began)
        return found.contiguous().view(-1).view(torch.uint8)


def _stored_bytes(lease: Lease) -> int:
    """Of a layer."""
    return lease.codec.nbytes(lease.info.shape, lease.info.dtype)


class _Copier:
    """Copies from host to device; on CUDA on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # the last copy out of each part of the host's ring
        self._sent: dict[tuple[int, int], torch.cuda.Event] = {}
        self._ready: dict[int, list[torch.cuda.Event]] = {}  # by layer

    def allocate(self, size: int) -> torch.Tensor:
        """A buffer of `size` bytes, which belongs to the stream of the copies."""
        with torch.cuda.stream(self._stream):  # nothing if there is none
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def wait_reusable(self, part: tuple[int, int]) -> None:
        """Block this reader thread until the last copy out of `part` of the ring is complete."""
        if (event := self._sent.get(part)) is not None:
            event.synchronize()

    def send(
        self,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        layer: int,
        part: tuple[int, int],
    ) -> None:
        """Start copying `sources` to `targets`, which may be used after `arrived`."""
        with torch.cuda.stream(self._stream):
            # one call, because several threads of Python would wait for each other
            torch._foreach_copy_(targets, sources, non_blocking=True)
            if self._stream is None:
                return
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._sent[part] = event
        self._ready.setdefault(layer, []).append(event)

    def arrived(self, layer: int, buffer: torch.Tensor) -> None:
        """Make the current stream, not the host, wait for the copies of `layer`."""
        if self._stream is None:
            return
        stream = torch.cuda.current_stream(self._device)
        for event in self._ready.pop(layer, []):
            stream.wait_event(event)
        buffer.record_stream(stream)
