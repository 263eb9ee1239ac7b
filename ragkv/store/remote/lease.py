"""Reading one entry from far away: groups of layers are fetched ahead, verified where they arrive, and handed out.

The groups of the layers that are read next are asked for as soon as reading begins, and the following ones as it goes
on, so that the way is never idle and no more than some groups lie here. What was read is kept, as far as the tier has
room for it, for the copy that climbs to faster tiers: nothing is fetched twice.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import torch

from ragkv.errors import EntryUnreachableError, RemoteError, StoreError

from ..record import Bytes, bytes_of
from ..tiers.base import TierKind
from ..tiers.stored_lease import StoredLease
from .values import RemoteHead

AHEAD = 2  # groups fetched beyond the one that is read


class Source(Protocol):
    """What a lease needs of its tier."""

    kind: TierKind

    def fetch(self, head: RemoteHead, group: int) -> "Future[Bytes]":
        """The payload of a group, verified; soon."""

    def wait(self, future: "Future[Bytes]") -> Bytes:
        """What `fetch` promised. Raises `RemoteError` or `EntryDamagedError`."""

    def keep(self, size_bytes: int) -> bool:
        """Whether there is room to keep so much that was read; `unkeep` must follow."""

    def unkeep(self, size_bytes: int) -> None:
        """It is kept no longer."""

    def count_read(self, size_bytes: int) -> None:
        """So much was read."""

    def unpin(self, lease: "RemoteLease") -> None:
        """The lease is closed."""


class RemoteLease(StoredLease):
    """An entry far away. Its methods may be called from many threads at once."""

    def __init__(self, head: RemoteHead, source: Source) -> None:
        super().__init__(head.info, head.sensitivity, head.codec, head.layer_bytes)
        self.kind = source.kind
        self._head, self._source = head, source
        self._groups: dict[int, Future[Bytes]] = {}
        self._kept: dict[int, int] = {}  # bytes of groups that stay
        self._lock = threading.Lock()
        self._closed = False

    def prefetch(self) -> None:
        self._want(range(AHEAD))

    def hold(self) -> None:
        """Fetch all that is missing and keep it: the entry is about to go. Raises nothing."""
        self._want(range(self._head.groups))
        with self._lock:
            groups = dict(self._groups)
        for group, future in groups.items():
            try:
                self._keep(group, len(self._source.wait(future)), always=True)
            except StoreError:
                return  # who reads on will find out

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            groups, self._groups = self._groups, {}
            kept, self._kept = self._kept, {}
        for future in groups.values():
            future.cancel()
        self._source.unkeep(sum(kept.values()))
        self._source.unpin(self)

    def __del__(self) -> None:  # a lease nobody closed must not keep its pin for ever
        self.close()

    def _read(self, first: int, into: Sequence[torch.Tensor]) -> None:
        for number, stored in enumerate(into):
            self._read_one(first + number, stored)

    def _read_one(self, layer: int, stored: torch.Tensor) -> None:
        group, size = layer // self._head.together, self._layer_bytes
        future = self._want(range(group, group + 1 + AHEAD))
        try:
            payload = self._source.wait(future)
        except RemoteError as error:
            raise EntryUnreachableError(self.info.key, f"layer {layer} did not come ({error})") from error
        layers = self._head.layers_of(group)
        found = np.frombuffer(payload, np.uint8, size, (layer - layers.start) * size)
        np.copyto(np.frombuffer(bytes_of(stored), np.uint8), found)  # releases the GIL
        self._source.count_read(size)
        if layer == layers[-1] and not self._keep(group, len(payload)):
            with self._lock:
                self._groups.pop(group, None)

    def _want(self, groups: range) -> "Future[Bytes]":
        """Ask for `groups`, as far as there are any; what the first of them will bring."""
        with self._lock:
            if self._closed:
                raise StoreError(f"The lease of entry {self.info.key[:12]} is closed; read before closing it.")
            for group in groups:
                if group not in self._groups and group < self._head.groups:
                    self._groups[group] = self._source.fetch(self._head, group)
            return self._groups[groups.start]

    def _keep(self, group: int, size: int, always: bool = False) -> bool:
        with self._lock:
            if group in self._kept:
                return True
            if self._closed or not (self._source.keep(size) or always):
                return False
            self._kept[group] = size
            return True
