"""The server's settings: one frozen tree from a file, the environment and flags. Each of these
overrides the one before.

A file has the engine's settings as the library reads them, `home`, `model`, and the rest in the
group `serve`. An error for an unknown key names the nearest known one, and no secret is printed.
Pure Python.
"""

import dataclasses
import ipaddress
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ragkv.config import MIB, EngineConfig, at_least, one_of
from ragkv.errors import ConfigError
from ragkv.home import KnownHome
from ragkv.runtime import is_loopback
from ragkv.runtime.setting_values import build, fixed, gather, overlay

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "json", "console")
ANSWER_ENGINES = ("ragkv", "vllm")
SHARED = ("home", "model")  # These settings are of the server and of the commands.


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Limits on one request. A larger body is refused with 413, everything else with 400."""

    body_bytes: int = 32 * MIB  # of a request's body, uploads included, counted as they arrive
    # of a JSON body without documents to store; it is parsed in the server's own process
    json_bytes: int = fixed(4 * MIB)
    # commas and opening brackets in such a body, counted as they arrive
    json_values: int = fixed(50_000)
    documents: int = 64  # documents in one request
    document_chars: int = fixed(2_000_000)  # characters of one document
    upload_chars: int = fixed(8_000_000)  # characters of all documents to store in one request
    # characters of one document's metadata, as JSON, and of its source
    metadata_chars: int = fixed(20_000)
    nesting: int = fixed(32)  # depth of metadata
    # decompressed contents of a PDF's pages; a stream counts for each page that uses it
    inflated_bytes: int = fixed(64 * MIB)
    # characters of the words of a tenant's passages that are looked for in its messages
    known_chars: int = fixed(16_000_000)
    question_chars: int = fixed(100_000)  # characters of a question, a query or a message
    max_tokens: int = 1024  # the most tokens a request may set for its answer
    inputs: int = fixed(256)  # texts in one embeddings request

    def __post_init__(self) -> None:
        at_least(self, **{f.name: 1 for f in dataclasses.fields(self)})


@dataclass(frozen=True, slots=True)
class ParsingConfig:
    """The processes that parse uploads, and what one upload may use: above it 400; without a free
    process 503.
    """

    workers: int = 2  # processes at once; if there are several, one tenant uses all but one
    # seconds an upload may wait for a process; its body is read after that
    wait_s: float = fixed(30.0)
    wall_s: float = fixed(180.0)  # seconds the parsing and splitting of one upload may take
    # seconds of CPU time it may take: 8 MB of random words take as long
    cpu_s: int = fixed(60)
    memory_bytes: int = 512 * MIB  # memory it may take (on Linux)

    def __post_init__(self) -> None:
        at_least(self, workers=1, wait_s=0.0, wall_s=0.001, cpu_s=1, memory_bytes=MIB)


@dataclass(frozen=True, slots=True)
class QuotaConfig:
    """What each tenant may hold, unless its own quota (`ragkv keys add`) says otherwise; None: no
    limit.
    """

    collections: int | None = 1_000  # of each tenant
    documents: int | None = 100_000  # of all its collections
    sessions: int | None = 10_000  # stored conversations that a client named

    def __post_init__(self) -> None:
        at_least(self, **{f.name: 0 for f in dataclasses.fields(self)})


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Running and waiting requests of all tenants; more are answered with 503 and Retry-After."""

    limit: int = 64  # requests at once, decoding ones included
    # from a request's arrival to its last token; None: no deadline
    deadline_s: float | None = 120.0
    tenant_limit: int = 32  # of `limit`, for one tenant with a key; more are answered with 429
    # requests that ingest, search, embed or list, at once; more wait
    data_requests: int = fixed(8)
    tenant_data_requests: int = fixed(2)  # of them, for one tenant with a key
    # from the arrival of such a request to its end; None: no deadline
    data_deadline_s: float | None = fixed(600.0)

    def __post_init__(self) -> None:
        at_least(
            self,
            limit=1,
            tenant_limit=1,
            data_requests=1,
            tenant_data_requests=1,
            deadline_s=0.001,
            data_deadline_s=0.001,
        )


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """Who may use the server."""

    # False (--no-auth) serves anyone who can reach the port, even if keys exist
    required: bool = True
    # bearer token of /metrics; None: loopback only
    metrics_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logs on standard error. They never hold the text of documents, questions or answers, or a
    key.
    """

    level: str = "info"  # debug, info, warning or error
    # json: one line per event; console: for people; auto: console on a terminal, json otherwise
    format: str = "auto"

    def __post_init__(self) -> None:
        one_of("log.level", self.level, LOG_LEVELS)
        one_of("log.format", self.format, LOG_FORMATS)


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """The vLLM server that computes answers if `answer_engine` is "vllm"; ragkv's connector must be
    in it.

    Its API key, if it has one, is in the environment variable `VLLM_API_KEY`.
    """

    url: str = "http://127.0.0.1:8000"  # where vLLM's OpenAI server listens
    # the longest time without a byte of an answer; then the request gets 503
    timeout_s: float = fixed(120.0)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")) or "@" in self.url:
            raise ConfigError(
                "vllm.url must be http://host:port or https://host:port, without a user or a key "
                "in it."
            )
        at_least(self, timeout_s=0.01)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All settings of `ragkv serve`."""

    host: str = "127.0.0.1"  # address to listen on; an address other than loopback needs keys
    port: int = 8000  # 0: any free port
    home: str = ".ragkv"  # folder of index and KV; the server has its tenants and keys there
    # directory of the KV, for replicas that share `home`; None: in `home`
    kv_home: str | None = None
    # "smollm2", a folder, a GGUF file or a hub id; empty: the home's, else smollm2
    model: str = ""
    # host names of this server; none: any if keys are required, else loopback names
    hosts: tuple[str, ...] = ()
    # origins whose pages may call this server from a browser; none: its own only
    cors_origins: tuple[str, ...] = ()
    # addresses of reverse proxies whose X-Forwarded-* headers are trusted
    proxies: tuple[str, ...] = ()
    open_tenants: int = 8  # tenants open at once; then the one that was idle longest is closed
    # collections of all tenants open at once; each opens up to 5 files (ulimit -n)
    open_collections: int = 64
    idle_s: float | None = None  # the server ends after this time without a request; None: never
    graceful_s: float = 30.0  # how long running requests may take to finish after SIGTERM
    # then: how long it may take to cut the requests left and to write, before the process ends
    close_s: float = 10.0
    # of every tenant; a key's quota overrides its bytes
    engine: EngineConfig = field(default_factory=EngineConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    parsing: ParsingConfig = field(default_factory=ParsingConfig)
    quotas: QuotaConfig = field(default_factory=QuotaConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    log: LogConfig = field(default_factory=LogConfig)
    # who computes answers: "ragkv", this process; "vllm", the server `vllm.url`
    answer_engine: str = "ragkv"
    vllm: VllmConfig = field(default_factory=VllmConfig)

    def __post_init__(self) -> None:
        at_least(
            self,
            port=0,
            open_tenants=1,
            open_collections=1,
            idle_s=0.0,
            graceful_s=0.0,
            close_s=0.1,
        )
        one_of("answer_engine", self.answer_engine, ANSWER_ENGINES)
        if self.port > 65535:
            raise ConfigError(f"port is {self.port}; it must be at most 65535.")
        if not self.host:
            raise ConfigError(
                "host is empty; give an address to listen on, such as 127.0.0.1 or 0.0.0.0."
            )
        if "*" in self.cors_origins:
            raise ConfigError(
                'cors_origins has "*"; name the origins, such as https://docs.example.org.'
            )
        for proxy in set(self.proxies) - {"*"}:
            try:
                ipaddress.ip_network(proxy, strict=False)
            except ValueError as error:
                raise ConfigError(
                    f"proxies has {proxy!r}; it takes addresses and networks, as 10.0.0.0/8."
                ) from error

    def of_home(self) -> Self:
        """These settings, with the model and what else the home keeps where they have the
        default.
        """
        home = KnownHome.at(self.home, self.model)
        return dataclasses.replace(self, model=home.model, engine=home.settings_over(self.engine))

    @property
    def in_front_of_vllm(self) -> bool:
        """Whether a vLLM server computes the answers."""
        return self.answer_engine == "vllm"

    def check_servable(self) -> None:
        """Raise `ConfigError` for settings of the library and the commands that a server cannot
        follow.
        """
        if self.in_front_of_vllm and self.kv_home is not None:
            raise ConfigError(
                "In front of vLLM the KV lies in `home`, where vLLM's connector reads it: unset "
                "kv_home."
            )
        for name in ("tenant", "directory"):
            if getattr(self.engine.store, name):
                raise ConfigError(
                    f"A server cannot use store.{name}: each of its tenants has a directory of "
                    "its own in `home`. "
                    f"Set `home` in place of store.{name}."
                )

    @property
    def keys_path(self) -> Path:
        """The file with the digests of the keys."""
        return Path(self.home) / "keys.json"

    @property
    def on_loopback(self) -> bool:
        """Whether the server listens on an address of this machine alone."""
        return is_loopback(self.host)

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach the server, and not through a proxy either."""
        return self.on_loopback and not self.proxies

    @classmethod
    def gather(
        cls,
        file: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        flags: Mapping[str, Any] | None = None,
    ) -> Self:
        """The file's values, overridden by the environment (`RAGKV_SERVE__LIMITS__BODY_BYTES`),
        overridden by flags.

        `flags` is nested like the file; a flag of `None` was not given. Raises `ConfigError`.
        """
        values = overlay(gather(file, environment), _without_none(flags or {}))
        serve = values.get("serve", {})
        if not isinstance(serve, Mapping):
            raise ConfigError(f"serve is a group of settings, not {serve!r}.")
        outside = {*SHARED, "engine"}
        for name in outside & serve.keys():
            raise ConfigError(
                f"Unknown setting serve.{name}: it must be outside of the group serve."
            )
        for name in {one.name for one in dataclasses.fields(cls)} - outside & values.keys():
            raise ConfigError(
                f"Unknown setting {name}: the server's settings are in the group serve, "
                f"serve.{name}."
            )
        engine = EngineConfig.from_settings(values)
        shared = {name: values[name] for name in SHARED if name in values}
        return typing.cast(Self, build(cls, {**serve, **shared, "engine": engine}, "serve."))


def _without_none(flags: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in flags.items()
    }
    return {name: value for name, value in nested.items() if value is not None}
