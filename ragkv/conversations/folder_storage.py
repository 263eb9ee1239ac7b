"""The states of conversations as manifests in a folder of this machine.

`LazyStorage` opens the folder, or the server that replicas share, at its first use.
"""

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from pkgutil import resolve_name

from ragkv.config import EngineConfig
from ragkv.errors import SessionUnavailableError
from ragkv.prompt.history import SessionState
from ragkv.runtime import make_private_folder, replace_file, sync
from ragkv.store import Identity, Job, JobQueue

from .manifest import NOT_A_MANIFEST, VERSION, ManifestVersionError, Summary, decode, encode
from .session import Session
from .storage import SessionStorage, StoredState

log = logging.getLogger(__name__)

SESSIONS = "sessions"  # the folder of states, in that of the store
# What a manifest ends with that was moved aside.
_OTHER_VERSION = ".other-version"
_DAMAGED = ".damaged"
_ASIDE = (_OTHER_VERSION, _DAMAGED)


@dataclass(eq=False)
class LazyStorage:
    """Where the states of an engine's conversations are kept. Thread-safe."""

    config: EngineConfig
    base: Identity  # the engine's; its context does not count
    vocabulary: int  # the model has so many token ids
    opened: SessionStorage | None = field(default=None, init=False)
    _opening: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __call__(self) -> SessionStorage:
        """The storage; the first call opens it."""
        with self._opening:
            if self.opened is None:
                self.opened = self._open()
            return self.opened

    @property
    def folder(self) -> Path | None:
        """The folder for what outlives the process; `None`: nothing does."""
        store = self.config.store
        own = self.config.session.directory or (None if store.read_only else store.directory)
        return None if own is None else Path(own)

    def _open(self) -> SessionStorage:
        if not self.config.session.shared:
            return FolderStorage(self.folder, self.base)
        # By name: that room is above this one, and nobody with one machine imports it.
        open_shared: Callable[..., SessionStorage] = resolve_name(
            "ragkv.cluster:open_session_storage"
        )
        # `EngineConfig` refuses shared sessions without a server
        return open_shared(self.config.store.redis, self.base, self.vocabulary)


class FolderStorage(SessionStorage):
    """Manifests in a folder of this machine, written by a background thread; the state in memory is
    the newest one.

    A manifest is written under another name, synced and renamed, so a kill leaves either the
    previous one or this one. One whose content is not readable is moved aside and never
    overwritten. An error that says nothing about the content ends the request, and the file stays
    as it is. The manifest of another model has another name.
    """

    def __init__(self, directory: str | Path | None, base: Identity) -> None:
        """Under `sessions/` of the store's directory; with `None` conversations live in memory
        alone.

        `base` is the engine's identity. Its context does not count: only another model makes ids
        and KV useless.
        """
        self._folder = None if directory is None else Path(directory) / SESSIONS
        self._base = base
        model = replace(base, context="").to_json()
        self._model_digest = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()
        self._other_models: set[str] = set()  # hashed ids of other models' conversations
        # whose state is not on disk; this keeps them alive
        self._unwritten: dict[str, Session] = {}
        self._versions = count(1)
        self._writing = threading.Lock()  # one write at a time
        self._writer: JobQueue[None] = JobQueue(0, "ragkv-manifests")
        # by id, of the newest states
        self._summaries = {} if self._folder is None else self._found_in(self._folder)

    def load(self, session_id: str, known: str | None) -> StoredState | None:
        if self._folder is None or known is not None:
            return None
        path = self._path(session_id)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return StoredState(None, None, self._why_missing(session_id))
        except OSError as error:  # too many open files, for example: the conversation may be sound
            raise _unavailable(session_id, path, f"cannot be read ({error.strerror})") from error
        try:
            state = decode(session_id, data, self._base)
        except ManifestVersionError as error:
            why = f"is of version {error}"
            aside = _OTHER_VERSION
        except NOT_A_MANIFEST as error:
            why = f"is damaged ({error})"
            aside = _DAMAGED
        else:
            # it may not be listed yet, if it could not be read when this was opened
            self._summaries[session_id] = Summary.of(session_id, state, self._base)
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

    def save(self, session: Session, state: SessionState) -> None:
        version = session.version = str(next(self._versions))
        self._summaries[session.session_id] = Summary.of(session.session_id, state, self._base)
        if self._folder is None:
            self._unwritten[session.session_id] = session
            return
        write = session.write = Future[str | None]()

        def run() -> None:  # it keeps the session alive until it is written
            try:
                write.set_result(self._write(session, version, state))
            except Exception as error:  # who waits for the write must not wait for nothing
                write.set_result(f"the conversation could not be written to disk ({error})")
                raise

        if not self._writer.submit(Job(run)):
            write.set_result(
                "the conversation was not written to disk, because the engine is being closed"
            )

    def wait_saved(self, session: Session, timeout_s: float) -> str | None:
        if session.write is None:
            return None
        try:
            return session.write.result(timeout_s)
        except TimeoutError:
            return (
                f"the conversation was not written to disk within {timeout_s:g} s: it is lost "
                "if the process is killed"
            )

    def delete(self, session_id: str, known: str | None = None) -> None:
        self._summaries.pop(session_id, None)
        if self._folder is None:
            self._unwritten.pop(session_id, None)
            return
        try:
            with self._writing:
                self._unwritten.pop(session_id, None)  # a write that failed meanwhile is over
                _remove(self._path(session_id))
                for aside in _ASIDE:  # it is the conversation's text, too
                    _remove(self._path(session_id).with_suffix(aside))
        except OSError as error:
            log.warning("The manifest of session %r cannot be deleted: %s.", session_id, error)

    def summaries(self, session_ids: Sequence[str] | None = None) -> Iterable[Summary]:
        known = self._summaries
        return (
            tuple(known.values())
            if session_ids is None
            else tuple(filter(None, map(known.get, session_ids)))
        )

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

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
        assert self._folder is not None
        with self._writing:
            # a newer state is written by its own job, or it was deleted
            if session.version != version:
                return None
            try:
                if state.turns or len(state.history):
                    make_private_folder(self._folder)
                    data = encode(
                        Summary.of(session.session_id, state, self._base), state, self._base
                    )
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
                self._unwritten[session.session_id] = session
                session.note(note)
                return note
            self._unwritten.pop(session.session_id, None)
            return None

    def _path(self, session_id: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{_hashed(session_id)}-{self._model_digest}.json"


def _unavailable(session_id: str, path: Path, why: str) -> SessionUnavailableError:
    """The error of a manifest that is left as it is. It does not tell the path: clients see it."""
    log.warning("The manifest %s %s. It was left as it is.", path, why)
    return SessionUnavailableError(
        f"The manifest of conversation {session_id!r} {why}. It was left as it is, and nothing was "
        "answered: ask again. If that remains, check the disk and who may read and move the file, "
        "which the log names."
    )


def _remove(path: Path) -> None:
    """Delete a file durably, if there is one. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        sync(path.parent)


def _hashed(session_id: str) -> str:
    return hashlib.blake2b(session_id.encode(), digest_size=16).hexdigest()
