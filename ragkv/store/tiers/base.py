"""The contract of a tier, a bounded place that holds entries. `lease.py` reads an entry that a tier
found.

All methods are thread-safe. A tier drops an entry that turns out to be damaged.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ragkv.config import StoreConfig

from ..entry import EntryInfo, EntryKey, Identity, StoredEntry
from ..policies import Policy
from .lease import Lease
from .ledger import Ledger
from .stats import TierStats

UNLIMITED_BYTES = 2**62  # a capacity that nothing fills


class TierRequest(NamedTuple):
    """What the opener of a tier is given: the function that its row of `TIERS` names."""

    config: StoreConfig
    policy: Policy  # for this tier alone; a tier that does not evict by a policy ignores it
    page_locked: bool  # CUDA copies entries from this tier's memory


class Tier(ABC):
    """A bounded place that holds entries. What is not abstract concerns only some tiers."""

    kind: str  # its name in settings, reports and profiles: a store has one tier of a kind
    # what it holds, if it evicts by a policy
    ledger: Ledger[Any] | None = None
    read_only: bool = False  # `put` and `delete` raise `StoreReadOnlyError`
    # entries are copied to a device from its memory, which is page-locked for that
    page_locked: bool = False
    # a call may take as long as its timeout; other processes write and delete there as well
    is_remote: bool = False

    @abstractmethod
    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        """Pin and open the entry of these tokens, or `None`. Counts as a use."""

    @abstractmethod
    def put(self, entry: StoredEntry) -> bool:
        """Store `entry`, evicting others if needed; returns when it is durable.

        `False` if it was not stored: it is larger than the tier, everything is leased, the policy
        did not admit it, or the write failed (logged). An entry that is here already is left
        unchanged and counts as stored.
        """

    @abstractmethod
    def contains(self, key: EntryKey) -> bool:
        """Whether `key` is here now. Does not count as a use."""

    @abstractmethod
    def delete(self, key: EntryKey) -> bool:
        """Drop `key`; whether it was here. No new lease is given.

        Open leases of a tier of this machine stay readable. Those of shared storage may find the
        rest gone.
        """

    @abstractmethod
    def scan(self) -> Iterator[tuple[EntryKey, EntryInfo | None]]:
        """Every key held, with its `EntryInfo`, or `None` if this code cannot read it. Not a use.

        What the system does not let a tier of this machine read now is left out.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """Counts and bytes."""

    @abstractmethod
    def close(self) -> None:
        """Flush and release. Twice is harmless."""

    def scratch(self, folder: Path) -> "Tier | None":
        """An empty tier of this kind without a limit, with its files in `folder`: a profile
        measures it. `None`: a profile does not need that, because the reads of a remote tier are
        timed while they are used, and memory is the same everywhere.
        """
        return None

    def infos(self) -> Iterator[EntryInfo]:
        """The readable entries of `scan`."""
        return (info for _, info in self.scan() if info is not None)

    def reserve(self, size_bytes: int) -> None:  # noqa: B027
        """Reserve so much of the capacity for what lies next to the entries."""

    def free_disk(self) -> int:
        """Evict some entries, because the disk is full; returns the bytes that this freed."""
        return 0

    def look_up_ahead(self, keys: Sequence[EntryKey]) -> None:  # noqa: B027
        """Begin to look up these keys, which will be leased soon, if that takes a server's time."""

    @property
    def answers(self) -> bool:
        """Whether it answered the last call in time."""
        return True

    def speed(self) -> float | None:
        """The recent speed of reads from a remote tier, bytes a second; `None` if not measured."""
        return None
