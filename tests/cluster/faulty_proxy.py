"""A TCP proxy to test and measure with: a network that is slow, stalls, breaks off, or changes
bytes.

    with Proxy(("127.0.0.1", 6379), latency_s=0.001, bandwidth_bytes_per_s=100e6) as proxy:
        ...  # connect to ("127.0.0.1", proxy.port)

Its behaviour may be changed at any time.
"""

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable
from queue import Queue

from ragkv.runtime import Closing
from tests.store.fakes import SharedBandwidth, sleep_until

LOOPBACK = "127.0.0.1"
_PIECE_BYTES = 64 * 1024
_PIECES = 32  # under way in one direction of one connection
_TRICKLE_S = 0.05  # between the bytes of a trickle


class Proxy(Closing):
    """Listens on a loopback port and passes everything on to `target`."""

    def __init__(
        self,
        target: tuple[str, int],
        latency_s: float = 0.0,
        bandwidth_bytes_per_s: float | None = None,
    ) -> None:
        """`latency_s` is of one direction; the bandwidth is of each direction, shared by all
        connections.
        """
        self.target = target
        self.latency_s = latency_s
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.refusing = False  # connections are closed as soon as they are made
        self.stalled = False  # nothing is passed on, in either direction
        self.trickling = False  # answers come byte by byte, twenty a second
        # all connections are closed after so many more bytes of answers
        self.cut_after_bytes: int | None = None
        # applied to every piece of an answer
        self.change: Callable[[bytes], bytes] = lambda data: data
        self.answered_bytes = 0
        self._requests = SharedBandwidth()
        self._answers = SharedBandwidth()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        self._closed = False
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def close_connections(self) -> None:
        """Close every connection; new ones are still accepted."""
        with self._lock:
            sockets = self._open
            self._open = set()
        for one in sockets:
            _close(one)

    def close(self) -> None:
        """Stop listening and close every connection. Twice is harmless."""
        self._closed = True
        self.stalled = False
        _close(self._listener)
        self.close_connections()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = None if self.refusing else socket.create_connection(self.target)
            except OSError:
                server = None
            if server is None:
                _close(client)
                continue
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            self._forward(client, server, self._requests, server.sendall)
            self._forward(server, client, self._answers, functools.partial(self._answer, client))

    def _forward(
        self,
        source: socket.socket,
        target: socket.socket,
        shared: SharedBandwidth,
        send: Callable[[bytes], None],
    ) -> None:
        pieces: Queue[tuple[float, bytes] | None] = Queue(_PIECES)

        def read() -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(_PIECE_BYTES):
                    rate = self.bandwidth_bytes_per_s
                    due_at = time.monotonic() if rate is None else shared.due_at(len(data), rate)
                    pieces.put((due_at + self.latency_s, data))
            pieces.put(None)

        def write() -> None:
            while (piece := pieces.get()) is not None:
                due_at, data = piece
                sleep_until(due_at)
                while self.stalled:
                    time.sleep(0.005)
                # the reading thread sees a closed connection; the rest is dropped
                with contextlib.suppress(OSError):
                    send(data)
            _close(target)

        for work in (read, write):
            threading.Thread(target=work, name="proxy-forward", daemon=True).start()

    def _answer(self, client: socket.socket, data: bytes) -> None:
        data = self.change(data)
        if self.cut_after_bytes is not None:
            data, left = data[: self.cut_after_bytes], self.cut_after_bytes - len(data)
            self.cut_after_bytes = max(0, left)
            if left <= 0:
                client.sendall(data)
                self.close_connections()
                return
        self.answered_bytes += len(data)
        while data and self.trickling:
            client.sendall(data[:1])
            data = data[1:]
            time.sleep(_TRICKLE_S)
        client.sendall(data)


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
