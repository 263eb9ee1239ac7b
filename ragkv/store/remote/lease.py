"""Reading one entry from a remote: layer groups are fetched ahead, verified where they arrive, and handed out.

The layer groups that are read next are requested as soon as reading begins, and the following ones as it goes on. So
the network is never idle, and only a few groups are in memory. A group that was read stays, as far as the tier's read
cache has space, for the copy to faster tiers: nothing is fetched twice.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from ragkv.errors import EntryUnreachableError, RemoteError, StoreError

from ..record import Bytes, bytes_of
from ..tiers.reading import StoredLease
from .reader import RemoteReader
from .values import RemoteHead

AHEAD = 2  # So many layer groups are fetched beyond the one that is read.


class RemoteLease(StoredLease):
    """An entry on a remote. Its methods may be called from many threads at once."""

    def __init__(self, head: RemoteHead, reader: RemoteReader, on_close: Callable[["RemoteLease"], None]) -> None:
        super().__init__(head.info, head.record.sensitivity, head.record.codec, head.record.layer_bytes)
        self.kind = reader.connector.kind
        self._head, self._reader, self._on_close = head, reader, on_close
        self._payloads: dict[int, Future[Bytes]] = {}  # by layer group
        self._cached: dict[int, int] = {}  # by layer group that stays: bytes reserved in the read cache
        self._lock = threading.Lock()
        self._closed = False

    def prefetch(self) -> None:
        self._fetch(range(AHEAD))

    def fetch_all(self) -> None:
        """Fetch and cache all that is missing, because the entry is about to be deleted. Raises nothing."""
        try:
            self._fetch(range(self._head.layer_groups))
            with self._lock:
                payloads = dict(self._payloads)
            for layer_group, future in payloads.items():
                self._cache(layer_group, len(self._reader.wait(future)), always=True)
        except StoreError:
            return  # it was closed meanwhile, or the reader of that layer gets the error

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            payloads, self._payloads = self._payloads, {}
            cached, self._cached = self._cached, {}
        for future in payloads.values():
            future.cancel()
        self._reader.release_read_cache(sum(cached.values()))
        self._on_close(self)

    def __del__(self) -> None:  # a lease that was never closed must not keep its pin for ever
        self.close()

    def _read(self, first: int, into: Sequence[torch.Tensor]) -> None:
        for layer, stored in enumerate(into, first):
            self._read_one(layer, stored)

    def _read_one(self, layer: int, stored: torch.Tensor) -> None:
        layer_group, size = layer // self._head.record.layers_per_value, self._layer_bytes
        future = self._fetch(range(layer_group, layer_group + 1 + AHEAD))
        try:
            payload = self._reader.wait(future)
        except RemoteError as error:
            raise EntryUnreachableError(self.info.key, f"layer {layer} did not arrive ({error})") from error
        layers = self._head.layers_of(layer_group)
        found = np.frombuffer(payload, np.uint8, size, (layer - layers.start) * size)
        np.copyto(np.frombuffer(bytes_of(stored), np.uint8), found)  # releases the GIL
        self._reader.count_read(size)
        if layer == layers[-1] and not self._cache(layer_group, len(payload)):
            with self._lock:
                self._payloads.pop(layer_group, None)

    def _fetch(self, layer_groups: range) -> Future[Bytes]:
        """Request those of `layer_groups` that exist and are not here; the payload of the first."""
        with self._lock:
            if self._closed:
                raise StoreError(f"The lease of entry {self.info.key} is closed; read before closing it.")
            for layer_group in layer_groups:
                if layer_group not in self._payloads and layer_group < self._head.layer_groups:
                    self._payloads[layer_group] = self._reader.fetch(self._head, layer_group)
            return self._payloads[layer_groups.start]

    def _cache(self, layer_group: int, size: int, always: bool = False) -> bool:
        """Let a payload stay until the lease is closed, if the read cache has space for it or `always`."""
        with self._lock:
            if layer_group in self._cached:
                return True
            reserved = not self._closed and self._reader.reserve_read_cache(size)
            if self._closed or not (reserved or always):
                return False
            self._cached[layer_group] = size if reserved else 0
            return True
