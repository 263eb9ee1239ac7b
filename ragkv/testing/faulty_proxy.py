"""A TCP proxy to test and measure with: a network that is slow, stalls, breaks off, or changes bytes.

    with Proxy(("127.0.0.1", 6379), latency_s=0.001, bandwidth_bytes_per_s=100e6) as proxy:
        ...  # connect to ("127.0.0.1", proxy.port)

Its behaviour may be changed at any time. As a process of its own, so that it computes beside what is measured:
`python -m ragkv.testing.faulty_proxy 127.0.0.1:6379 --latency-s 0.001 --bandwidth 100e6`; it prints its port.
"""

import argparse
import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from queue import Queue

from ragkv.runtime import Closing

LOOPBACK = "127.0.0.1"
_PIECE_BYTES = 64 * 1024
_PIECES = 32  # on the way in one direction of one connection
_TRICKLE_S = 0.05  # between the bytes of a trickle


class _Pipe:
    """One direction of the whole network: everything shares its bandwidth."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self._lock = threading.Lock()

    def due_at(self, size: int, bandwidth: float | None) -> float:
        """When `size` bytes more will be through."""
        now = time.monotonic()
        if bandwidth is None:
            return now
        with self._lock:
            self._free_at = max(self._free_at, now) + size / bandwidth
            return self._free_at


class Proxy(Closing):
    """Listens on a loopback port and hands on to `target`."""

    def __init__(
        self, target: tuple[str, int], latency_s: float = 0.0, bandwidth_bytes_per_s: float | None = None
    ) -> None:
        """`latency_s` is of one way; the bandwidth is of each direction, shared by all connections."""
        self.target = target
        self.latency_s, self.bandwidth_bytes_per_s = latency_s, bandwidth_bytes_per_s
        self.refusing = False  # connections are closed as soon as they are made
        self.stalled = False  # nothing is handed on, in either direction
        self.trickling = False  # answers come byte by byte, twenty a second
        self.cut_after_bytes: int | None = None  # all connections break off when so much more was answered
        self.change: Callable[[bytes], bytes] = lambda data: data  # what becomes of answers
        self.answered_bytes = 0
        self._there, self._back = _Pipe(), _Pipe()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        self._closed = False
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def break_off(self) -> None:
        """Close every connection."""
        with self._lock:
            sockets, self._open = self._open, set()
        for one in sockets:
            _end(one)

    def close(self) -> None:
        """Stop listening and close every connection. Twice is harmless."""
        self._closed, self.stalled = True, False
        _end(self._listener)
        self.break_off()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                _end(client)
                continue
            try:
                server = socket.create_connection(self.target)
            except OSError:
                _end(client)
                continue
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            self._carry(client, server, self._there, answers=False)
            self._carry(server, client, self._back, answers=True)

    def _carry(self, source: socket.socket, sink: socket.socket, pipe: _Pipe, answers: bool) -> None:
        pieces: Queue[tuple[float, bytes] | None] = Queue(_PIECES)

        def read() -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(_PIECE_BYTES):
                    pieces.put((pipe.due_at(len(data), self.bandwidth_bytes_per_s) + self.latency_s, data))
            pieces.put(None)

        def write() -> None:
            while (piece := pieces.get()) is not None:
                due_at, data = piece
                time.sleep(max(0.0, due_at - time.monotonic()))
                while self.stalled:
                    time.sleep(0.005)
                with contextlib.suppress(OSError):  # who went is found out by reading; what comes is thrown away
                    self._answer(sink, data) if answers else sink.sendall(data)
            _end(sink)

        for work in (read, write):
            threading.Thread(target=work, name="proxy-way", daemon=True).start()

    def _answer(self, client: socket.socket, data: bytes) -> None:
        data = self.change(data)
        if self.cut_after_bytes is not None:
            data, left = data[: self.cut_after_bytes], self.cut_after_bytes - len(data)
            self.cut_after_bytes = max(0, left)
            if left <= 0:
                client.sendall(data)
                self.break_off()
                return
        self.answered_bytes += len(data)
        while data and self.trickling:
            client.sendall(data[:1])
            data = data[1:]
            time.sleep(_TRICKLE_S)
        client.sendall(data)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _main() -> None:
    options = argparse.ArgumentParser(
        prog="python -m ragkv.testing.faulty_proxy", description="A network that is slow."
    )
    options.add_argument("target", help="host:port")
    options.add_argument("--latency-s", type=float, default=0.0, help="of one way")
    options.add_argument("--bandwidth", type=float, default=None, help="bytes a second, of each direction")
    given = options.parse_args()
    host, _, port = given.target.rpartition(":")
    with Proxy((host, int(port)), given.latency_s, given.bandwidth) as proxy:
        print(proxy.port, flush=True)
        sys.stdin.read()  # until whoever started it is gone


if __name__ == "__main__":
    _main()
