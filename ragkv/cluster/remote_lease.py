"""Reading one entry from a remote: layer groups are fetched ahead, verified where they arrive, and
handed out.

The layer groups that are read next are requested as soon as reading begins, and the following ones
as it goes on. So the network is never idle, and only a few groups are in memory. If the tier's read
cache has space, a group stays there for the copy to faster tiers, and nothing is fetched twice.
"""

import threading
from concurrent.futures import Future

import numpy as np
import torch

from ragkv.errors import EntryUnreachableError, RemoteError, StoreError
from ragkv.store.record import Bytes, bytes_of
from ragkv.store.tiers.lease import StoredLease

from .entry_values import RemoteHead
from .remote_reader import RemoteReader

AHEAD = 2  # So many layer groups are fetched beyond the one that is read.


class RemoteLease(StoredLease):
    """An entry on a remote. Its methods may be called from many threads at once."""

    def __init__(self, head: RemoteHead, reader: RemoteReader) -> None:
        super().__init__(head.record)
        self.kind = reader.connector.kind
        self._remote_head = head
        self._reader = reader
        self._payloads: dict[int, Future[Bytes]] = {}  # by layer group
        self._cached: dict[int, int] = {}  # by layer group that stays: its bytes in the read cache
        self._lock = threading.Lock()
        self._closed = False

    def prefetch(self) -> None:
        self._fetch(range(1))  # of all chunks before the second of any

    def release(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            payloads = self._payloads
            self._payloads = {}
            cached = self._cached
            self._cached = {}
        for future in payloads.values():
            future.cancel()
        self._reader.release_read_cache(sum(cached.values()))

    def _read(self, layer: int, into: torch.Tensor) -> None:
        layer_group = layer // self._head.layers_per_value
        size = self._head.layer_bytes
        future = self._fetch(range(layer_group, layer_group + 1 + AHEAD))
        try:
            payload = self._reader.wait(future)
        except RemoteError as error:
            raise EntryUnreachableError(
                self.info.key, f"layer {layer} did not arrive ({error})"
            ) from error
        layers = self._remote_head.layers_of(layer_group)
        found = np.frombuffer(payload, np.uint8, size, (layer - layers.start) * size)
        np.copyto(np.frombuffer(bytes_of(into), np.uint8), found)  # releases the GIL
        self._reader.count_read(size)
        if layer == layers[-1] and not self._cache(layer_group, len(payload)):
            with self._lock:
                self._payloads.pop(layer_group, None)

    def _fetch(self, layer_groups: range) -> Future[Bytes]:
        """Request those of `layer_groups` that exist and are not here; the payload of the first."""
        with self._lock:
            if self._closed:
                raise StoreError(
                    f"The lease of entry {self.info.key} is closed; read before closing it."
                )
            for layer_group in layer_groups:
                if (
                    layer_group not in self._payloads
                    and layer_group < self._remote_head.layer_groups
                ):
                    self._payloads[layer_group] = self._reader.fetch(self._remote_head, layer_group)
            return self._payloads[layer_groups.start]

    def _cache(self, layer_group: int, size: int) -> bool:
        """Let a payload stay until the lease is closed, if the read cache has space for it."""
        with self._lock:
            if layer_group not in self._cached:
                if self._closed or not self._reader.reserve_read_cache(size):
                    return False
                self._cached[layer_group] = size
            return True
