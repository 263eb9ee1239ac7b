"""Captured graphs for the parts of a layer that are the same in every pass: those before attention,
and those after it.

A launch takes the host longer than a small product takes the device, and a layer has some thirty.
So these parts are captured once for a bucket of rows, and replayed with the rows of a pass; the
rest of the bucket is padding. Attention is not captured, because it reads the KV of its prompt,
which is at another address in every request. Only one thread at a time runs layers, and on a device
no thread pauses within a layer.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from .norms import is_close

log = logging.getLogger(__name__)

LEAST_BUCKET = 16
# With more rows the device takes longer than the host.
MOST_BUCKET = 1024

Replay = Callable[[], None]
Capture = Callable[[Replay], Replay]  # of work that reads and writes the same tensors every time
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k and v, each (1, heads, R, D)


class LayerParts(Protocol):
    """A layer's parts around its attention."""

    def before(self, hidden: torch.Tensor) -> Heads:
        """Queries, keys and values of hidden (1, R, E)."""
        ...

    def behind(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's result (1, R, E) from its input and its attention (1, H, R, D)."""
        ...


def bucket(rows: int) -> int | None:
    """The rows of the graphs for a pass of `rows`, at most twice as many; `None` if none fits."""
    size = max(LEAST_BUCKET, 1 << max(0, rows - 1).bit_length())
    return size if size <= MOST_BUCKET and size <= 2 * rows else None


@dataclass(slots=True)
class _Buffers:
    """What the graphs of a bucket read and write, for all layers."""

    hidden: torch.Tensor  # (1, B, E)
    heads: Heads
    attended: torch.Tensor  # (1, H, B, D)
    out: torch.Tensor  # (1, B, E)


class Graphs:
    """The graphs of one model's layers, captured when a bucket is first met."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._buffers: dict[int, _Buffers] = {}
        self._captured: dict[tuple[int, int], tuple[Replay, Replay]] = {}  # by layer and bucket
        self.failed = False  # then every pass is eager

    def before(self, layer: int, parts: LayerParts, hidden: torch.Tensor) -> Heads | None:
        """As `LayerParts.before`; valid until the next call. `None` if this pass is eager."""
        rows = hidden.shape[1]
        size = bucket(rows)
        if size is None or self.failed or not self._has(layer, parts, hidden, size):
            return None
        buffers = self._buffers[size]
        buffers.hidden[:, :rows].copy_(hidden)
        self._captured[layer, size][0]()
        q, k, v = (heads[:, :, :rows] for heads in buffers.heads)
        return q, k, v

    def behind(self, layer: int, attended: torch.Tensor) -> torch.Tensor:
        """As `LayerParts.behind`, for the input that `before` got last."""
        rows = attended.shape[2]
        size = bucket(rows)
        assert size is not None
        buffers = self._buffers[size]
        buffers.attended[:, :, :rows].copy_(attended)
        self._captured[layer, size][1]()
        # A step of other requests may come before the next layer.
        return buffers.out[:, :rows].clone()

    def _has(self, layer: int, parts: LayerParts, hidden: torch.Tensor, size: int) -> bool:
        if (layer, size) in self._captured:
            return True
        try:
            # a step of decoding is in inference mode, and others write to the same buffers
            with torch.inference_mode(False), torch.no_grad():
                self._captured[layer, size] = self._captured_of(parts, hidden, size)
        except RuntimeError as error:
            log.warning("Layers are not captured as graphs: %s", error)
            self.failed = True
        return not self.failed

    def _captured_of(
        self, parts: LayerParts, hidden: torch.Tensor, size: int
    ) -> tuple[Replay, Replay]:
        if size not in self._buffers:
            self._buffers[size] = _buffers(parts, hidden, size)
        own = self._buffers[size]
        own.hidden[:, : hidden.shape[1]].copy_(hidden)

        def before() -> None:
            for made, target in zip(parts.before(own.hidden), own.heads, strict=True):
                target.copy_(made)

        def behind() -> None:
            own.out.copy_(parts.behind(own.hidden, own.attended))

        replays = self._capture(before), self._capture(behind)
        for replay in replays:
            replay()
        made = (*own.heads, own.out)
        wanted = (*parts.before(own.hidden), parts.behind(own.hidden, own.attended))
        if not all(map(is_close, made, wanted)):
            raise RuntimeError(f"a layer of {size} rows has other numbers as a graph")
        return replays


def _buffers(parts: LayerParts, hidden: torch.Tensor, size: int) -> _Buffers:
    padded = hidden.new_zeros((1, size, hidden.shape[2]))
    q, k, v = (heads.contiguous() for heads in parts.before(padded))
    return _Buffers(padded, (q, k, v), torch.zeros_like(q), torch.zeros_like(padded))


def capture_on(device: torch.device) -> Capture:
    """Capture with CUDA, all graphs in one pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(work: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work()  # libraries allocate at their first call
            # reader threads may allocate meanwhile
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        return graph.replay

    return capture
