"""Copies on their way up from slower tiers, and what stops them: never is an entry brought back from the dead.

A climb begins when the lease is opened, so before its entry can be deleted; a deletion stops all climbs of its key. So
nobody needs to ask a tier far away whether it still has what is being copied.
"""

import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from ragkv.errors import EntryDamagedError

from .encoded import EncodedEntry
from .tiers import Lease


class Climb:
    """One copy under way."""

    def __init__(self, key: str, depth: int) -> None:
        self.key = key
        self.depth = depth  # of the tier it comes from: tiers above it get the copy
        self.going = True  # read and written under the lock of deletions


class Climbs:
    """All copies under way. Who drops a climb ends it."""

    def __init__(self) -> None:
        self._live: weakref.WeakSet[Climb] = weakref.WeakSet()
        self._lock = threading.Lock()

    def begin(self, key: str, depth: int) -> Climb:
        """A new one."""
        climb = Climb(key, depth)
        with self._lock:
            self._live.add(climb)
        return climb

    def stop(self, key: str | None = None) -> None:
        """Stop those of `key`, or all."""
        with self._lock:
            for climb in self._live:
                if key is None or climb.key == key:
                    climb.going = False


class ClimbingLease(Lease):
    """A lease from a slower tier that hands itself on to be copied up when its reader is done."""

    def __init__(self, lease: Lease, climb: Climb, promote: Callable[[Lease, Climb], None]) -> None:
        self.info, self.kind, self.sensitivity = lease.info, lease.kind, lease.sensitivity
        self._lease, self._climb = lease, climb
        self.in_place, self.layers_per_read = lease.in_place, lease.layers_per_read
        self._damaged = False
        self._promote: Callable[[Lease, Climb], None] | None = promote

    def prefetch(self) -> None:
        self._lease.prefetch()

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.read_layers(layer, [out])[0]

    def read_layers(self, first: int, outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        try:
            return self._lease.read_layers(first, outs)
        except EntryDamagedError:
            self._damaged = True
            raise

    @property
    def stored_bytes(self) -> int:
        return self._lease.stored_bytes

    def read_encoded(self, page_locked: bool = False, before_read: Callable[[], None] = lambda: None) -> EncodedEntry:
        return self._lease.read_encoded(page_locked, before_read)

    def close(self) -> None:
        promote, self._promote = self._promote, None
        if promote is not None:
            if self._damaged:
                self._lease.close()
            else:
                promote(self._lease, self._climb)
