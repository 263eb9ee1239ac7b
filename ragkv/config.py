"""Settings: one frozen tree, from code, a TOML file or the environment. Pure Python.

Names contain the unit, no setting changes another, and an unknown key is refused, naming the
nearest.
"""

import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from .errors import ConfigError
from .registry import CODECS, DISCARDING_LISTS, POLICIES, SELECTORS
from .runtime import is_loopback
from .runtime.setting_values import Default, build, fixed, gather

ReuseMode = Literal["fused", "prefix", "none"]

# The least recompute ratio until the quality gate has run: CacheBlend's, from its
# figure 16.
R_STAR = 0.15
MIB = 1024**2
GIB = 1024**3
WEIGHTS = ("plain", "int8")  # kinds of linear layers
# How expected KV, which is exact nowhere, is stored by default.
EXPECTED_CODEC = "int8"
CHUNK_TOKENS = 256  # The most tokens of a passage, which is a chunk of the engine, by default.
# A tenant's name can name a directory on any file system.
TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """A Redis or Valkey server that replicas share, with `REDIS_USERNAME` and `REDIS_PASSWORD` of
    the environment.
    """

    url: str = ""  # redis://host:6379/0, rediss://host:6379/0 (TLS) or unix:///path
    prefix: str = fixed("ragkv")  # of every key
    ttl_s: float | None = 7 * 24 * 3600.0  # an entry unused for longer is deleted; None: never
    # for one answer, from its request to its last byte; then it is a cache miss
    timeout_s: float = 1.0
    connections: int = fixed(4)  # values fetched at the same time
    # layers are stored together up to this size; 0.5 to 8 MiB are fast
    group_bytes: int = fixed(MIB // 2)
    ca_file: str | None = None  # certificates to trust, for rediss://; None: the system's
    # variable with a secret that authenticates every value; None: checksums only
    secret_variable: str | None = None
    # without a secret also use a server that other machines can reach
    allow_no_secret: bool = False

    def __post_init__(self) -> None:
        scheme, _, rest = self.url.partition("://")
        if scheme not in ("redis", "rediss", "unix") or not rest:
            raise ConfigError(
                "store.redis.url must be redis://host:port/db, rediss://host:port/db or "
                "unix:///path."
            )
        if "@" in rest or "password=" in rest:
            raise ConfigError(
                "store.redis.url holds credentials; put them into REDIS_USERNAME and "
                "REDIS_PASSWORD, which are read "
                "from the environment."
            )
        if self.ttl_s is not None and not self.ttl_s > 0.0:
            raise ConfigError(
                f"store.redis.ttl_s is {self.ttl_s}; it must be more than 0, or None."
            )
        _check_remote(
            self, "redis", scheme == "unix" or is_loopback(urlsplit(self.url).hostname or "")
        )


@dataclass(frozen=True, slots=True)
class S3Config:
    """A bucket of an S3-compatible store that replicas share. Credentials come from the environment
    alone (AWS_...), the region among them (AWS_REGION).
    """

    bucket: str = ""  # name of the bucket
    prefix: str = fixed("ragkv")  # of every object
    endpoint: str | None = None  # https://host:port of another store than Amazon's
    timeout_s: float = 3.0  # for one answer, its body included; then it is a cache miss
    connections: int = fixed(8)  # values fetched at the same time
    # layers are stored together up to this size; 0.5 to 8 MiB are fast
    group_bytes: int = fixed(4 * MIB)
    # environment variable with a secret that authenticates every value
    secret_variable: str | None = None
    # without a secret also use a server that other machines can reach
    allow_no_secret: bool = False

    def __post_init__(self) -> None:
        if not self.bucket:
            raise ConfigError("store.s3.bucket must name a bucket.")
        _check_remote(self, "s3", is_loopback(urlsplit(self.endpoint or "").hostname or ""))


RemoteConfig = RedisConfig | S3Config


def _check_remote(config: RemoteConfig, name: str, is_local: bool) -> None:
    at_least(config, connections=1, group_bytes=1)
    if not 0.0 < config.timeout_s < float("inf"):
        raise ConfigError(
            f"store.{name}.timeout_s is {config.timeout_s}; it must be more than 0 and finite."
        )
    if not (is_local or config.secret_variable or config.allow_no_secret):
        raise ConfigError(
            f"Other machines can reach store.{name} and could plant KV there. Name the "
            "environment variable of a "
            f"shared secret in store.{name}.secret_variable, or set store.{name}.allow_no_secret."
        )


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where entries are stored, and how many bytes each tier may take."""

    directory: str | None = None  # the disk tier's directory; None: memory tier only
    memory_bytes: int = 1 * GIB  # capacity of the memory tier
    # capacity of the disk tier; on a server documents and KV of a tenant together
    disk_bytes: int = 20 * GIB
    # eviction policy of memory and disk (docs/research/policies.md); Redis and S3 evict by last use
    policy: str = "lookahead"
    # copy what queued requests will read from disk to memory before they start
    prefetch: bool = fixed(True)
    # target for the first token of a turn, for t-lru and t-lru-guarded: such a prompt may compute
    # as many tokens as a prefill does in this time
    ttft_target_ms: float | None = None
    xi_tokens: int = fixed(0)  # the same in tokens: those a turn may compute within its target
    # entries that wait to be written; if it is full, entries are dropped
    write_buffer_bytes: int = fixed(256 * MIB)
    reader_threads: int = fixed(2)  # threads that read layer slices ahead
    read_only: bool = False  # open the directory for reading while another process writes to it
    tenant: str = ""  # salt of every key: tenants never share entries
    # of stored KV: "raw", "bfloat16" or "int8"; empty: int8 of chunks, raw of conversations
    codec: str = Default("")
    redis: RedisConfig | None = None  # a tier that replicas share, slower than the disk
    s3: S3Config | None = None  # another one, slower still

    def __post_init__(self) -> None:
        at_least(
            self,
            memory_bytes=0,
            disk_bytes=0,
            write_buffer_bytes=0,
            reader_threads=1,
            xi_tokens=0,
        )
        if self.ttft_target_ms is not None and (self.xi_tokens or not self.ttft_target_ms > 0.0):
            raise ConfigError(
                "store.ttft_target_ms must be more than 0, and takes the place of store.xi_tokens."
            )
        one_of("store.codec", self.codec, (*CODECS, ""))
        one_of("store.policy", self.policy, POLICIES)
        has_target = self.xi_tokens or self.ttft_target_ms is not None
        if resolve_name(POLICIES[self.policy]).needs_target and not has_target:
            raise ConfigError(
                f"store.policy {self.policy} needs store.ttft_target_ms or store.xi_tokens."
            )


@dataclass(frozen=True, slots=True)
class FusionConfig:
    """How stored entries are made into one prompt's KV (CacheBlend sections 4 and 5)."""

    # share of the fused, inexact tokens recomputed in each layer; None: the controller's
    ratio: float | None = None
    # recomputed at least, unless a request names its ratio, or the ratio is 0; 0: no floor
    floor_tokens: int = 8
    selector: str = "attention"  # which tokens (docs/ask.md)
    stored_kv: str = Default("expected")  # of chunks: "expected", or "alone" as in the papers
    # layers read ahead of the one being fused; 0: none; None: as measured
    read_ahead_layers: int | None = fixed(None)
    seed: int = fixed(0)  # of the `random` selector

    def __post_init__(self) -> None:
        one_of("fusion.selector", self.selector, SELECTORS)
        one_of("fusion.stored_kv", self.stored_kv, ("expected", "alone"))
        at_least(self, read_ahead_layers=0, floor_tokens=0)
        if self.ratio is not None and not 0.0 <= self.ratio <= 1.0:
            raise ConfigError(
                f"fusion.ratio is {self.ratio}; it is a share and must lie in [0, 1]."
            )


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """The loading controller, which chooses the ratio if it is None (CacheBlend section 5.1)."""

    # measure a profile where the store's directory has none, while no request runs
    measure: bool = fixed(True)
    # keep entries out of memory where disk delays no first token; False: all are in every tier
    limit_memory: bool = fixed(True)


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """The application's fixed text around the documents."""

    system: str = Default("")  # system text, before the documents
    # behind each passage; computed with each prompt, and no part of what is stored
    separator: str = Default("\n\n")


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """How conversations are kept (CachedAttention sections 3.1 to 3.4)."""

    # most tokens of a block of history, the unit of storing and trimming
    block_tokens: int = fixed(256)
    # KV of turns that may wait to be stored; if it is full, the end of a turn waits; None: a
    # context window
    save_buffer_bytes: int | None = fixed(None)
    # first tokens of a history that truncation never drops: attention sinks
    sink_tokens: int = fixed(4)
    # which tokens are dropped: "oldest", or "keep-dialogue" (old documents first)
    discard: str = "oldest"
    ttl_s: float | None = None  # a conversation idle for longer is deleted; None: never
    shared: bool = False  # any replica can continue any conversation; its state is on `store.redis`
    # blocks and states are kept here, apart from the store's; None: with them
    directory: str | None = fixed(None)
    # what becomes of history that is not exact: "keep" it, "select" tokens of it to recompute, or
    # "recompute" it once (docs/conversations.md)
    inexact_history: str = "select"

    def __post_init__(self) -> None:
        one_of("session.inexact_history", self.inexact_history, ("keep", "select", "recompute"))
        at_least(self, block_tokens=1, save_buffer_bytes=0, sink_tokens=0)
        one_of("session.discard", self.discard, DISCARDING_LISTS)
        if self.ttl_s is not None and not self.ttl_s > 0.0:
            raise ConfigError(f"session.ttl_s is {self.ttl_s}; it must be more than 0, or None.")


@dataclass(frozen=True, slots=True)
class KCacheConfig:
    """Decoding with K on the device and V in host memory (KCache sections 3.1 and 3.3)."""

    # N: a query head attends with the V rows of its N largest weights; None: all
    top_n: int | None = 128
    resident_layers: int = fixed(2)  # L: the V of the first L layers stays on the device

    def __post_init__(self) -> None:
        at_least(self, resident_layers=0, top_n=1)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The request queue before the prefill (CachedAttention section 3.3)."""

    # admitted requests, more while prompts are short; 1: each prompt is prefilled alone
    workers: int = 2
    queue_limit: int = fixed(256)  # requests that may wait; more are refused
    # from the call to the last token, for requests without their own; None: none
    deadline_s: float | None = fixed(None)

    def __post_init__(self) -> None:
        at_least(self, workers=1, queue_limit=0)
        if self.deadline_s is not None and not self.deadline_s > 0.0:
            raise ConfigError(
                f"scheduler.deadline_s is {self.deadline_s}; it must be more than 0, or None."
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of an engine."""

    store: StoreConfig = field(default_factory=StoreConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    session: SessionConfig = field(default_factory=SessionConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    kcache: KCacheConfig | None = None  # V in host memory while decoding; None: off
    device: str = "cpu"  # "cpu", "cuda", "cuda:1"
    # "auto": the checkpoint's, or float32 where a CPU is faster in it; or its name
    dtype: str = Default("auto")
    # linear layers: "plain" as they are loaded; on a CPU "int8": faster, rounded
    weights: str = Default("plain")
    packed_bytes: int = 3 * GIB  # most memory for copies of weights that make products faster (CPU)
    # most tokens that a decoding step verifies because they follow in the prompt; 0: none
    drafts: int = fixed(16)
    # folder or hub id of a LoRA adapter, merged into the weights when a model is loaded by name
    adapter: str = Default("")
    # name of a merged LoRA adapter: its entries are stored apart
    adapter_id: str = fixed(Default(""))

    def __post_init__(self) -> None:
        at_least(self, packed_bytes=0, drafts=0)
        if 0 < self.store.xi_tokens < self.session.block_tokens:
            raise ConfigError(
                f"store.xi_tokens is {self.store.xi_tokens}, less than session.block_tokens "
                f"({self.session.block_tokens}), which are kept or evicted as a whole: so it "
                "would be 0."
            )
        one_of("weights", self.weights, WEIGHTS)
        if self.session.shared and self.store.redis is None:
            raise ConfigError(
                "session.shared needs store.redis: the server on which conversations are kept."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A config from nested mappings, as code gives it: fixed values too. Raises `ConfigError`
        on an unknown key or a wrong type.
        """
        return typing.cast(Self, build(cls, values, in_code=True))

    @classmethod
    def from_settings(cls, values: Mapping[str, Any]) -> Self:
        """The engine's part of all settings; commands and server read the others. Raises
        `ConfigError`.
        """
        others = ("home", "model", "serve")
        own = {name: value for name, value in values.items() if name not in others}
        return typing.cast(Self, build(cls, own, siblings=others))

    @classmethod
    def gather(cls, file: str | Path | None, environment: Mapping[str, str] | None = None) -> Self:
        """The file's values, overridden by the environment's (default: the process's). Raises
        `ConfigError`.

        `home`, `model` and the group `serve` are read by the commands and the server.
        """
        return cls.from_settings(gather(file, environment))


def at_least(config: Any, **minimums: float) -> None:
    """Raise `ConfigError` if a setting is less than its minimum; `None` is allowed."""
    for name, minimum in minimums.items():
        value = getattr(config, name)
        if value is not None and not value >= minimum:  # refuses NaN too
            raise ConfigError(f"{name} is {value}; it must be at least {minimum}.")


def one_of(name: str, value: str, known: Collection[str]) -> None:
    """Raise `ConfigError` if the setting `name` has an unknown value."""
    if value not in known:
        raise ConfigError(
            f"{name} is {value!r}; it must be one of: {', '.join(name for name in known if name)}."
        )
