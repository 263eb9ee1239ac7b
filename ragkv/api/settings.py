"""The server's settings: one frozen tree, by file, environment and flags, each over the one before.

Units stand in the names, an unknown key is refused naming the nearest, and nothing secret is printed. Pure Python.
"""

import dataclasses
import ipaddress
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ragkv.config import (
    MIB,
    SERVE_PREFIX,
    EngineConfig,
    StoreConfig,
    at_least,
    build,
    environment_values,
    toml_values,
)
from ragkv.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "json", "console")


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What one request may carry; more is refused, with 413 where it is bytes and 400 elsewhere."""

    body_bytes: int = 32 * MIB  # of a request's body, uploads included, counted as they come
    prompt_tokens: int | None = None  # of a prompt, its documents included; None: the model's context
    documents: int = 64  # documents in one request
    document_chars: int = 2_000_000  # characters of one document
    question_chars: int = 100_000  # characters of a question, a query or a message
    max_tokens: int = 1024  # tokens an answer may be asked to have
    stop_strings: int = 4  # stop strings of one request
    inputs: int = 256  # texts of one embeddings request
    body_s: float = 60.0  # seconds a request's body may take to arrive
    stall_s: float = 60.0  # seconds a client may leave an answer unread before it is given up
    upload_types: tuple[str, ...] = (".txt", ".md", ".html", ".jsonl", ".pdf")  # endings of files taken

    def __post_init__(self) -> None:
        counts = {f.name: 1 for f in dataclasses.fields(self) if f.name not in ("body_s", "stall_s", "upload_types")}
        at_least(self, **counts, body_s=0.001, stall_s=0.001)


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Requests that compute or wait, of all tenants; more are answered 503 with Retry-After."""

    limit: int = 64  # requests taken in at once, those that decode included
    deadline_s: float | None = 120.0  # from a request's arrival to its last token; None: none

    def __post_init__(self) -> None:
        at_least(self, limit=1)
        if self.deadline_s is not None and not self.deadline_s > 0.0:
            raise ConfigError(f"queue.deadline_s is {self.deadline_s}; it must be more than 0, or None.")


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """Who may ask."""

    keys_file: str | None = None  # where the digests of keys lie; None: keys.json in `home`
    required: bool = True  # False (--no-auth) serves anyone who can reach the port, whatever keys there are
    metrics_token: str | None = field(default=None, repr=False)  # bearer token of /metrics; None: loopback alone


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logs, on standard error; never a document's, question's or answer's text, never a key."""

    level: str = "info"  # debug, info, warning or error
    format: str = "auto"  # json: a line an event; console: for eyes; auto: console on a terminal, else json

    def __post_init__(self) -> None:
        _one_of("log.level", self.level, LOG_LEVELS)
        _one_of("log.format", self.format, LOG_FORMATS)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Replicas on Ray Serve (`ragkv serve --ray`). They share `home`; each keeps KV under `kv_home` by itself."""

    replicas: int = 2  # at the beginning, and at least
    most_replicas: int | None = None  # as many as load may ask for; None: as at the beginning
    requests: int = 4  # a replica's under way, beyond which more replicas are wanted
    threads: int | None = None  # a replica computes with; None: as many as it has of `cpus`, 1 at least
    cpus: float = 1.0  # a replica's, as Ray counts them
    gpus: float = 0.0  # a replica's, as Ray counts them
    router: str = "chunk-aware"  # see ragkv.scheduling.replica_routing.ROUTERS
    wait_share: float | None = None  # see ragkv.routing; None: 1 with a tier that replicas share, else a third
    session_tokens: int = 2_000  # what a conversation's history is taken to weigh against chunks

    def __post_init__(self) -> None:
        at_least(self, replicas=1, most_replicas=self.replicas, requests=1, threads=1, cpus=0.0, gpus=0.0)
        at_least(self, wait_share=0.0, session_tokens=0)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything `ragkv serve` is built from."""

    host: str = "127.0.0.1"  # address to listen on; others than loopback need keys
    port: int = 8000  # 0: any that is free
    home: str = ".ragkv"  # data directory: tenants' collections and KV, and the keys
    kv_home: str | None = None  # where KV lies instead, for replicas that share `home`; None: in it
    model: str = "reader"  # "reader" (bundled), a model folder or a hub id
    hosts: tuple[str, ...] = ()  # names this server is addressed by; none: any if keys are asked for, else loopback's
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call this server from a browser; none: its own alone
    proxies: tuple[str, ...] = ()  # addresses of reverse proxies whose X-Forwarded-* are believed
    open_tenants: int = 8  # tenants open at once; the longest idle is closed for the next
    graceful_s: float = 30.0  # how long running answers may take to finish after SIGTERM
    engine: EngineConfig = field(default_factory=EngineConfig)  # of every tenant; a key's quota replaces its bytes
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        at_least(self, port=0, open_tenants=1, graceful_s=0.0)
        if self.port > 65535:
            raise ConfigError(f"port is {self.port}; it must be at most 65535.")
        if not self.host:
            raise ConfigError("host is empty; give an address to listen on, such as 127.0.0.1 or 0.0.0.0.")
        if "*" in self.cors_origins:
            raise ConfigError('cors_origins has "*"; name the origins, such as https://docs.example.org.')
        if self.engine.store.tenant or self.engine.store.directory is not None:
            names = f"{StoreConfig.__name__}'s tenant and directory"
            raise ConfigError(f"{names} are the server's to choose: a tenant's directory lies in `home`. Set `home`.")

    @property
    def keys_path(self) -> Path:
        """Where the digests of keys lie."""
        return Path(self.home) / "keys.json" if self.auth.keys_file is None else Path(self.auth.keys_file)

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A config from nested mappings; raises `ConfigError` on an unknown key or a wrong type."""
        return typing.cast(Self, build(cls, values))

    @classmethod
    def gather(
        cls,
        file: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        flags: Mapping[str, Any] | None = None,
    ) -> Self:
        """File, under environment (`RAGKV_SERVE_PORT`, `RAGKV_SERVE_LIMITS__BODY_BYTES`), under flags.

        `flags` is nested like the settings; a flag of `None` was not given. Raises `ConfigError`.
        """
        values = toml_values(file) if file is not None else {}
        source = os.environ if environment is None else environment
        return cls.from_dict(_over(_over(values, environment_values(source, SERVE_PREFIX)), _given(flags or {})))


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine's own."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings, the second's values over the first's."""
    merged = dict(below)
    for name, value in above.items():
        inner = merged.get(name)
        merged[name] = _over(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    nested = {name: _given(value) if isinstance(value, Mapping) else value for name, value in flags.items()}
    return {name: value for name, value in nested.items() if value is not None}


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; it must be one of: {', '.join(known)}.")


__all__ = ["AuthConfig", "ClusterConfig", "LimitsConfig", "LogConfig", "QueueConfig", "ServeConfig", "is_loopback"]
