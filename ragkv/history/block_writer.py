"""Saving history while the model goes on (CachedAttention section 3.2.2): a thread, and a bounded buffer before it.

A request hands over views of what it recorded, which costs nothing; the copy, the store's policies and the store come
here. What does not fit into the buffer is not saved: it is counted, never waited for, and computed again by the turn
that misses it. A block is found as soon as it is handed over, whatever the disk does.
"""

import logging
from collections.abc import Callable

import torch

from ragkv.errors import StoreError, StoreReadOnlyError
from ragkv.fusion import ResidentLease
from ragkv.store import Background, Entry, EntryInfo, Identity, Job, Lease, Store, Turn

from .history import Block

log = logging.getLogger(__name__)


class BlockWriter:
    """Stores blocks behind the requests that made them. All methods are thread-safe."""

    def __init__(self, store: Store, base: Identity, capacity_bytes: int) -> None:
        """`base` is the engine's identity, whatever its context."""
        self._store, self._base = store, base
        self._worker: Background[Entry] = Background(capacity_bytes, "ragkv-saver")
        self._dropped = 0

    @property
    def dropped_blocks(self) -> int:
        """Blocks never saved because the buffer was full."""
        return self._dropped

    @property
    def waiting_bytes(self) -> int:
        """KV held until it is stored."""
        return self._worker.pending_bytes

    def key(self, block: Block) -> str:
        """The key of a block's entry."""
        return block.key(self._base)

    def lease(self, block: Block) -> Lease | None:
        """A block's entry, held for reading: from the buffer or from the store; or `None`."""
        identity = block.identity(self._base)
        entry = self._worker.entry(identity.key(block.token_ids))  # first: once it leaves the buffer, the store has it
        if entry is not None and entry.info.matches(identity, block.token_ids):
            return ResidentLease(entry)
        return self._store.lease(identity, block.token_ids)

    def save(self, block: Block, kv: torch.Tensor, group: str) -> bool:
        """Store `kv` (L, 2, G, T, D), which nobody writes to from now on; `False`, at once, if the buffer is full."""
        layers, _, kv_heads, _, head_dim = kv.shape
        identity = block.identity(self._base)
        key = identity.key(block.token_ids)
        shape = (layers, kv_heads, head_dim)
        info = EntryInfo(key, identity, block.token_ids, block.frequencies, *shape, group, block.index)
        entry = Entry(info, kv)
        if self._worker.submit(Job(lambda: self._store.put(entry), key, info.size_bytes, entry)):
            return True
        self._dropped += 1
        return False

    def served(self, turn: Turn) -> None:
        """Tell the store's policies of a turn, before the blocks saved from now on."""
        self._worker.submit(Job(lambda: self._store.served(turn)))

    def then(self, action: Callable[[], object]) -> None:
        """Run `action` when everything handed over so far is stored; not at all once closed."""
        self._worker.submit(Job(action))

    def delete(self, key: str) -> None:
        """Drop a block from the buffer and from every tier; gone when this returns."""
        self._worker.discard(key)
        try:
            self._store.delete_key(key)
        except StoreReadOnlyError:
            pass  # it never reached the disk; memory has let it go
        except StoreError as error:
            log.warning("A block of a conversation could not be deleted: %s", error)

    def stored(self, key: str) -> bool:
        """Whether a block is in the buffer or in the store. Not a use."""
        return self._worker.entry(key) is not None or self._store.contains(key)

    def flush(self) -> None:
        """Return when everything handed over so far is in the store."""
        self._worker.flush()

    def close(self) -> None:
        """Store what waits and stop. Twice is harmless."""
        self._worker.close()


__all__ = ["BlockWriter"]
