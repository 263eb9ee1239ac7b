"""An entry the engine itself holds, read like any other: the application's prefix."""

import torch

from ragkv.store import Entry, Lease, TierKind


class ResidentLease(Lease):
    """A lease on an entry that is not evicted."""

    kind = TierKind.MEMORY
    in_place = True

    def __init__(self, entry: Entry) -> None:
        self.info = entry.info
        self.sensitivity = entry.sensitivity
        self._kv = entry.kv

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._kv[layer]

    def close(self) -> None:
        """Nothing is pinned."""
