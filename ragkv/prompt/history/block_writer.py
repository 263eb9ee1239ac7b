"""Saves history while the model continues (CachedAttention section 3.2.2): one thread and a bounded buffer.

A request hands over views of the KV it recorded, which costs nothing. The thread copies them, informs the store's
policies and stores them. A block that does not fit into the buffer is not saved: no request waits for it, and the
next turn that misses it computes it again. A block can be found as soon as it is in the buffer.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from ragkv.errors import StoreError, StoreReadOnlyError
from ragkv.fusion import ResidentLease
from ragkv.store import Background, Entry, EntryInfo, EntryKey, Identity, Job, Lease, Store, TurnSize

from .history import Block

log = logging.getLogger(__name__)


class BlockWriter:
    """Stores blocks in the background. All methods are thread-safe."""

    def __init__(self, store: Store, base: Identity, capacity_bytes: int) -> None:
        """`base` is the engine's identity; its context does not count."""
        self.base, self._store = base, store
        self._worker: Background[Entry] = Background(capacity_bytes, "ragkv-saver")

    def key(self, block: Block) -> EntryKey:
        """The key of a block's entry."""
        return block.key(self.base)

    def lease(self, block: Block) -> Lease | None:
        """A block's entry, held for reading, from the buffer or from the store; `None` if it is in neither."""
        identity = block.identity(self.base)
        # The buffer is searched first: an entry that leaves it in between is in the store by then.
        entry = self._worker.entry(identity.key(block.token_ids))
        if entry is not None and entry.info.matches(identity, block.token_ids):
            return ResidentLease(entry)
        return self._store.lease(identity, block.token_ids)

    def scores(self, block: Block, scorer: str) -> torch.Tensor | None:
        """The scores (T, 1 + C) float16 that `scorer` made for a block's tokens, from the buffer or from the store."""
        identity = replace(block.identity(self.base), scorer=scorer)
        entry = self._worker.entry(identity.key(block.token_ids))
        if entry is not None and entry.info.matches(identity, block.token_ids):
            return entry.sensitivity
        return self._store.scores(identity, block.token_ids)

    def save(
        self, block: Block, kv: torch.Tensor, group: str, scores: torch.Tensor | None = None, scorer: str = ""
    ) -> bool:
        """Store `kv` (L, 2, G, T, D), and next to it the `scores` (T, 1 + C) of `scorer`; nothing may change them.

        `False`, at once, if the buffer is full: then neither is stored.
        """
        layers, _, kv_heads, _, head_dim = kv.shape
        identity = block.identity(self.base)
        key = identity.key(block.token_ids)
        shape = (layers, kv_heads, head_dim)
        info = EntryInfo(key, identity, block.token_ids, block.frequencies, *shape, group, block.index)
        entry = Entry(info, kv)
        if not self._worker.submit(Job(lambda: self._store.put(entry), key, info.size_bytes, entry)):
            return False
        if scores is not None:  # without them the block is history that is kept as it is
            scored = Entry.of_scores(info, scorer, scores)
            put = Job(lambda: self._store.put_scores(scored), scored.info.key, scored.size_bytes, scored)
            self._worker.submit(put)
        return True

    def served(self, turn: TurnSize) -> None:
        """Tell the store's policies of a turn, before they see the blocks that are saved from now on."""
        self._worker.submit(Job(lambda: self._store.served(turn)))

    def then(self, action: Callable[[], object]) -> bool:
        """Run `action` once everything saved so far is stored; `False` after `close`: then it is not run."""
        return self._worker.submit(Job(action))

    def delete(self, key: EntryKey) -> None:
        """Delete a block from the buffer and from every tier before this returns."""
        for one in key.with_scores:
            self._worker.discard(one)
        try:
            self._store.delete(key)
        except StoreReadOnlyError:
            pass  # a read-only store has the block in memory alone, and memory has deleted it
        except StoreError as error:
            log.warning("A block of a conversation could not be deleted: %s", error)

    def on_this_machine(self) -> set[EntryKey]:
        """The keys of all blocks that are stored here, also those of other models. Reads no file."""
        return set(self._store.block_keys())

    def own(self) -> set[EntryKey]:
        """The keys of the entries on this machine that are this model's and application's."""
        own = replace(self.base, context="")
        return {info.key for info in self._store.sample() if replace(info.identity, context="") == own}

    def stored(self, key: EntryKey) -> bool:
        """Whether a block is in the buffer or in the store. Policies do not count this as a use."""
        return self._worker.entry(key) is not None or self._store.contains(key)

    def flush(self) -> None:
        """Return when everything saved so far is in the store."""
        self._worker.flush()

    def close(self) -> None:
        """Store what waits and stop. Twice is harmless."""
        self._worker.close()
