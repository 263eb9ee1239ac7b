"""A tenant's collections: named sets of documents, each with an index, all on the tenant's one
engine.

The KV of a text belongs to the tenant: collections that hold the same text share its entry, which
is deleted when the last of them deletes the text. Collections of all tenants share one pool of open
ones (`collection_pool`), because an open collection holds file descriptors and memory. Listing
opens none (`collection_folders.py`).
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path

from ragkv.chat import ChatEngine
from ragkv.config import MIB
from ragkv.engine import Engine
from ragkv.entries import EncodeReport
from ragkv.errors import DeadlineError, QueueError, StoreError
from ragkv.rag import Corpus, Rag
from ragkv.retrieval import IngestReport, Passage
from ragkv.runtime import (
    Check,
    Closing,
    OpenPool,
    PausingCheck,
    acquired,
    begun,
    no_check,
    stop_of,
)
from ragkv.store.entry import EntryKey

from ..errors import not_found
from ..full_disk import Reserve, making_room
from .collection_folders import CollectionFolders, CollectionKey
from .deletions import DeletionJournal
from .known_passages import KnownPassages
from .upload_parsing import Parsed

log = logging.getLogger(__name__)

# How long an upload waits for the KV of its documents. The rest is computed later.
AT_ONCE_S = 5.0
# After a start the KV of at most `RESUMED` passages is made without a question: they wait in
# memory.
RESUMED = 4096
LATER = "the KV that an interrupted ingestion left out is computed when questions need it"
# The most bytes of vectors in memory, of the open collections of all tenants together. A single
# collection may have more.
OPEN_BYTES = 512 * MIB

CollectionPool = OpenPool[CollectionKey, Rag]


def collection_pool(limit: int) -> CollectionPool:
    """The open collections of all tenants: `limit`, with `OPEN_BYTES` of vectors, and those in use.
    A tenant that opens many closes its own.
    """
    return OpenPool(
        limit,
        Rag.close,
        group=lambda key: key.path.parent,
        most_bytes=OPEN_BYTES,
        bytes_of=lambda rag: rag.index.texts.held_bytes,
    )


class Collections(Closing):
    """The collections of one tenant."""

    def __init__(
        self,
        directory: Path,
        open_corpus: Callable[[Path], Corpus],
        engine: Engine,
        pool: CollectionPool,
        reserve: Reserve,
        chat: ChatEngine,
        known_chars: int,
    ) -> None:
        """`directory` is the tenant's; `open_corpus` opens the corpus in a folder, on the tenant's
        `engine`; `reserve` is the home's. `chat` knows the passages, up to `known_chars`.
        """
        self.folders = CollectionFolders(directory)
        self.known_passages = KnownPassages(self.folders, chat.catalogue.passages, known_chars)
        self.journal = DeletionJournal(directory)
        self._engine = engine
        self._chat = chat
        self._open_corpus = open_corpus
        self._pool = pool
        self._reserve = reserve
        # How often texts were deleted, by this process or as others told it. It only grows.
        self.deletion_count = 0
        # Held while texts are deleted and then their KV: if two collections delete the same text,
        # the second one deletes its KV.
        self._changes = threading.Lock()
        # texts that were found deleted while their KV was computed, until it is deleted
        self._computed_late = set[str]()
        self._guard = threading.Lock()  # of `_computed_late`
        self._closing = threading.Event()
        self._resuming: threading.Thread | None = None
        # Folders of deleted collections whose KV may still be there, and why it is: at first those
        # whose deletion a kill interrupted.
        self._unfinished = dict.fromkeys(self.folders.leftovers(), "")
        self._finish()
        self._reserve_disk()

    def texts(self) -> Iterator[str]:
        """The texts of all passages in all collections, some of them more than once."""
        for name in self.folders.names():
            yield from self._texts_of(name)

    @contextmanager
    def use(self, name: str, param: str = "name", check: Check = no_check) -> Iterator[Rag]:
        """The collection `name`, which is neither closed nor erased during the block.

        Raises `ApiError` 404 if there is none; `param` is the request field that names it. Raises
        what `check` raises while the collection is opened or closed.
        """
        if (key := self.folders.key(name)) is None:
            raise not_found("collection", name, param)
        try:
            with self._pool.use(key, lambda: self._open(name, key, param), check) as collection:
                yield collection
        except StoreError as error:
            if self.folders.key(name) != key:  # another process deleted it meanwhile
                raise not_found("collection", name, param) from error
            raise

    def delete(self, name: str) -> bool:
        """Delete a collection, and the KV of texts that no other collection holds; whether it
        existed.
        """
        if (key := self.folders.hide(name)) is None:
            return False
        self._pool.close_one(key)  # waits for requests that use it
        self._unfinished[self.folders.rename(name, key)] = ""
        self._finish()
        self.known_passages.refresh(at_once=True)
        return True

    def tidy(self) -> None:
        """Finish deletions that failed, and see what other processes changed. A collection that
        they deleted is closed here: while it is open, its text stays on disk.
        """
        self._finish()
        self.known_passages.refresh()
        for key in self._opened():
            if key.created is not None and self.folders.key(key.path.name) != key:
                self._pool.close_one(key, wait=False)

    def ingest(
        self, rag: Rag, parsed: Parsed, check: Check = no_check, allow: Check = no_check
    ) -> IngestReport:
        """Store documents in a collection in use, without the KV. If `check` raises, the index
        stays as it was.

        `allow` raises if the tenant may not store them. It is called while no other request of the
        tenant stores any: of two requests that fit alone but not together, one is refused.
        """
        split = parsed.passages if parsed.split_by == rag.corpus.splitter.fingerprint else None
        with self._changing(check):
            allow()
            report = rag.index.writer.ingest(
                parsed.documents, split=split, check=check, on_forget=self._note
            )
            self._delete_kv(passage.text for passage in report.forgotten_passages)
        self._reserve_disk()
        self.known_passages.refresh(at_once=True)
        return report

    def encode(
        self, name: str, rag: Rag, report: IngestReport, check: Check = no_check
    ) -> EncodeReport:
        """Compute and store the KV of the documents that an ingestion into the collection in use
        `name` has seen.

        After `AT_ONCE_S` the rest is left to the background, which does it after all that questions
        miss. If `check` raises a `QueueError`, the rest is left to the questions that need it.
        Nothing is evicted for it.
        """
        ends = time.monotonic() + AT_ONCE_S
        ids = (*report.added, *report.changed, *report.unchanged)
        try:
            chunks = rag.corpus.chunks(ids, check)
        except QueueError:  # the documents are stored all the same
            return EncodeReport(
                0, 0, 0, left=sum(len(rag.index.contents.passages(each)) for each in ids)
            )

        def go_on() -> None:
            check()
            if time.monotonic() > ends:
                raise DeadlineError("The rest is left to the background.")

        self._take_out(self._engine.entries.keys(chunks))
        going_on = PausingCheck(go_on, stop_of(check))
        encoded = self._engine.entries.encode(chunks, check=going_on, evict=False)
        if encoded.left:
            with suppress(QueueError):
                check()
                self._engine.entries.encode_soon(chunks, last=True)
        self.delete_kv_of_deleted(name, [chunk.text for chunk in chunks])
        return encoded

    def resume(self) -> None:
        """Begin to compute the KV that an interrupted ingestion left out: in the background, behind
        all else.
        """
        self._resuming = begun(self._resume, "ragkv-resume", LATER)

    @property
    def resumes(self) -> bool:
        """Whether it still looks for what an interrupted ingestion left out."""
        return self._resuming is not None and self._resuming.is_alive()

    def delete_documents(
        self, rag: Rag, document_ids: Sequence[str], check: Check = no_check
    ) -> IngestReport:
        """Delete documents of a collection in use, and the KV of texts that no collection holds any
        more. What `check` raises leaves all as it was.
        """
        with self._changing(check):
            removal = rag.index.writer.delete(document_ids, self._note, check)
            self._delete_kv(passage.text for passage in removal.forgotten_passages)
        self._reserve_disk()
        self.known_passages.refresh(at_once=True)
        return removal

    def delete_kv_of_deleted(
        self, name: str, texts: Iterable[str], since: int | None = None
    ) -> None:
        """Delete the KV of those `texts` that were deleted from the collection `name` while their
        KV was computed. `since` is `deletion_count` before they were read; `None`: not known.

        An answer ends with this, so it waits for no change: a change under way deletes them at its
        end.
        """
        if since == self.deletion_count:
            return
        if deleted := self.folders.unheld(texts, [name]):
            with self._guard:
                self._computed_late |= deleted
            self._delete_late()

    @contextmanager
    def _changing(self, check: Check = no_check) -> Iterator[None]:
        """Change which texts are held; one thread at a time. Raises what `check` raises while it
        waits.
        """
        try:
            with acquired(self._changes, check):
                yield
        finally:
            self._delete_late()

    def _delete_late(self) -> None:
        """Delete the KV that answers found to be of deleted texts. While another thread changes the
        texts, that thread does it, at its end.
        """
        while self._computed_late and self._changes.acquire(blocking=False):
            with self._guard:
                texts = self._computed_late
                self._computed_late = set()
            try:
                self._delete_kv(texts)
            except Exception:
                with self._guard:
                    self._computed_late |= texts
                log.exception("KV of deleted texts was not deleted: the next change tries again.")
                return
            finally:
                self._changes.release()

    def close(self) -> None:
        """Close the open collections."""
        self._closing.set()
        if self._resuming is not None:
            self._resuming.join()
        for key in self._opened():
            self._pool.close_one(key, wait=False)

    def _resume(self) -> None:
        """Hand passages that lack KV, `RESUMED` at most, to the background encoder, until this is
        closed.
        """
        entries = self._engine.entries
        left = RESUMED
        try:
            for name in self.folders.names():
                if not left or self._closing.is_set():
                    break
                texts = dict.fromkeys(self._texts_of(name))
                found = (
                    text
                    for text in texts
                    if not self._closing.is_set() and entries.lacking([text])[0]
                )
                lacking = list(islice(found, left))
                entries.encode_soon(lacking, last=True)
                self.delete_kv_of_deleted(name, lacking)
                left -= len(lacking)
        except Exception:
            log.exception("Not all passages were looked at: %s.", LATER)
        if left < RESUMED:
            log.info("%d passages have no KV yet: it is computed between requests.", RESUMED - left)

    def _texts_of(self, name: str) -> Iterator[str]:
        key = self.folders.key(name)
        return iter(()) if key is None else self.folders.texts(key.path)

    def _opened(self) -> list[CollectionKey]:
        """The open collections of the tenant."""
        return [key for key in self._pool.opened() if self.folders.owns(key)]

    def _open(self, name: str, key: CollectionKey, param: str) -> Rag:
        # or the opening would create the index of a collection that is being deleted
        with self.folders.lock:
            if self.folders.key(name) != key:
                raise not_found("collection", name, param)
            return Rag(self._open_corpus(key.path))

    def _delete_kv(self, texts: Iterable[str]) -> None:
        """Delete the KV of those `texts` that no collection holds. The caller holds `_changes`."""
        texts = set(texts)
        unheld = self.folders.unheld(texts)
        self._take_out(self._keys(texts - unheld))
        chunks = [self._engine.chunk(text) for text in unheld]
        if texts:
            # Before the KV is deleted. A request that ends without having seen this has stored its
            # KV by now, so it is deleted below. One that sees it deletes its own KV.
            self.delete_traces()
        # Noted again: a replica may have read the index before its change.
        self.journal.add(self._engine.entries.keys(chunks))
        self._engine.entries.delete(chunks)

    def delete_traces(self) -> None:
        """Texts are deleted, here or by another replica: requests under way may have read them, and
        conversations without a name may contain them.
        """
        self.deletion_count += 1
        self._chat.delete_traces()

    def _note(self, passages: Iterable[Passage]) -> None:
        """Note for all replicas that texts are deleted, before they are: a kill in between loses
        no note.
        """
        self.journal.add(self._keys(passage.text for passage in passages))

    def _take_out(self, keys: Sequence[EntryKey]) -> None:
        """Remove from the journal the notes of texts that a collection holds: a note that stays
        has their KV deleted and encoded once more.
        """
        try:
            self.journal.remove(keys)
        except StoreError as error:
            log.warning("Notes of deletions stay, so stored texts lose their KV once: %s", error)

    def _keys(self, texts: Iterable[str]) -> Sequence[EntryKey]:
        return self._engine.entries.keys([self._engine.chunk(text) for text in texts])

    def _finish(self) -> None:
        """Delete the KV that only deleted collections need, then their files.

        The files stay until the KV is gone: they alone say which it is. What fails is done later,
        at the latest after a restart.
        """
        for folder in list(self._unfinished):
            with self._changing():
                if folder not in self._unfinished:  # another thread was faster
                    continue
                try:
                    making_room(partial(self._delete_kv_of, folder), self._make_room)
                except Exception as error:
                    if self._unfinished[folder] != str(error):
                        log.exception("collection_erase_failed: it is tried again.")
                    self._unfinished[folder] = str(error)
                    continue
                shutil.rmtree(folder, ignore_errors=True)
                del self._unfinished[folder]
            self._reserve_disk()

    def _make_room(self) -> bool:
        """Give up KV, then the reserve, to a deletion. Whether that freed any space."""
        return self._engine.parts.store.limits.free_disk() or self._reserve.give_up()

    def _delete_kv_of(self, folder: Path) -> None:
        """Delete the KV of all texts in a folder that no collection holds any more."""
        self._delete_kv(self.folders.texts(folder))

    def _reserve_disk(self) -> None:
        """Leave to KV what documents do not take of the tenant's disk."""
        self._engine.parts.store.limits.reserve_disk(self.folders.size_bytes())
