"""Saves history while the model continues (CachedAttention section 3.2.2), by one thread with a
bounded buffer.

A request hands over views of the KV it recorded, which costs nothing. The thread copies them,
informs the store's policies and stores them. If the buffer is full, a turn keeps its blocks until
there is room. At its end it waits for that. The thread waits for the store's write buffers. So a
slow disk delays the end of a turn, not a token. Nothing is lost before `SAVE_WAIT_S`. A block can
be found as soon as it is in the buffer.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ragkv.errors import StoreError, StoreReadOnlyError
from ragkv.store.entry import Entry, EntryInfo, EntryKey, Identity
from ragkv.store.job_queue import Job, JobQueue
from ragkv.store.policies import TurnSize
from ragkv.store.store import Store
from ragkv.store.tiers import Lease, MemoryLease

from .history import Block

log = logging.getLogger(__name__)

# How long a turn's end, and a store's full write buffer, are waited for at most.
SAVE_WAIT_S = 30.0


@dataclass(eq=False)
class BlockWriter:
    """Stores blocks in the background."""

    store: Store
    base: Identity  # the engine's; its `seen_digest` does not count
    worker: JobQueue[Entry]  # its capacity is that of the buffer
    owns_store: bool = False  # it is closed with this

    def key(self, block: Block) -> EntryKey:
        """The key of a block's entry."""
        return block.key(self.base)

    def lease(self, block: Block) -> Lease | None:
        """A block's entry, held for reading, from the buffer or from the store; `None` if it is in
        neither.
        """
        identity = block.identity(self.base)
        # The buffer is searched first: an entry that leaves it in between is in the store by then.
        entry = self.worker.entry(identity.key(block.token_ids))
        if entry is not None and entry.info.matches(identity, block.token_ids):
            return MemoryLease(entry)
        return self.store.lease(identity, block.token_ids)

    def save(self, block: Block, kv: torch.Tensor, group: str, wait_s: float) -> bool:
        """Store `kv` (L, 2, G, T, D), which nothing may change.

        `False` if the buffer is full, and stays so for `wait_s`: then it is not stored.
        """
        layers, _, kv_heads, _, head_dim = kv.shape
        identity = block.identity(self.base)
        key = identity.key(block.token_ids)
        shape = (layers, kv_heads, head_dim)
        info = EntryInfo(
            key, identity, block.token_ids, block.rope_digest, *shape, group, block.index
        )
        entry = Entry(info, kv)
        put = Job(lambda: self.store.put(entry, SAVE_WAIT_S), key, info.size_bytes, entry)
        return self.worker.submit(put, wait_s)

    def turn_prefilled(self, turn: TurnSize) -> None:
        """Tell the store's policies of a turn whose prompt is computed, before they see the blocks
        that are saved from now on.
        """
        self.worker.submit(Job(lambda: self.store.turn_prefilled(turn)))

    def then(self, action: Callable[[], object]) -> bool:
        """Run `action` once everything saved so far is stored. `False` if it will not run: after
        `close`, or because the system has no thread to give.
        """
        return self.worker.submit(Job(action))

    def delete(self, key: EntryKey) -> bool:
        """Delete a block from the buffer and from every tier before this returns; `False` if a tier
        failed, which is logged.
        """
        self.worker.cancel(key)
        try:
            self.store.delete(key)
        except StoreReadOnlyError:
            pass  # a read-only store has the block in memory alone, and memory has deleted it
        except StoreError as error:
            log.warning("A block of a conversation is deleted later: %s", error)
            return False
        return True

    def on_this_machine(self) -> set[EntryKey]:
        """The keys of all blocks that are stored here, also those of other models. Reads
        no file.
        """
        return set(self.store.contents.block_keys())

    def own(self) -> set[EntryKey]:
        """The keys of the entries on this machine that are this model's and application's."""
        own = replace(self.base, seen_digest="")
        return {
            info.key
            for info in self.store.contents.sample()
            if replace(info.identity, seen_digest="") == own
        }

    def stored(self, key: EntryKey) -> bool:
        """Whether a block is in the buffer or stored on this machine. Policies do not count this as
        a use.
        """
        return self.worker.entry(key) is not None or self.store.contains(key, here=True)

    @property
    def is_closed(self) -> bool:
        """Whether nothing is saved any more."""
        return self.worker.is_closed

    def flush(self) -> None:
        """Return when everything saved so far is in the store."""
        self.worker.flush()
        if self.owns_store:
            self.store.flush()

    def close(self) -> None:
        """Store what waits and stop."""
        self.worker.close()
        if self.owns_store:
            self.store.close()
