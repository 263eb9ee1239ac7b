"""A client of a Redis or Valkey server, which knows no entries; the one file that imports redis-py.

redis-py's timeouts limit one `recv`, so a server that sends a byte now and then would hold a reader
for ever. Here every socket has a deadline for the whole answer. Nothing is retried: the caller
judges an error.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ragkv.config import RedisConfig
from ragkv.errors import MissingExtraError, RemoteError

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as error:
    raise MissingExtraError("redis", "redis", "A Redis tier") from error

_READ_BYTES = 256 * 1024  # One read from a socket asks for so many bytes.
ANSWER_BYTES = 128 * 1024**2  # A longer answer is a fault, not a reason to allocate.
_SPARE_CONNECTIONS = 32  # Lookups, writers and deletions have these, so none waits.
# Of this thread's call. `at`: the monotonic time at which it must end; `bytes`: the most it may
# still receive.
_LIMIT = threading.local()


class FullError(RemoteError):
    """The server's memory is full, and its policy evicts nothing."""


class _Socket:
    """A socket whose calls end at this thread's deadline, or at the timeout it was given if that is
    earlier.

    It receives no more than this thread's call may.
    """

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._timeout: float | None = sock.gettimeout()

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def recv(self, size: int) -> bytes:
        data: bytes = self._armed().recv(size)
        _count(len(data))
        return data

    def recv_into(self, *args: Any) -> int:
        got: int = self._armed().recv_into(*args)
        _count(got)
        return got

    def sendall(self, data: Any) -> None:
        self._armed().sendall(data)  # its timeout is for all of `data`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def _armed(self) -> Any:
        left = getattr(_LIMIT, "at", float("inf")) - time.monotonic()
        if left <= 0.0:
            raise TimeoutError("the answer took too long")
        limit = left if self._timeout is None else min(left, self._timeout)
        self._sock.settimeout(None if limit == float("inf") else limit)
        return self._sock


def _count(received: int) -> None:
    _LIMIT.bytes = getattr(_LIMIT, "bytes", ANSWER_BYTES) - received
    if _LIMIT.bytes < 0:
        raise RemoteError("redis sent more than the answer may have")


class _Deadlined:
    def _connect(self) -> _Socket:
        return _Socket(super()._connect())  # type: ignore[misc]


_CONNECTIONS: dict[str, Any] = {  # by the scheme of a URL
    "redis": type("DeadlinedTcp", (_Deadlined, redis.Connection), {}),
    "rediss": type("DeadlinedTls", (_Deadlined, redis.SSLConnection), {}),
    "unix": type("DeadlinedUnix", (_Deadlined, redis.UnixDomainSocketConnection), {}),
}


class RedisClient:
    """A client of one server."""

    def __init__(self, config: RedisConfig) -> None:
        """Connects to nothing yet."""
        self._timeout_s = config.timeout_s
        scheme = config.url.partition("://")[0]
        options: dict[str, Any] = {} if scheme == "unix" else {"socket_keepalive": True}
        if scheme == "rediss" and config.ca_file is not None:
            options["ssl_ca_certs"] = config.ca_file
        pool = redis.ConnectionPool.from_url(
            config.url,
            max_connections=config.connections + _SPARE_CONNECTIONS,
            username=os.environ.get("REDIS_USERNAME"),
            password=os.environ.get("REDIS_PASSWORD"),
            socket_timeout=config.timeout_s,
            socket_connect_timeout=config.timeout_s,
            socket_read_size=_READ_BYTES,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
            protocol=2,
            **options,
        )
        pool.connection_class = _CONNECTIONS[scheme]
        self.client: Any = redis.Redis(connection_pool=pool)

    @contextmanager
    def call(self, answer_bytes: int = ANSWER_BYTES) -> Iterator[None]:
        """One exchange with the server: it ends within the timeout, and every error in it is a
        `RemoteError`.

        An answer of more than `answer_bytes` is one.
        """
        _LIMIT.at = time.monotonic() + self._timeout_s
        _LIMIT.bytes = answer_bytes
        try:
            yield
        except (redis.TimeoutError, TimeoutError) as error:
            raise RemoteError(
                f"redis did not answer within {self._timeout_s:g} s", timed_out=True
            ) from error
        except RemoteError:
            raise
        except redis.OutOfMemoryError as error:
            raise FullError(f"redis is full: {error}") from error
        except Exception as error:  # a damaged answer can make the protocol parser raise anything
            # idle connections may be broken too: each would hold a descriptor until it is used
            self.reset()
            raise RemoteError(f"redis: {type(error).__name__}: {error}") from error
        finally:
            _LIMIT.at = float("inf")
            _LIMIT.bytes = ANSWER_BYTES

    def reset(self) -> None:
        """Drop the idle connections; the next call opens new ones."""
        self.client.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Release the connections."""
        self.client.connection_pool.disconnect()
