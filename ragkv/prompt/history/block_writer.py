"""Saves history while the model continues (CachedAttention section 3.2.2): one thread and a bounded
buffer.

A request hands over views of the KV it recorded, which costs nothing. The thread copies them,
informs the store's policies and stores them. A turn keeps the blocks that do not fit into the
buffer until they do, and waits for that at its end; the thread itself waits for the store's write
buffers. So a slow disk delays the end of a turn, not a token, and nothing is lost before
`SAVE_WAIT_S`. A block can be found as soon as it is in the buffer.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ragkv.config import MIB, EngineConfig
from ragkv.errors import StoreError, StoreReadOnlyError
from ragkv.model import Adapter
from ragkv.store import (
    Background,
    Entry,
    EntryInfo,
    EntryKey,
    Identity,
    Job,
    Lease,
    MemoryLease,
    Store,
    TierKind,
    TurnSize,
)

from .history import Block

if TYPE_CHECKING:
    from ragkv.control.profile import Profile

log = logging.getLogger(__name__)

# How long a turn's end, and a store's full write buffer, are waited for at most.
SAVE_WAIT_S = 30.0
# The size of the buffer where memory has no tier.
LEAST_BUFFER_BYTES = 256 * MIB


def default_buffer_bytes(adapter: Adapter, memory_bytes: int) -> int:
    """The size of the buffer: the KV of a whole context window, if that is no more than the memory
    tier may take.
    """
    most = max(memory_bytes, LEAST_BUFFER_BYTES)
    window = adapter.context_length
    return most if window is None else min(window * adapter.kv_bytes_per_token, most)


class BlockWriter:
    """Stores blocks in the background. All methods are thread-safe."""

    def __init__(
        self, store: Store, base: Identity, capacity_bytes: int, *, owns_store: bool = False
    ) -> None:
        """`base` is the engine's identity; its context does not count. A store that is its own is
        closed with it.
        """
        self.base = base
        self.store = store
        self._owns_store = owns_store
        self._worker: Background[Entry] = Background(capacity_bytes, "ragkv-saver")

    @classmethod
    def open(
        cls, config: EngineConfig, store: Store, base: Identity, adapter: Adapter
    ) -> "BlockWriter":
        """What stores conversations: next to the chunks in `store`, or on disk in a directory of
        their own.
        """
        session = config.session
        settings = config.store
        buffer_bytes = session.save_buffer_bytes
        if buffer_bytes is None:
            buffer_bytes = default_buffer_bytes(adapter, settings.memory_bytes)
        if session.directory is None:
            return cls(store, base, buffer_bytes)
        own = replace(settings, directory=session.directory, read_only=False)
        on_disk = Store.open(own, TierKind.DISK, block_tokens=session.block_tokens)
        return cls(on_disk, base, buffer_bytes, owns_store=True)

    def aim(self, ttft_target_ms: float | None, block_tokens: int, profile: "Profile") -> None:
        """Give the policies the blocks that a turn may compute within its target, if any (T-LRU
        paper, xi).
        """
        if ttft_target_ms is None:
            return
        tokens = profile.tokens_within(ttft_target_ms / 1e3)
        log.info("store.ttft_target_ms = %g: xi is %d tokens.", ttft_target_ms, tokens)
        if tokens < block_tokens:
            what = "Within %g ms no block of %d tokens is computed: policies work as LRU."
            log.warning(what, ttft_target_ms, block_tokens)
        self.store.retarget(tokens // block_tokens)

    def key(self, block: Block) -> EntryKey:
        """The key of a block's entry."""
        return block.key(self.base)

    def lease(self, block: Block) -> Lease | None:
        """A block's entry, held for reading, from the buffer or from the store; `None` if it is in
        neither.
        """
        identity = block.identity(self.base)
        # The buffer is searched first: an entry that leaves it in between is in the store by then.
        entry = self._worker.entry(identity.key(block.token_ids))
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
            key, identity, block.token_ids, block.frequencies, *shape, group, block.index
        )
        entry = Entry(info, kv)
        put = Job(lambda: self.store.put(entry, SAVE_WAIT_S), key, info.size_bytes, entry)
        return self._worker.submit(put, wait_s)

    def served(self, turn: TurnSize) -> None:
        """Tell the store's policies of a turn, before they see the blocks that are saved from now
        on.
        """
        self._worker.submit(Job(lambda: self.store.served(turn)))

    def then(self, action: Callable[[], object]) -> bool:
        """Run `action` once everything saved so far is stored; `False` after `close`: then it is
        not run.
        """
        return self._worker.submit(Job(action))

    def delete(self, key: EntryKey) -> None:
        """Delete a block from the buffer and from every tier before this returns."""
        self._worker.discard(key)
        try:
            self.store.delete(key)
        except StoreReadOnlyError:
            pass  # a read-only store has the block in memory alone, and memory has deleted it
        except StoreError as error:
            log.warning("A block of a conversation could not be deleted: %s", error)

    def on_this_machine(self) -> set[EntryKey]:
        """The keys of all blocks that are stored here, also those of other models. Reads
        no file.
        """
        return set(self.store.block_keys())

    def own(self) -> set[EntryKey]:
        """The keys of the entries on this machine that are this model's and application's."""
        own = replace(self.base, context="")
        return {
            info.key for info in self.store.sample() if replace(info.identity, context="") == own
        }

    def stored(self, key: EntryKey) -> bool:
        """Whether a block is in the buffer or in the store. Policies do not count this as a use."""
        return self._worker.entry(key) is not None or self.store.contains(key)

    def flush(self) -> None:
        """Return when everything saved so far is in the store."""
        self._worker.flush()
        if self._owns_store:
            self.store.flush()

    def close(self) -> None:
        """Store what waits and stop. Twice is harmless."""
        self._worker.close()
        if self._owns_store:
            self.store.close()
