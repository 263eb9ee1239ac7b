"""The contract of a connector: entries on storage that others write to as well, each as a few numbered values.

A connector knows keys, groups and bytes; what the bytes mean, and whether they are right, is the tier's. The value of
group 0 is the entry's head: it is written last, so that an entry is seen whole or not at all. Every call ends within
the connector's timeout, however slowly bytes trickle in, or raises `RemoteError`. All methods are thread-safe.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

from ..record import Bytes

HEAD_GUESS = 16384  # bytes of a head that a lookup brings; one read gets the whole of most


@dataclass(frozen=True, slots=True)
class Placed:
    """What became of a `put`."""

    kept: bool
    written_bytes: int = 0  # 0 where it was there already
    evicted: int = 0  # entries that went for it


@dataclass(frozen=True, slots=True)
class Usage:
    """What is held under this tenant's prefix, whoever wrote it."""

    entries: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    """The beginning of an entry's head, as it was found."""

    key: str
    start: Bytes  # `HEAD_GUESS` bytes, or the whole value if it is shorter


class Connector(ABC):
    """Shared storage, seen under one tenant's prefix and bounded there."""

    name: str  # in messages
    capacity_bytes: int
    arbitrates: bool = False  # whether `claim` is one among all replicas

    @abstractmethod
    def find(self, keys: Sequence[str]) -> list[Held | None]:
        """The heads of `keys`, together, `None` for what is not there whole.

        Counts as a use: a time to live begins anew.
        """

    @abstractmethod
    def peek(self, key: str) -> Held | None:
        """As `find`, of one. Not a use."""

    @abstractmethod
    def get(self, key: str, group: int, start: int = 0, stop: int | None = None) -> Bytes | None:
        """A value's bytes from `start` to before `stop`, or to its end; `None` if there are none."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether the head of `key` is there. Not a use."""

    @abstractmethod
    def put(self, key: str, values: Sequence[Bytes], pinned: Set[str]) -> Placed:
        """Keep `values`, by group, evicting the least recently used but none of `pinned`, keys this process reads.

        What is there already is left as it is.
        """

    @abstractmethod
    def delete(self, key: str, groups: int = 0, edition: bytes | None = None) -> bool:
        """Drop all values of `key`; whether its head was there. `groups` are as many as are known of.

        With an `edition` only if that is what its head is of: another replica may have written it anew.
        """

    @abstractmethod
    def listed(self) -> Iterator[str]:
        """What is held, in no particular order. Not a use."""

    @abstractmethod
    def usage(self) -> Usage:
        """Entries and bytes, as they are known now."""

    def audit(self, stopped: Callable[[], bool] = lambda: False) -> None:  # noqa: B027
        """Make the books agree with what is there: in the background, now and then, until `stopped`."""

    @abstractmethod
    def ping(self) -> None:
        """Ask for a sign of life; raises `RemoteError` if there is none."""

    def claim(self, name: str, expires_s: float) -> str | None:
        """Be the one who does `name`, for that long at most: a token for `release`, or `None` if another is."""
        return ""

    def release(self, name: str, token: str) -> None:  # noqa: B027
        """End a claim, if it is still ours."""

    def reset(self) -> None:  # noqa: B027
        """Drop the connections: the next call opens new ones."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the connections. Twice is harmless."""
