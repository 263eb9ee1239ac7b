"""Statistics of a tier, and of a store's tiers."""

from dataclasses import dataclass


class TierKind:
    """The kinds of the tiers that ship. Another tier has a name of its own."""

    MEMORY = "memory"
    DISK = "disk"
    REDIS = "redis"
    S3 = "s3"


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Health of a remote tier."""

    answers: bool  # whether the last call was answered in time
    away_s: float  # seconds since the start in which it did not answer
    failures: int  # calls that ended in an error, timeouts included
    skipped: int  # calls not made because the breaker was open
    pending_deletions: int  # deletions that it has not confirmed yet


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds, and what happened since it was opened."""

    kind: str
    entries: int | None
    used_bytes: int | None
    # these three are None of shared storage, which counts and bounds itself
    capacity_bytes: int | None
    hits: int
    misses: int
    evictions: int
    damaged: int  # entries dropped because bytes, identity or checksum were wrong
    read_bytes: int
    written_bytes: int
    remote: RemoteStats | None = None  # of a remote tier


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What the store holds, and what happened since it was opened."""

    tiers: tuple[TierStats, ...]  # fastest first
    pending_bytes: int  # waiting to be written, or to be promoted
    # entries not written to a tier below memory: the write buffer was full, or the write failed
    dropped_writes: int
    prefetched: int = 0  # entries copied to the fastest tier for waiting requests
    announced: int = 0  # requests that wait, or have not opened their entries yet


@dataclass(slots=True)
class Counts:
    """The counters of `TierStats`. Not thread-safe."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    damaged: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
