"""Settings: one frozen tree, from code, a TOML file or the environment.

Units stand in the names, an unknown key is refused naming the nearest, and no setting changes another. Pure Python.
"""

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from .errors import ConfigError

MIB = 1024**2
GIB = 1024**3
# The names in registries that load torch, or much else; a test holds them to the registries.
CODEC_NAMES = ("raw", "int8")  # ragkv.store.CODECS
POLICY_NAMES = (  # ragkv.store.POLICIES
    "auto",
    "end-aware",
    "et-lru",
    "et-lru-learned",
    "et-lru-posterior",
    "fifo",
    "gdsf",
    "gdsf-memory",
    "lfu-da",
    "lookahead",
    "lru",
    "t-lru",
    "t-lru-guarded",
    "threshold-lru",
)
SIMULATOR_POLICY_NAMES = (  # ragkv.simulate.SIMULATOR_ONLY
    "belady",
    "length-aware",
    "t-lru-all",
    "t-lru-eager",
    "t-lru-literal",
    "tail-belady",
)
SELECTOR_NAMES = (  # ragkv.fusion.SELECTORS
    "all",
    "first-k",
    "hkvd",
    "hkvd-gradual",
    "none",
    "random",
    "sensitivity",
    "sensitivity-query",
)
TRUNCATIONS = ("kv", "tokens", "naive")
INEXACT_HISTORY = ("keep", "recompute")
NOT_SETTINGS = ("RAGKV_HOME", "RAGKV_MODEL")  # options of the command line that share the prefix
SERVE_PREFIX = "RAGKV_SERVE_"  # the server's own, which share it too


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """A Redis or Valkey server that replicas share. User and password come from the environment alone."""

    url: str = ""  # redis://host:6379/0, rediss://host:6379/0 (TLS) or unix:///path
    prefix: str = "ragkv"  # of every key
    max_bytes: int = 8 * GIB  # of all entries of this tenant, whoever wrote them
    ttl_s: float | None = 7 * 24 * 3600.0  # an entry unused for so long goes; None: never
    timeout_s: float = 1.0  # of one answer, however slowly it comes; what takes longer is a miss
    connections: int = 4  # values fetched at a time
    group_bytes: int = MIB // 2  # a value has so many layers as make this; 0.5 to 8 MiB pay
    ca_file: str | None = None  # certificates to trust, for rediss://; None: the system's
    username_variable: str = "REDIS_USERNAME"  # names of environment variables
    password_variable: str = "REDIS_PASSWORD"
    secret_variable: str | None = None  # names one whose secret authenticates every value; None: checksums alone

    def __post_init__(self) -> None:
        scheme, _, rest = self.url.partition("://")
        if scheme not in ("redis", "rediss", "unix") or not rest:
            raise ConfigError("store.redis.url must be redis://host:port/db, rediss://host:port/db or unix:///path.")
        if "@" in rest or "password=" in rest:
            raise ConfigError(
                f"store.redis.url holds credentials; put them into {self.username_variable} and "
                f"{self.password_variable}, which are read from the environment."
            )
        _check_remote(self, "redis")


@dataclass(frozen=True, slots=True)
class S3Config:
    """A bucket of an S3-compatible store that replicas share. Credentials come from the environment alone (AWS_...)."""

    bucket: str = ""
    prefix: str = "ragkv"  # of every object
    endpoint: str | None = None  # https://host:port of a store that is not Amazon's
    region: str | None = None  # None: AWS_REGION's
    virtual_hosted: bool = False  # https://bucket.host/ rather than https://host/bucket/
    max_bytes: int = 100 * GIB  # of all entries of this tenant, as counted by listing; lifecycle rules bound it too
    timeout_s: float = 3.0  # of one answer, its body included; what takes longer is a miss
    connections: int = 8  # values fetched at a time
    group_bytes: int = 4 * MIB  # a value has so many layers as make this; 0.5 to 8 MiB pay
    audit_s: float = 600.0  # how often what others wrote and deleted is counted, by listing
    secret_variable: str | None = None  # names the environment variable whose secret authenticates every value

    def __post_init__(self) -> None:
        if not self.bucket:
            raise ConfigError("store.s3.bucket must name a bucket.")
        if not self.audit_s > 0.0:
            raise ConfigError(f"store.s3.audit_s is {self.audit_s}; it must be more than 0.")
        _check_remote(self, "s3")


def _check_remote(config: RedisConfig | S3Config, name: str) -> None:
    at_least(config, max_bytes=0, connections=1, group_bytes=1)
    if not 0.0 < config.timeout_s < float("inf"):
        raise ConfigError(f"store.{name}.timeout_s is {config.timeout_s}; it must be more than 0 and finite.")
    ttl_s = getattr(config, "ttl_s", None)
    if ttl_s is not None and not ttl_s > 0.0:
        raise ConfigError(f"store.{name}.ttl_s is {ttl_s}; it must be more than 0, or None.")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where entries live and how much of each place they may take."""

    directory: str | None = None  # the disk tier's directory; None: memory tier only
    memory_bytes: int = 1 * GIB  # capacity of the memory tier
    disk_bytes: int = 20 * GIB  # capacity of the disk tier
    memory_reserve_bytes: int | None = None  # kept free in memory above a disk; None: a sixteenth of memory_bytes
    policy: str = "lookahead"  # eviction policy of memory and disk (Redis and S3 evict by last use): POLICY_NAMES
    prefetch: bool = True  # bring what waiting requests will read from disk to memory before they start
    xi_tokens: int = 0  # what a turn may compute within its TTFT target; policies that serve the tail trim to it
    write_buffer_bytes: int = 256 * MIB  # entries waiting to be written; a full buffer drops, never delays a token
    reader_threads: int = 2  # threads that read layer slices ahead
    read_only: bool = False  # open the directory for reading beside a writer
    tenant: str = ""  # salt of every key: tenants never share entries
    direct_reads: bool = False  # read entries past the page cache (O_DIRECT), where the system has it
    codec: str = "raw"  # how KV is kept in every tier: "raw", or "int8", about half the bytes of bfloat16 and rounded
    redis: RedisConfig | None = None  # a tier that replicas share, below the disk
    s3: S3Config | None = None  # another, below that

    def __post_init__(self) -> None:
        at_least(self, memory_bytes=0, disk_bytes=0, write_buffer_bytes=0, reader_threads=1)
        at_least(self, xi_tokens=0)
        if not 0 <= (self.memory_reserve_bytes or 0) <= self.memory_bytes:
            raise ConfigError(
                f"store.memory_reserve_bytes is {self.memory_reserve_bytes}; it must lie in 0 ... memory_bytes, "
                f"{self.memory_bytes}."
            )
        one_of("store.codec", self.codec, CODEC_NAMES)
        if self.policy in SIMULATOR_POLICY_NAMES:
            raise ConfigError(
                f"store.policy is {self.policy!r}, which runs only in the simulator (`ragkv simulate --policy`); "
                f"it must be one of: {', '.join(POLICY_NAMES)}."
            )
        one_of("store.policy", self.policy, POLICY_NAMES)


@dataclass(frozen=True, slots=True)
class FusionConfig:
    """How stored entries become one prompt's KV (CacheBlend sections 4 and 5)."""

    ratio: float | None = 0.15  # share of the fused, inexact tokens recomputed in each layer; None: the controller's
    selector: str = "sensitivity"  # which tokens: see ragkv.fusion.SELECTORS
    read_ahead_layers: int | None = 2  # layers read ahead of the one being fused; 0: none; None: as measured
    seed: int = 0  # of the `random` selector
    sensitivity_prefixes: int = 2  # k: unrelated texts behind which a chunk is scored at ingest; 0 stores no scores
    learned_scores: bool = True  # scores by the network in the model's folder, where `ragkv learn` left one

    def __post_init__(self) -> None:
        one_of("fusion.selector", self.selector, SELECTOR_NAMES)
        at_least(self, sensitivity_prefixes=0)
        if self.read_ahead_layers is not None:
            at_least(self, read_ahead_layers=0)
        if self.ratio is not None and not 0.0 <= self.ratio <= 1.0:
            raise ConfigError(f"fusion.ratio is {self.ratio}; it is a share and must lie in [0, 1].")


@dataclass(frozen=True, slots=True)
class PricesConfig:
    """What keeping KV costs, in USD a GB (1e9 bytes) and month (730 h). Defaults: what clouds ask, rounded."""

    memory_usd_per_gb_month: float = 2.5  # what a machine with more memory costs more
    disk_usd_per_gb_month: float = 0.08  # a network SSD
    redis_usd_per_gb_month: float = 8.0  # a managed server's memory
    s3_usd_per_gb_month: float = 0.023  # an object store
    remote_usd_per_gb_month: float = 0.023  # any other shared storage

    def __post_init__(self) -> None:
        for field_ in dataclasses.fields(self):
            if not 0.0 <= (price := getattr(self, field_.name)) < float("inf"):
                raise ConfigError(f"controller.prices.{field_.name} is {price}; a price is finite and not negative.")

    def of(self, tier: str) -> float:
        """The price of a tier by its kind, USD a GB and month; raises `ConfigError` for one without."""
        price: float | None = getattr(self, f"{tier}_usd_per_gb_month", None)
        if price is None:
            raise ConfigError(
                f"There is no price for tier {tier!r}; there is one for memory, disk, redis, s3 and remote."
            )
        return price


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """The loading controller, which chooses where a ratio is None (CacheBlend section 5.1)."""

    prices: PricesConfig = field(default_factory=PricesConfig)  # of the tiers it compares


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """The application's fixed text around the documents."""

    system: str = ""  # system text, before the documents
    chunk_end: str = ""  # appended to the text of every chunk when it is made, so part of its identity; e.g. "\n\n"


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """How conversations are kept (CachedAttention sections 3.1 to 3.4)."""

    block_tokens: int = 256  # most tokens of a block of history, the unit of storing and of trimming
    save_buffer_bytes: int = 256 * MIB  # KV of turns waiting to be stored; a full buffer drops, never delays a token
    truncation: str = "kv"  # "kv"; to compare: "tokens" computes what is kept again, "naive" keeps old rotations
    truncation_ratio: float = 0.5  # share of the history dropped at a time when a prompt would overflow the context
    sink_tokens: int = 0  # first tokens of a history that truncation leaves
    discard: str = "oldest"  # which tokens go: "oldest", or "keep-dialogue" (documents of past turns first)
    ttl_s: float | None = None  # a conversation idle for longer is deleted; None: never
    shared: bool = False  # any replica goes on with any conversation: their state lies on `store.redis`
    inexact_history: str = "keep"  # what a fused or a truncated turn left: "keep" it, or "recompute" it, once

    def __post_init__(self) -> None:
        one_of("session.inexact_history", self.inexact_history, INEXACT_HISTORY)
        at_least(self, block_tokens=1, save_buffer_bytes=0, sink_tokens=0)
        one_of("session.truncation", self.truncation, TRUNCATIONS)
        if not 0.0 < self.truncation_ratio <= 1.0:
            raise ConfigError(f"session.truncation_ratio is {self.truncation_ratio}; it must lie in (0, 1].")
        if self.ttl_s is not None and not self.ttl_s > 0.0:
            raise ConfigError(f"session.ttl_s is {self.ttl_s}; it must be more than 0, or None.")


@dataclass(frozen=True, slots=True)
class KCacheConfig:
    """Decoding with K on the device and V in host memory (KCache sections 3.1 and 3.3)."""

    top_n: int | None = 128  # N: V rows a query head attends with, those of the largest weights; None: all of them
    resident_layers: int = 1  # L: the first layers, whose V stays on the device
    renormalise: bool = False  # whether the N weights are scaled to sum to 1; the paper leaves them as they are
    fall_back: bool = True  # ordinary attention where N leaves nothing out; False takes the top-N path all the same

    def __post_init__(self) -> None:
        at_least(self, resident_layers=0)
        if self.top_n is not None and self.top_n < 1:
            raise ConfigError(f"kcache.top_n is {self.top_n}; it must be at least 1, or None.")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The request queue before the prefill (CachedAttention section 3.3)."""

    workers: int = 2  # requests past the queue at once: one computes, the others look up and read ahead
    queue_limit: int = 256  # requests that may wait; more are refused
    deadline_s: float | None = None  # a request's, from the call to its last token, unless it has its own; None: none
    batch_rows: int | None = None  # requests a decoding step is for, at most; None: all who wait; 1: one by one

    def __post_init__(self) -> None:
        at_least(self, workers=1, queue_limit=0, batch_rows=1)
        if self.deadline_s is not None and not self.deadline_s > 0.0:
            raise ConfigError(f"scheduler.deadline_s is {self.deadline_s}; it must be more than 0, or None.")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from, besides its model."""

    store: StoreConfig = field(default_factory=StoreConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    session: SessionConfig = field(default_factory=SessionConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    kcache: KCacheConfig | None = None  # V in host memory while decoding; None: off
    device: str = "cpu"  # "cpu", "cuda", "cuda:1"
    dtype: str = "auto"  # "auto" keeps the checkpoint's; else "float32", "bfloat16", "float16"
    packed_bytes: int = 3 * GIB  # most memory for weights kept twice, so that few rows take less time (bfloat16 on CPU)
    adapter_id: str = ""  # names a merged LoRA, so that its entries are kept apart

    def __post_init__(self) -> None:
        at_least(self, packed_bytes=0)
        if self.session.shared and self.store.redis is None:
            raise ConfigError("session.shared needs store.redis: the server on which conversations are kept.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A config from nested mappings; raises `ConfigError` on an unknown key or a wrong type."""
        return typing.cast(Self, build(cls, values))

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """A config from a TOML file; its tables are the groups: `[store]`, `[fusion]`, `[controller.prices]` ..."""
        return cls.from_dict(toml_values(path))

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None, prefix: str = "RAGKV_") -> Self:
        """A config from variables such as `RAGKV_DEVICE=cuda` and `RAGKV_STORE__MEMORY_BYTES=1000`."""
        return cls.from_dict(environment_values(environment, prefix))


class _Text(str):
    """A value from the environment, still to be read as its setting's type."""

    __slots__ = ()


def toml_values(path: str | Path) -> dict[str, Any]:
    """What a TOML file says, as nested mappings; raises `ConfigError` if it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read settings from {path}: {error}.") from error


def environment_values(environment: Mapping[str, str] | None, prefix: str) -> dict[str, Any]:
    """What the variables of that prefix say, as nested mappings: `__` stands between group and setting."""
    source = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for name, text in source.items():
        foreign = name in NOT_SETTINGS or (name.startswith(SERVE_PREFIX) and prefix != SERVE_PREFIX)
        if name.startswith(prefix) and not foreign:
            *rooms, leaf = name.removeprefix(prefix).lower().split("__")
            place = values
            for room in rooms:
                inner = place.setdefault(room, {})
                if not isinstance(inner, dict):
                    raise ConfigError(f"{room} is a group of settings, not {str(inner)!r}.")
                place = inner
            place[leaf] = _Text(text)
    return values


def build(cls: type[Any], values: Mapping[str, Any], path: str = "") -> Any:
    """A frozen tree of settings from nested mappings; raises `ConfigError` on an unknown key or a wrong type."""
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    arguments = {}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0)
            raise ConfigError(f"Unknown setting {path}{name!s}. Did you mean {path}{near[0]}?")
        arguments[name] = _convert(hints[name], value, f"{path}{name}")
    return cls(**arguments)


def _convert(kind: Any, value: Any, path: str) -> Any:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in options and (value is None or (isinstance(value, _Text) and value.lower() in ("", "none"))):
        return None
    if type(None) in options and str not in options and isinstance(value, str) and value.lower() == "none":
        return None  # TOML has no null
    wanted = next(option for option in options if option is not type(None))
    if dataclasses.is_dataclass(wanted):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} is a group of settings, not {value!r}.")
        return build(typing.cast(type[Any], wanted), value, path=f"{path}.")
    if typing.get_origin(wanted) is tuple:
        return _convert_list(typing.get_args(wanted)[0], value, path)
    if isinstance(value, _Text):
        value = _from_text(wanted, value, path)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ConfigError(f"{path} must be {wanted.__name__}, not {value!r}.")
    return value


def _convert_list(kind: Any, value: Any, path: str) -> tuple[Any, ...]:
    """A list of settings: TOML's array, or words with commas between."""
    if isinstance(value, _Text):
        value = [_Text(word.strip()) for word in value.split(",") if word.strip()]
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{path} must be a list, not {value!r}.")
    return tuple(_convert(kind, item, f"{path}[{number}]") for number, item in enumerate(value))


def _from_text(wanted: type[Any], text: str, path: str) -> Any:
    if wanted is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{path} must be true or false, not {text!r}.")
    try:
        return wanted(str(text))
    except ValueError as error:
        raise ConfigError(f"{path} must be {wanted.__name__}, not {text!r}.") from error


def at_least(config: Any, **minimums: float) -> None:
    """Raise `ConfigError` if a setting of that name is less; one that is `None` is not asked."""
    for name, minimum in minimums.items():
        value = getattr(config, name)
        if value is not None and not value >= minimum:  # refuses NaN too
            raise ConfigError(f"{name} is {value}; it must be at least {minimum}.")


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Raise `ConfigError` if the setting `name` has a value that is not known."""
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; it must be one of: {', '.join(known)}.")


ReuseMode = Literal["fused", "prefix", "none"]
