"""Drops here what any replica deleted: reads the tenant's journal at start, every two seconds, and after an outage.

A note is applied twice: when it is first seen, and at the next look, because a request that retrieved the text just
before its deletion may have stored its KV in between. How far this replica is stands in its KV directory; it never
says more than was done, so a kill repeats work and skips none. While shared storage is away, the entries are dropped
on this machine, and the position stays until they are dropped there too.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from ragkv.engine import Engine
from ragkv.errors import RagKVError
from ragkv.runtime import Closing, replace_file

from .deletion_journal import DeletionJournal, Notes, Position

log = logging.getLogger(__name__)

FILE = "deletions-followed.json"
POLL_S = 2.0
# A replica without entries reads the notes of so many seconds: they may be of a replica that was killed.
NEW_S = 3600.0


class DeletionFollower(Closing):
    """Keeps one engine's store true to the journal of its tenant."""

    def __init__(
        self,
        journal: DeletionJournal,
        engine: Engine,
        directory: Path,
        texts: Callable[[], Iterable[str]],
        forget_requests: Callable[[], None],
    ) -> None:
        """`directory` is this replica's KV directory. `texts` are the passages of all collections.

        `forget_requests` deletes what requests left behind that may hold deleted texts.
        """
        self._journal, self._engine, self._path = journal, engine, directory / FILE
        self._texts, self._forget_requests = texts, forget_requests
        self._settled: Position | None = None  # everything up to here was applied twice; None: not read yet
        self._seen = Position()  # everything up to here was applied once
        self._forgot = Position()  # of the last deletion for which requests were forgotten
        self._state: object = None  # of the journal when nothing was left to be done
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ragkv-deletions", daemon=True)

    def start(self) -> None:
        """Follow on a thread of its own until `close`."""
        self._thread.start()

    def follow(self) -> None:
        """Apply what is new, and once more what was new the last time."""
        state = self._journal.state()
        if self._settled is not None and state == self._state:
            return
        if self._settled is None:
            self._settled = self._seen = self._read()
        found = self._journal.after(self._settled)
        is_done = self._apply(found) and not self._engine.away()
        if not is_done:
            return
        if self._seen == found.end:  # applied for the second time
            self._state = state
        settled, self._seen = self._seen, found.end
        if settled != self._settled:
            self._settled = settled
            self._write(settled)

    def close(self) -> None:
        """Stop. Twice is harmless."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _apply(self, found: Notes) -> bool:
        """Drop what is noted; `False` if this was interrupted."""
        if not found.is_complete:
            log.warning("More was deleted than is noted: all entries are compared with the collections.")
            self._forget_requests()
            chunks = [self._engine.chunk(text) for text in self._texts() if not self._stop.is_set()]
            if self._stop.is_set():  # the list is not whole
                return False
            self._engine.entries.retain(chunks)
            return True
        is_of_this = self._seen.journal == found.end.journal and self._seen.number <= found.end.number
        seen = self._seen.number if is_of_this else 0
        told = [note.number for note in found.notes if note.number > seen and not note.is_own]
        if told and (found.end.journal, told[-1]) != self._forgot:
            self._forget_requests()
            self._forgot = Position(found.end.journal, told[-1])
        # What this process deletes itself it deletes at once; the second time tells whether it came to that.
        keys = [note.key for note in found.notes if note.number <= seen or not note.is_own]
        return self._engine.entries.drop(list(dict.fromkeys(keys)), self._stop.is_set)

    def _read(self) -> Position:
        """How far this replica is."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            return Position(str(found["journal"]), int(found["number"]))
        except FileNotFoundError:
            is_new = not self._engine.store.sample(1)
            return self._journal.before(NEW_S) if is_new else Position()
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read (%s): all notes of deletions are followed again.", self._path, error)
            return Position()

    def _write(self, position: Position) -> None:
        try:
            replace_file(self._path, json.dumps(position._asdict()).encode())
        except OSError as error:
            log.warning("%s cannot be written (%s): a restart follows more deletions again.", self._path, error)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.follow()
            except RagKVError as error:
                log.warning("Deletions were not followed (%s); trying again.", error)
            except Exception:  # the thread must live on
                log.exception("Deletions were not followed; trying again.")
            self._stop.wait(POLL_S)
