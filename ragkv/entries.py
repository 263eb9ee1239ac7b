"""The stored entries of one engine (`engine.entries`): encode them now or later, delete them,
remove unused ones.

`encode` encodes on the caller's thread, several chunks at a time. `prompt/lookup.py` looks up what
a question needs.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace

from .errors import InputError, QueueError
from .prompt import ChunkLike, Intake, PrefixBlocks, chunks_among
from .prompt.prompt import check_length
from .runtime import Check, Rate, no_check, openmp, stop_of
from .scheduling.encoding import LOG_EVERY_S, BackgroundEncoder, Encoder
from .store.contents import deleted_everywhere
from .store.entry import EntryKey, Identity
from .store.store import Store
from .types import Chunk

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncodeReport:
    """What `Entries.encode` did. A chunk that was deleted meanwhile counts nowhere."""

    encoded: int  # chunks computed and stored now
    present: int  # chunks that were stored already
    failed: int  # chunks that could not be stored: see the log
    # chunks not reached: the time, the store's room or a cancellation ended the work, or it goes on
    left: int = 0
    bytes_per_token: int = 0  # of stored KV


@dataclass(eq=False)
class DeletionWatch:
    """Which entries were deleted since it was opened: they are not stored any more."""

    _deleted: set[EntryKey] = field(default_factory=set, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def note(self, keys: Sequence[EntryKey]) -> None:
        """These are being deleted. Waits for one that is being stored; it is deleted after that."""
        with self._lock:
            self._deleted.update(keys)

    @contextmanager
    def storing(self, key: EntryKey) -> Iterator[bool]:
        """The block stores the entry, unless this is `False`: it was deleted."""
        with self._lock:
            yield key not in self._deleted


@dataclass(frozen=True)
class Entries:
    """The entries of one engine's chunks, in every tier. All methods are thread-safe."""

    encoder: Encoder  # computes them
    store: Store
    background: BackgroundEncoder
    intake: Intake
    prefix_blocks: PrefixBlocks
    # entered while the entries of these keys are deleted: other replicas are told of it
    announcing: Callable[[Sequence[EntryKey]], AbstractContextManager[None]]
    # why entries of an earlier run are not reused; None: they are, or there are none
    why_not_reused: str | None = None
    _watches: set[DeletionWatch] = field(default_factory=set, init=False, compare=False)
    # guards `_watches`
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, compare=False)

    @property
    def identity(self) -> Identity:
        """Of the engine's chunks that are fused; `identity.key(token_ids)` is the key of one."""
        return self.encoder.identity

    def keys(self, chunks: Sequence[ChunkLike]) -> list[EntryKey]:
        """The keys of the entries of `chunks`, whether they are stored or not."""
        return [self.identity.key(chunk.token_ids) for chunk in self._chunks(chunks)]

    def has(self, token_ids: Sequence[int]) -> bool:
        """Whether an entry of this chunk is stored."""
        return self.store.contains(self.identity.key(token_ids))

    def encode(
        self,
        chunks: Sequence[ChunkLike],
        on_progress: Callable[[int, int], None] | None = None,
        check: Check = no_check,
        evict: bool = True,
        watch: DeletionWatch | None = None,
    ) -> EncodeReport:
        """Compute and store the entries of `chunks` that are not stored; returns when they are
        durable.

        `on_progress(done, total)` is called after each chunk. `check` is called before each chunk
        and between the layers of a batch. A `QueueError` that it raises ends the work: the entries
        made so far are durable, and the report counts the chunks that are left. Without `evict`,
        chunks for which the store has no room are left, too. What is deleted after `watch` was
        opened, or after the call, is not stored.
        """
        ids = dict.fromkeys(chunk.token_ids for chunk in self._encodable(chunks))
        with nullcontext(watch) if watch else self.watching() as deleted:
            return self._encode(list(ids), on_progress, check, evict, deleted)

    @contextmanager
    def watching(self) -> Iterator[DeletionWatch]:
        """Watch deletions during the block, which reads texts and then encodes them: what is
        deleted in between is not stored.
        """
        watch = DeletionWatch()
        with self._lock:
            self._watches.add(watch)
        try:
            yield watch
        finally:
            with self._lock:
                self._watches.discard(watch)

    def _encode(
        self,
        chunks: Sequence[tuple[int, ...]],
        on_progress: Callable[[int, int], None] | None,
        check: Check,
        evict: bool,
        watch: DeletionWatch,
    ) -> EncodeReport:
        """`encode` of chunks that are given by their token ids, each once."""
        done = _Progress(len(chunks), on_progress)
        batch = list[tuple[int, ...]]()
        with suppress(QueueError):
            for token_ids in chunks:
                check()
                if batch and sum(map(len, batch)) + len(token_ids) > self.encoder.batch_tokens:
                    self._encode_batch(batch, done, stop_of(check), watch)
                with watch.storing(self.identity.key(token_ids)) as wanted:
                    is_stored = wanted and self.store.durable.ensure(self.identity, token_ids)
                if not wanted:
                    done.skip()
                    continue
                needed = self.encoder.entry_bytes(sum(map(len, batch)) + len(token_ids))
                if is_stored:
                    done.count(Counter(present=1))
                elif evict or self.store.durable.room_bytes() >= needed:
                    batch.append(token_ids)
                else:  # a look-up of each of the others could ask a server
                    break
            if batch:
                check()
                self._encode_batch(batch, done, stop_of(check), watch)
        openmp.release_threads()  # encoding entries in the store's codec may have started some
        self.store.flush()  # entries that were present may still wait to be written
        counts = done.counts
        counted = (counts["encoded"], counts["present"], counts["failed"], done.left)
        return EncodeReport(*counted, self.encoder.bytes_per_token)

    def _encode_batch(
        self,
        batch: list[tuple[int, ...]],
        done: "_Progress",
        stop: Check,
        watch: DeletionWatch,
    ) -> None:
        """Compute the entries of the batch, and store them durably, but for chunks that were
        deleted since. Empties the batch.
        """
        with self.background.idle_time.encoding():
            entries = self.encoder.chunks(batch, stop)
        counts = Counter[str]()
        for entry in entries:
            with watch.storing(entry.info.key) as wanted:
                is_stored = wanted and self.store.durable.put(entry)
            if wanted:
                counts["encoded" if is_stored else "failed"] += 1
            else:
                done.skip()
        done.count(counts)
        batch.clear()

    def encode_soon(self, chunks: Sequence[ChunkLike], *, last: bool = False) -> None:
        """Compute and store the entries of `chunks` that are not stored, in the background, between
        requests.

        With `last` they come after all that requests miss, and only while the store has room.
        """
        for chunk in self._encodable(chunks):
            self.background.add(chunk.token_ids, last=last)

    def lacking(self, chunks: Sequence[ChunkLike]) -> tuple[list[Chunk], int]:
        """The chunks among `chunks` that `encode` would compute, each once, and about how many
        bytes their KV will take.
        """
        found = {
            chunk.token_ids: chunk
            for chunk in self._encodable(chunks)
            if not self.store.durable.has(self.identity.key(chunk.token_ids))
        }
        return list(found.values()), sum(map(self.encoder.entry_bytes, map(len, found)))

    def delete(self, chunks: Sequence[ChunkLike]) -> int:
        """Delete the entries of `chunks` from every tier. Returns how many of them were stored
        anywhere.
        """
        keys = self.keys(chunks)
        self._cancel(keys)
        with self.announcing(keys):
            return deleted_everywhere(keys, self.store.delete)

    def delete_untold(
        self, keys: Sequence[EntryKey], stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Delete entries that another engine was asked to delete; `False` if `stop` ended this.

        While a remote tier does not answer they are deleted from the tiers of this machine alone.
        No one is told.
        """
        self._cancel(keys)
        for key in keys:
            if stop():
                return False
            self.store.delete(key, here=bool(self.store.away()))
        return True

    def retain(self, chunks: Sequence[ChunkLike]) -> int:
        """Delete this model's and application's entries of all other chunks. Returns how many were
        deleted.
        """
        self.background.flush()
        self.store.flush()
        retained = set(self.keys(chunks))
        own = (info.key for info in self.store.contents.infos() if info.identity == self.identity)
        others = [key for key in own if key not in retained]
        with self.announcing(others):
            return deleted_everywhere(others, self.store.delete)

    def gc(self) -> int:
        """Delete the entries of other models, dtypes, LoRAs and tokenizers, of any tenant.

        Returns the bytes freed.
        """
        return self.store.contents.gc(self._is_own)

    def _cancel(self, keys: Sequence[EntryKey]) -> None:
        """Nothing that is under way stores these entries any more."""
        self.background.cancel(keys)
        with self._lock:
            watches = tuple(self._watches)
        for watch in watches:
            watch.note(keys)
        self.prefix_blocks.forget()  # they do not know which chunks are in them

    def _chunks(self, chunks: Sequence[ChunkLike]) -> tuple[Chunk, ...]:
        """Chunks that are checked. Raises `InputError`, also for a `Text`."""
        pieces = self.intake.pieces(chunks)
        if len(found := chunks_among(pieces)) < len(pieces):
            raise InputError("A Text has no stored KV: give chunks, texts or token ids.")
        return found

    def _encodable(self, chunks: Sequence[ChunkLike]) -> tuple[Chunk, ...]:
        """Chunks that are checked. Raises `PromptTooLongError` for one that does not fit the
        context behind the prefix.
        """
        checked = self._chunks(chunks)
        prefix = len(self.intake.runs.before_documents)
        for chunk in checked:
            check_length(prefix + len(chunk), 0, self.intake.context_length)
        return checked

    def _is_own(self, identity: Identity) -> bool:
        """Whether entries of `identity` are of this model, dtype, LoRA and tokenizer, and of a
        kind in use.
        """
        own = self.identity
        theirs = replace(identity, seen_digest=own.seen_digest, tenant=own.tenant)
        is_chunk = theirs == own
        # blocks of conversations are encoded behind no neutral text; chunks were, once
        is_alone = theirs == replace(own, neutral="", codec=identity.codec)
        return is_chunk or (is_alone and identity.seen_digest != own.seen_digest)


class _Progress:
    """Counts of one call of `encode`."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._on_progress = on_progress
        self.counts = Counter[str]()
        self.left = total
        self._rate = Rate()
        self._logged_s = time.monotonic()
        self._rate.update(0, total)

    def skip(self) -> None:
        """A chunk was deleted: it is not to be stored any more."""
        self._total -= 1
        self.left -= 1

    def count(self, more: Counter[str]) -> None:
        """Report more chunks that are stored or failed, to the caller and sometimes to the log."""
        self.counts += more
        self.left -= more.total()
        done = self._total - self.left
        total = self._total
        self._rate.update(done, total)
        if self._on_progress:
            self._on_progress(done, total)
        if (now := time.monotonic()) - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now
            log.info(
                "Computing KV: %d of %d chunks, %.1f/s%s.",
                done,
                total,
                self._rate.per_s,
                self._rate.left,
            )
