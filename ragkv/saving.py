"""Saving history while the model goes on (CachedAttention section 3.2.2): a thread, and a bounded buffer before it.

A request hands over views of what it recorded, which costs nothing; the copy, the store's policies and the store come
here. What does not fit into the buffer is not saved: it is counted, never waited for, and computed again by the turn
that misses it. A block is found as soon as it is handed over, whatever the disk does.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .errors import StoreError, StoreReadOnlyError
from .fusion import ResidentLease
from .history import Block
from .store import Entry, EntryInfo, Identity, Lease, Store, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], object]
    key: str = ""
    entry: Entry | None = None  # a block to be stored; None for other work

    @property
    def size_bytes(self) -> int:
        return 0 if self.entry is None else self.entry.info.size_bytes


class Worker:
    """A thread that does one thing after the other; it starts with the first, as many engines have no sessions."""

    def __init__(self, name: str, capacity_bytes: int = 0) -> None:
        self._name, self._capacity_bytes = name, capacity_bytes
        self._jobs: deque[_Job] = deque()
        self._running: _Job | None = None
        self._waiting_bytes = 0  # of waiting jobs and the running one
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def waiting_bytes(self) -> int:
        """KV held by what is not done yet."""
        with self._changed:
            return self._waiting_bytes

    def submit(self, run: Callable[[], object], key: str = "", entry: Entry | None = None) -> bool:
        """Do this when all before is done; `False`, at once, if the entry's bytes do not fit or it is closed."""
        job = _Job(run, key, entry)
        with self._changed:
            if self._closing or (entry is not None and self._waiting_bytes + job.size_bytes > self._capacity_bytes):
                return False
            self._waiting_bytes += job.size_bytes
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def entry(self, key: str) -> Entry | None:
        """The entry of `key` that is not stored yet."""
        with self._changed:
            running = () if self._running is None else (self._running,)
            return next((job.entry for job in (*self._jobs, *running) if job.key == key), None)

    def discard(self, key: str) -> None:
        """Drop what waits for `key`, and wait until what runs for it is done; not from the thread itself."""
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            gone = [job for job in self._jobs if job.key == key]
            self._jobs = deque(job for job in self._jobs if job.key != key)
            self._waiting_bytes -= sum(job.size_bytes for job in gone)
            self._changed.wait_for(lambda: self._running is None or self._running.key != key)

    def flush(self) -> None:
        """Return when everything handed over so far is done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and self._running is None)

    def close(self) -> None:
        """Finish what waits and stop. Twice is harmless."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.run()
            except Exception:  # a store failure never fails a request; the next job must run
                log.exception("Something of a conversation could not be saved; it is computed when it is missed.")
            with self._changed:
                self._running = None
                self._waiting_bytes -= job.size_bytes
                self._changed.notify_all()
            del job  # or it would hold its KV until the next one comes

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            if not self._jobs:
                return None
            self._running = self._jobs.popleft()
            return self._running


class Saver:
    """Stores blocks behind the requests that made them. All methods are thread-safe."""

    def __init__(self, store: Store, base: Identity, capacity_bytes: int) -> None:
        """`base` is the engine's identity, whatever its context."""
        self._store, self._base = store, base
        self._worker = Worker("ragkv-saver", capacity_bytes)
        self._dropped = 0

    @property
    def dropped_blocks(self) -> int:
        """Blocks never saved because the buffer was full."""
        return self._dropped

    @property
    def waiting_bytes(self) -> int:
        """KV held until it is stored."""
        return self._worker.waiting_bytes

    def key(self, block: Block) -> str:
        """The key of a block's entry."""
        return block.key(self._base)

    def lease(self, block: Block) -> Lease | None:
        """A block's entry, held for reading: from the buffer or from the store; or `None`."""
        identity = block.identity(self._base)
        entry = self._worker.entry(identity.key(block.token_ids))  # first: once it leaves the buffer, the store has it
        if entry is not None and entry.info.proves(identity, block.token_ids):
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
        if self._worker.submit(lambda: self._store.put(entry), key, entry):
            return True
        self._dropped += 1
        return False

    def served(self, turn: Turn) -> None:
        """Tell the store's policies of a turn, before the blocks saved from now on."""
        self._worker.submit(lambda: self._store.served(turn))

    def then(self, action: Callable[[], object]) -> None:
        """Run `action` when everything handed over so far is stored; not at all once closed."""
        self._worker.submit(action)

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


__all__ = ["Saver", "Worker"]
