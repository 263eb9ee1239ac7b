"""A client of a Redis or Valkey server, which knows no entries; the one file that imports redis-py.

redis-py's timeouts limit one `recv`, so a server that sends a byte now and then would hold a reader for ever. Here
every socket has a deadline for the whole answer. Nothing is retried: the caller judges an error.
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

_READ_BYTES = 256 * 1024  # of one read from a socket
_SPARE_CONNECTIONS = 32  # for lookups, writers and deletions, so that none of them waits for a connection
_DEADLINE = threading.local()  # `at`: the monotonic time at which this thread's call must end


class FullError(RemoteError):
    """The server's memory is full, and its policy evicts nothing."""


class _Socket:
    """A socket whose calls end at this thread's deadline, or at the timeout it was given if that is earlier."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._timeout: float | None = sock.gettimeout()

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def recv(self, size: int) -> bytes:
        data: bytes = self._armed().recv(size)
        return data

    def recv_into(self, *args: Any) -> int:
        got: int = self._armed().recv_into(*args)
        return got

    def sendall(self, data: Any) -> None:
        self._armed().sendall(data)  # its timeout is for all of `data`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def _armed(self) -> Any:
        left = getattr(_DEADLINE, "at", float("inf")) - time.monotonic()
        if left <= 0.0:
            raise TimeoutError("the answer took too long")
        limit = left if self._timeout is None else min(left, self._timeout)
        self._sock.settimeout(None if limit == float("inf") else limit)
        return self._sock


class _Deadlined:
    def _connect(self) -> _Socket:
        return _Socket(super()._connect())  # type: ignore[misc]


class _Tcp(_Deadlined, redis.Connection):
    pass


class _Tls(_Deadlined, redis.SSLConnection):
    pass


class _Unix(_Deadlined, redis.UnixDomainSocketConnection):
    pass


_CONNECTIONS = {"redis": _Tcp, "rediss": _Tls, "unix": _Unix}


class RedisServer:
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
            username=os.environ.get(config.username_variable),
            password=os.environ.get(config.password_variable),
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
    def call(self) -> Iterator[None]:
        """One exchange with the server: it ends within the timeout, and every error in it is a `RemoteError`."""
        _DEADLINE.at = time.monotonic() + self._timeout_s
        try:
            yield
        except (redis.TimeoutError, TimeoutError) as error:
            raise RemoteError(f"redis did not answer within {self._timeout_s:g} s", timed_out=True) from error
        except RemoteError:
            raise
        except redis.OutOfMemoryError as error:
            raise FullError(f"redis is full: {error}") from error
        except Exception as error:  # a damaged answer can make the protocol parser raise anything
            raise RemoteError(f"redis: {type(error).__name__}: {error}") from error
        finally:
            _DEADLINE.at = float("inf")

    def reset(self) -> None:
        """Drop the idle connections; the next call opens new ones."""
        self.client.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Release the connections. Twice is harmless."""
        self.client.connection_pool.disconnect()
