"""A Redis or Valkey server, and nothing that lies on it: the one file that imports redis-py.

redis-py's timeouts are of one `recv`, so that a server that trickles would hold a reader for ever; here every socket
has a deadline for the whole answer. Nothing is retried: an error is the caller's to judge.
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

_READ_BYTES = 256 * 1024  # asked of a socket at a time
_DEADLINE = threading.local()  # `at`: monotonic seconds at which this thread's call ends


class FullError(RemoteError):
    """The server's memory is full, and its policy evicts nothing."""


class _Socket:
    """A socket whose calls end at this thread's deadline, and at the timeout it was given."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._timeout: float | None = sock.gettimeout()

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def recv(self, size: int) -> bytes:
        self._arm()
        data: bytes = self._sock.recv(size)
        return data

    def recv_into(self, *args: Any) -> int:
        self._arm()
        got: int = self._sock.recv_into(*args)
        return got

    def sendall(self, data: Any) -> None:
        self._arm()
        self._sock.sendall(data)  # its timeout is of the whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def _arm(self) -> None:
        left = getattr(_DEADLINE, "at", float("inf")) - time.monotonic()
        if left <= 0.0:
            raise TimeoutError("the answer took too long")
        limit = left if self._timeout is None else min(left, self._timeout)
        self._sock.settimeout(None if limit == float("inf") else limit)


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
            max_connections=config.connections + 32,  # never a reason to wait: lookups, writers, whoever deletes
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
        """One exchange: whatever goes wrong in it is a `RemoteError`, and it ends in time."""
        _DEADLINE.at = time.monotonic() + self._timeout_s
        try:
            yield
        except (redis.TimeoutError, TimeoutError) as error:
            raise RemoteError(f"redis did not answer within {self._timeout_s:g} s", timed_out=True) from error
        except RemoteError:
            raise
        except redis.OutOfMemoryError as error:
            raise FullError(f"redis is full: {error}") from error
        except Exception as error:  # what a damaged answer makes of the protocol can be anything
            raise RemoteError(f"redis: {type(error).__name__}: {error}") from error
        finally:
            _DEADLINE.at = float("inf")

    def reset(self) -> None:
        """Drop the connections that are free: the next call opens new ones."""
        self.client.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Let go of the connections. Twice is harmless."""
        self.client.connection_pool.disconnect()
