"""The states of sessions as manifests in a folder of this machine, read at the first use."""

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path

from ragkv.errors import SessionUnavailableError
from ragkv.prompt.history import SAVE_WAIT_S, SessionState
from ragkv.runtime import make_private_folder, replace_file, sync
from ragkv.store.entry import Identity
from ragkv.store.job_queue import Job, JobQueue

from .manifest import NOT_A_MANIFEST, VERSION, ManifestVersionError, Summary, manifest_of, state_of
from .session import Session
from .storage import Saved, SessionStorage, StoredState

log = logging.getLogger(__name__)

SESSIONS = "sessions"  # the folder of states, in that of the store
# States that wait to be written have at most so many bytes, of which each takes `TOKEN_BYTES` a
# token of its history. A turn that finds no room waits for it.
WAITING_BYTES = 64 << 20
TOKEN_BYTES = 64
# What a manifest ends with that was moved aside.
_OTHER_VERSION = ".other-version"
_DAMAGED = ".damaged"
_ASIDE = (_OTHER_VERSION, _DAMAGED)


@dataclass(eq=False)
class FolderStorage(SessionStorage):
    """Manifests in a folder of this machine, written by a background thread; the state in memory is
    the newest one.

    A manifest is written under another name, synced and renamed, so a kill leaves either the
    previous one or this one. One whose content is not readable is moved aside and never
    overwritten. An error that says nothing about the content ends the request, and the file stays
    as it is. The manifest of another model has another name.
    """

    directory: Path | None  # manifests are in its folder `sessions`; None: in memory alone
    # The engine's identity. Its `seen_digest` does not count: only another model makes ids and KV
    # useless.
    base: Identity
    # by id, of the newest states; None: the folder is not read yet
    _known: dict[str, Summary] | None = field(default=None, init=False)
    _reading: threading.Lock = field(default_factory=threading.Lock, init=False)
    _other_models: set[str] = field(default_factory=set, init=False)  # hashed ids of their sessions
    # by id, the writes of states that are not on disk, which keep their sessions alive: all
    # sessions if there is no directory
    _kept_alive: dict[str, Callable[[], object]] = field(default_factory=dict, init=False)
    # by id, the version saved last
    _newest: dict[str, str] = field(default_factory=dict, init=False)
    _versions: Iterator[int] = field(default_factory=partial(count, 1), init=False)
    _writing: threading.Lock = field(default_factory=threading.Lock, init=False)  # one at a time
    _writer: JobQueue[None] = field(
        default_factory=partial(JobQueue, WAITING_BYTES, "ragkv-manifests"), init=False
    )

    def load(self, session_id: str, known: str | None) -> StoredState | None:
        if self.directory is None or known is not None:
            return None
        summaries = self._summaries  # reads the folder, which says whose other manifests there are
        path = self._path(session_id)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return StoredState(None, None, self._why_missing(session_id))
        except OSError as error:  # too many open files, for example: the conversation may be sound
            raise _unavailable(session_id, path, f"cannot be read ({error.strerror})") from error
        try:
            state = state_of(session_id, data, self.base)
        except ManifestVersionError as error:
            why = f"is of version {error}"
            aside = _OTHER_VERSION
        except NOT_A_MANIFEST as error:
            why = f"is damaged ({error})"
            aside = _DAMAGED
        else:
            # it may not be listed yet, if it could not be read when this was opened
            summaries[session_id] = Summary.of(session_id, state, self.base)
            return StoredState(str(next(self._versions)), state)
        try:
            path.replace(path.with_suffix(aside))
        except OSError as error:
            why += f", and cannot be moved aside ({error.strerror})"
            raise _unavailable(session_id, path, why) from error
        log.warning(
            "The manifest %s %s. It was moved aside; its conversation starts empty.", path, why
        )
        return StoredState(None, None, (f"the conversation's manifest {why}: it starts empty",))

    def save(
        self, session: Session, state: SessionState, is_over: Callable[[], bool] = lambda: False
    ) -> Saved:
        session_id = session.session_id
        version = self._newest[session_id] = str(next(self._versions))
        write_now = partial(self._write, session, version, state)
        if state.turns or len(state.history):
            self._summaries[session_id] = Summary.of(session_id, state, self.base)
            if self.directory is None:
                self._kept_alive[session_id] = write_now
        else:  # nothing is kept before the first turn
            self._summaries.pop(session_id, None)
            self._kept_alive.pop(session_id, None)
        if self.directory is None:
            return Saved(version)
        write = Future[str | None]()

        def run() -> None:  # it keeps the session alive until it is written
            try:
                write.set_result(write_now())
            except Exception as error:  # who waits for the write must not wait for nothing
                write.set_result(f"the conversation could not be written to disk ({error})")
                raise

        # a state that the session has anyway takes no memory, so its write needs no room
        size_bytes = 0 if state is session.state else TOKEN_BYTES * (1 + len(state.history))
        if not self._writer.submit(Job(run, size_bytes=size_bytes), SAVE_WAIT_S, is_over):
            why = (
                "the conversation was not written to disk, because the disk is too slow or the "
                "engine is being closed"
            )
            self._kept_alive[session_id] = write_now
            session.note(why)
            write.set_result(why)
        return Saved(version, write)

    def delete(self, session_id: str, known: str | None = None) -> None:
        """See `SessionStorage`. Raises `SessionUnavailableError` if a file cannot be deleted."""
        if self.directory is not None:
            path = self._path(session_id)
            try:
                with self._writing:
                    _remove(path)
                    for aside in _ASIDE:  # it is the conversation's text, too
                        _remove(path.with_suffix(aside))
                    self._newest.pop(session_id, None)  # a write that waits is not done any more
            except OSError as error:
                why = f"cannot be deleted ({error.strerror})"
                raise _unavailable(session_id, path, why) from error
        else:
            self._newest.pop(session_id, None)
        self._summaries.pop(session_id, None)
        self._kept_alive.pop(session_id, None)

    def summaries(self, session_ids: Sequence[str] | None = None) -> Iterable[Summary]:
        known = self._summaries
        if session_ids is None:
            return tuple(known.values())
        return tuple(filter(None, map(known.get, session_ids)))

    def flush(self) -> None:
        self._writer.flush()
        self._write_again()

    def close(self) -> None:
        self._writer.close()
        self._write_again()

    def _write_again(self) -> None:
        """Write the states that could not be written: the disk may be well now."""
        if self.directory is not None:
            for write_now in tuple(self._kept_alive.values()):
                write_now()

    def _why_missing(self, session_id: str) -> tuple[str, ...]:
        """Notes for a conversation that has no manifest, though something of that id is kept."""
        path = self._path(session_id)
        if any(path.with_suffix(aside).exists() for aside in _ASIDE):
            return (
                "the conversation's manifest was unreadable and is moved aside: it starts empty",
            )
        if _hashed(session_id) in self._other_models:
            return ("the conversation of that id is another model's: this one starts empty",)
        return ()

    @property
    def _summaries(self) -> dict[str, Summary]:
        with self._reading:
            if self._known is None:
                self._known = {} if self.directory is None else self._found_in(self._folder)
            return self._known

    def _found_in(self, folder: Path) -> dict[str, Summary]:
        """The summaries of this model's manifests. Temporary files of a killed process are
        deleted.
        """
        with contextlib.suppress(OSError):
            for orphan in folder.glob("*.tmp"):
                orphan.unlink()
        found = {}
        for path in sorted(folder.glob("*-*.json")):
            hashed, _, digest = path.stem.partition("-")
            if digest != self._model_digest:
                self._other_models.add(hashed)
                continue
            try:
                with path.open(encoding="utf-8") as file:
                    header = json.loads(file.readline())
                    line = file.readline()
                if header["version"] == VERSION:
                    summary = Summary.from_json(line)
                    found[summary.session_id] = summary
            except FileNotFoundError:
                continue  # another process deleted it meanwhile
            except OSError as error:
                self.lists_all = False
                log.warning(
                    "The manifest %s cannot be read: %s. Lists lack its conversation until it is "
                    "asked for.",
                    path,
                    error,
                )
            except NOT_A_MANIFEST:
                continue  # `load` reports it to the caller that asks for this session
        return found

    def _write(self, session: Session, version: str, state: SessionState) -> str | None:
        """Write a state that was saved. If that fails, returns a note, which the next turn reports
        too.
        """
        with self._writing:
            # a newer state is written by its own job, or it was deleted
            if self._newest.get(session.session_id) != version:
                return None
            try:
                if state.turns or len(state.history):
                    make_private_folder(self._folder)
                    summary = Summary.of(session.session_id, state, self.base)
                    data = manifest_of(summary, state, self.base)
                    replace_file(self._path(session.session_id), data)
                else:
                    _remove(self._path(session.session_id))
            except OSError as error:
                log.warning(
                    "Session %r cannot be written to disk: %s. It lives in memory.",
                    session.session_id,
                    error,
                )
                note = f"the conversation could not be written to disk ({error.strerror})"
                self._kept_alive[session.session_id] = partial(self._write, session, version, state)
                session.note(note)
                return note
            self._kept_alive.pop(session.session_id, None)
            return None

    @property
    def _folder(self) -> Path:
        assert self.directory is not None
        return self.directory / SESSIONS

    @cached_property
    def _model_digest(self) -> str:
        model = replace(self.base, seen_digest="").to_json()
        return hashlib.blake2b(model.encode(), digest_size=8).hexdigest()

    def _path(self, session_id: str) -> Path:
        return self._folder / f"{_hashed(session_id)}-{self._model_digest}.json"


def _unavailable(session_id: str, path: Path, why: str) -> SessionUnavailableError:
    """The error of a manifest that is left as it is. It does not tell the path: clients see it."""
    log.warning("The manifest %s %s. It was left as it is.", path, why)
    return SessionUnavailableError(
        f"The manifest of conversation {session_id!r} {why}. It was left as it is: ask again. If "
        "that remains, check the disk and who may read and change the file, which the log names."
    )


def _remove(path: Path) -> None:
    """Delete a file durably, if there is one. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        sync(path.parent)


def _hashed(session_id: str) -> str:
    return hashlib.blake2b(session_id.encode(), digest_size=16).hexdigest()
