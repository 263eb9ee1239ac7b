"""Sessions of one engine alone: in memory, and in manifests on disk if its store has a directory."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from ragkv.config import SessionConfig
from ragkv.model.layout import TemplateRuns
from ragkv.prompt import Prefiller
from ragkv.prompt.history import BlockWriter, Conversation
from ragkv.store import Background, Job

from .manifest import Manifests, Summary
from .registry import Sessions
from .session import Session

log = logging.getLogger(__name__)

SWEEP_S = 1.0  # idle sessions are looked for at most once in this time


class LocalSessions(Sessions):
    """The state in memory is the newest one. A background thread writes it to disk."""

    def __init__(
        self,
        prefiller: Prefiller,
        runs: TemplateRuns,
        block_writer: BlockWriter,
        settings: SessionConfig,
        manifests: Manifests | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Without `manifests` sessions live only in memory."""
        super().__init__(prefiller, runs, block_writer, settings, clock)
        self._manifests = manifests
        self._writer: Background[None] = Background(0, "ragkv-manifests")
        self._writing = threading.Lock()
        self._unwritten: dict[str, Session] = {}  # sessions whose state is not on disk; this keeps them alive
        self._swept_at = 0.0
        for summary in manifests.summaries() if manifests else ():
            self._set_summary(summary.session_id, summary)
        self._sweep()
        self._writer.flush()
        if manifests is not None:
            self._writer.submit(Job(self.drop_orphans))

    def refresh(self, session: Session) -> None:
        """Clear the session if it was idle for too long; have other idle sessions cleared in the background."""
        if self._expired(session.session_id):
            self.clear(session)
        self._sweep()

    def commit(self, session: Session, conversation: Conversation) -> None:
        conversation = replace(conversation, used_at=self.clock())
        with self._lock:
            session.conversation = conversation
            unused = self._set_summary(session.session_id, self._summary(session.session_id, conversation))
        if unused:
            self.block_writer.then(partial(self.drop, unused))
        self._write_later(session)

    def wait_saved(self, session: Session, timeout_s: float) -> str | None:
        if session.write is None:
            return None
        try:
            return session.write.result(timeout_s)
        except TimeoutError:
            return (
                f"the conversation was not written to disk within {timeout_s:g} s: it is lost if the process is killed"
            )

    def clear(self, session: Session) -> None:
        unused = self._forget_turns(session)
        self._write(session)
        self.drop(unused)

    def delete(self, session: Session) -> None:
        super().delete(session)
        with self._lock:
            self._unwritten.pop(session.session_id, None)

    def summaries(self) -> tuple[Summary, ...]:
        with self._lock:
            return tuple(self._known.values())

    def known(self, session_ids: Iterable[str]) -> tuple[Summary, ...]:
        with self._lock:
            return tuple(self._known[name] for name in session_ids if name in self._known)

    def flush(self) -> None:
        """Return when the blocks of every turn so far are in the store and every manifest is written."""
        super().flush()
        self._writer.flush()

    def close(self) -> None:
        super().close()
        self._writer.close()

    def _open(self, session_id: str) -> Session:
        conversation, note = self._manifests.load(session_id) if self._manifests else (None, None)
        if conversation is None:
            conversation = self._empty()
            self._set_summary(session_id, None)
        elif session_id not in self._known:  # its summary could not be read when the engine was opened
            self._set_summary(session_id, self._summary(session_id, conversation))
        session = Session(self, session_id, conversation, (note,) if note else ())
        if self._manifests is None:
            self._unwritten[session_id] = session
        return session

    def _set_ttl(self, session: Session, ttl_s: float | None) -> None:
        before = session.conversation
        super()._set_ttl(session, ttl_s)
        if session.conversation is not before:
            self._write_later(session)

    def _write_later(self, session: Session) -> None:
        if self._manifests is None:
            return
        write = session.write = Future[str | None]()
        # The job keeps the session alive until it is written.
        if not self._writer.submit(Job(lambda: write.set_result(self._write(session)))):
            write.set_result("the conversation was not written to disk, because the engine is being closed")

    def _write(self, session: Session) -> str | None:
        """Bring the session's manifest up to date. If that fails, returns a note, which the next turn reports too."""
        if self._manifests is None or session.deleted:
            return None
        try:
            with self._writing:  # one write at a time, so that the newest state is written last
                conversation = session.conversation
                if conversation.turns or len(conversation.history):
                    self._manifests.save(session.session_id, conversation)
                else:
                    self._manifests.delete(session.session_id)
        except OSError as error:
            log.warning("Session %r cannot be written to disk: %s. It lives in memory.", session.session_id, error)
            note = f"the conversation could not be written to disk ({error.strerror})"
            with self._lock:
                self._unwritten[session.session_id] = session
                session.notes = (note,)
            return note
        with self._lock:
            self._unwritten.pop(session.session_id, None)
        return None

    def _expired(self, session_id: str) -> bool:
        with self._lock:
            summary, live = self._known.get(session_id), self._live.get(session_id)
        own = live.conversation.ttl_s if live else summary.ttl_s if summary else None
        ttl_s = self.settings.ttl_s if own is None else own
        return summary is not None and ttl_s is not None and self.clock() - summary.used_at > ttl_s

    def _sweep(self) -> None:
        """Have the sessions cleared that were idle for too long, except those of which a turn runs."""
        now = self.clock()
        with self._lock:
            if now - self._swept_at < SWEEP_S:
                return
            self._swept_at, known = now, list(self._known)
        for session_id in filter(self._expired, known):
            self._writer.submit(Job(partial(self.session, session_id)))  # opening an expired session clears it


__all__ = ["LocalSessions"]
