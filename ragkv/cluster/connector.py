"""The contract of a connector to storage that other processes also write. An entry is a few
numbered values there.

A connector knows keys, layer groups and bytes; the tier knows what the bytes mean and whether they
are right. The value of layer group 0 is the entry's head. It is written last, so an entry is seen
whole or not at all. Every call ends within the configured timeout, however slowly bytes arrive, or
raises `RemoteError`. The storage itself bounds what it holds (Redis' `maxmemory`, a lifecycle rule
of the bucket). All methods are thread-safe.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from ragkv.store.entry import EntryKey
from ragkv.store.record import Bytes

# A lookup reads so much of a value: one read gets the whole head of most entries.
HEAD_BYTES = 32768


class Connector(ABC):
    """Shared storage, seen under one tenant's prefix."""

    kind: str  # of its tier

    @abstractmethod
    def find(self, keys: Sequence[EntryKey]) -> list[Bytes | None]:
        """For each key the first `HEAD_BYTES` of its head, `None` if the entry is missing or
        incomplete.

        Counts as a use: a time to live begins anew.
        """

    @abstractmethod
    def get(
        self, key: EntryKey, layer_group: int, start: int = 0, stop: int | None = None
    ) -> Bytes | None:
        """A value's bytes from `start` to before `stop`, or to its end; `None` if there are none.
        Not a use.
        """

    def exists(self, key: EntryKey) -> bool:
        """Whether the head of `key` is there. Not a use."""
        return self.get(key, 0, 0, 1) is not None

    @abstractmethod
    def put(self, key: EntryKey, values: Sequence[Bytes]) -> bool:
        """Write `values`, one a layer group, for a key that is not there; `False` if the storage is
        full.
        """

    @abstractmethod
    def delete(self, key: EntryKey, content_digest: bytes | None = None) -> bool:
        """Delete the values of `key`; whether its head was there.

        With a `content_digest`, only if the head has it: another replica may have written the entry
        anew.
        """

    @abstractmethod
    def all_keys(self) -> Iterator[EntryKey]:
        """The keys that are held, in no particular order. Not a use."""

    def ping(self) -> None:
        """Raise `RemoteError` if the storage does not answer."""
        self.exists(EntryKey("0" * 64))

    def reset(self) -> None:  # noqa: B027
        """Open new connections for the next calls. For libraries that reuse a broken connection."""

    @abstractmethod
    def close(self) -> None:
        """Release the connections. Twice is harmless."""
