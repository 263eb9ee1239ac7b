"""Streams and events without a GPU, as lazy as CUDA allows: a copy runs only when something must
wait for it.

So a host buffer that is reused too early, or a slice that is read before it has arrived, gives
wrong numbers in every run, where a real device gives them now and then.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda", 0)


class Stream:
    """Work in order; nothing runs before somebody waits."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = 0
        self._lock = threading.RLock()  # several threads wait

    def run_to(self, count: int) -> None:
        """Run the first `count` pieces of work."""
        with self._lock:
            while self.done < count:
                self.done += 1
                self.work[self.done - 1]()

    def wait_event(self, event: "Event") -> None:
        """Later work of this stream waits for `event`."""
        self.work.append(event.synchronize)

    def synchronize(self) -> None:
        """Block until all work so far is done."""
        self.run_to(len(self.work))


class Event:
    """A place in a stream."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._count = 0

    def record(self, stream: Stream) -> None:
        """The event happens after all work of `stream` so far."""
        self._stream = stream
        self._count = len(stream.work)

    def synchronize(self) -> None:
        """Block until the event has happened."""
        if self._stream is not None:
            self._stream.run_to(self._count)


class LazyCuda:
    """The device: one default stream for all threads, and the current stream of each thread."""

    def __init__(self) -> None:
        self.default = Stream()
        # addresses of tensors, and streams that use them
        self.recorded: list[tuple[int, Stream]] = []
        self._current = threading.local()

    def current_stream(self, device: torch.device | None = None) -> Stream:
        """The stream of the calling thread."""
        return getattr(self._current, "stream", self.default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make `stream` the current one."""
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def copy(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        non_blocking: bool = False,
    ) -> None:
        """Copies to the "device", queued on the current stream."""
        assert non_blocking
        for target, source in zip(targets, sources, strict=True):
            self.current_stream().work.append(partial(_fill, target, source))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the fake in place of torch's streams, and of copies to a CUDA device."""
        real_empty: Any = torch.empty

        def empty(*size: Any, **options: Any) -> torch.Tensor:
            on_device = options.get("device") == DEVICE
            if on_device:
                del options["device"]
            made: torch.Tensor = real_empty(*size, **options)
            return made.fill_(255) if on_device else made

        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            self.recorded.append((tensor.data_ptr(), stream))

        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch, "_foreach_copy_", self.copy)
        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
        for name, fake in (("Stream", Stream), ("Event", Event), ("stream", self.stream)):
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
