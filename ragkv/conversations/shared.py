"""Sessions that any replica may continue: their state is on a Redis server and is read before it is used.

A turn begins with the newest state. It saves its own state before its answer is reported complete, so the next request
finds it on every replica. If two replicas answer turns of one conversation at once, both compute, and the second one to
end gets `SessionConflictError`; on one replica turns wait for each other, so it pays to route a conversation to one
replica. If the state cannot be read nothing is answered: an old state might be wrong. Blocks are in the store; a block
in no tier of this replica and in no shared tier is computed again.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from ragkv.config import SessionConfig
from ragkv.errors import SessionUnavailableError
from ragkv.model.layout import TemplateRuns
from ragkv.prompt import Prefiller
from ragkv.prompt.history import BlockWriter, Conversation
from ragkv.store import EntryKey, RemoteStats
from ragkv.store.remote.tombstones import Tombstones

from .manifest import Summary
from .registry import Sessions
from .session import Session
from .shared_manifest import SharedManifests

log = logging.getLogger(__name__)

CLOCK_SKEW_S = 5.0  # by which the clocks of replicas may differ
REMEMBERED = 10_000  # conversations whose latest state is known here
ORPHANS_S = 600.0  # how often stored blocks are compared with the conversations; also at start and after an outage
POLL_S = 2.0  # how often a replica looks for what others deleted, and for idle conversations


class SharedSessions(Sessions):
    """The conversations of every engine on one server that has the same model and tenant."""

    def __init__(
        self,
        prefiller: Prefiller,
        runs: TemplateRuns,
        block_writer: BlockWriter,
        settings: SessionConfig,
        manifests: SharedManifests,
        untold: Tombstones | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`manifests` is closed with the sessions. `untold`: what an earlier process did not tell the others."""
        super().__init__(prefiller, runs, block_writer, settings, clock)
        self._untold = Tombstones(None) if untold is None else untold
        self._orphans_at = 0.0  # when the stored blocks are compared with the conversations again, monotonic
        self.manifests = manifests
        self._last_deletion = "0"
        self._latest: OrderedDict[str, float] = OrderedDict()  # last uses of the latest states seen here, by id
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow_deletions, name="ragkv-sessions", daemon=True)
        self._thread.start()

    def refresh(self, session: Session) -> None:
        """Read the session's state if another replica changed it. Raises `SessionUnavailableError`."""
        found = self.manifests.load(session.session_id, session.version)
        if found is None:
            return
        conversation, notes = found.conversation, [found.note] if found.note else []
        if conversation is not None and not self._in_vocabulary(conversation):
            conversation, notes = None, ["the conversation's manifest is damaged (unknown token ids): it starts empty"]
        if conversation is None:
            conversation = self._empty(session.conversation.ttl_s)
        with self._lock:
            latest = self._latest.get(session.session_id, 0.0)
            if conversation.turns and conversation.used_at < latest - CLOCK_SKEW_S:
                notes.append(
                    "the conversation is older than it was here: its server was restored, or an old state replayed"
                )
            session.conversation, session.version, session.notes = conversation, found.version, tuple(notes)
            self._set_summary(session.session_id, self._summary(session.session_id, conversation))
            self._remember(session.session_id, max(latest, conversation.used_at))

    def commit(self, session: Session, conversation: Conversation) -> None:
        """Save the state on the server, then replace it here.

        Raises `SessionConflictError` and `SessionUnavailableError`; then the session's state is unchanged.
        """
        conversation = replace(conversation, used_at=self.clock())
        ttl_s = self.settings.ttl_s if conversation.ttl_s is None else conversation.ttl_s
        session.version = self.manifests.save(session.session_id, conversation, session.version, ttl_s)
        with self._lock:
            session.conversation = conversation
            unused = self._set_summary(session.session_id, self._summary(session.session_id, conversation))
            self._remember(session.session_id, conversation.used_at)
        if unused:
            self.block_writer.then(partial(self._drop_unused, unused))

    def clear(self, session: Session) -> None:
        """Delete the session's turns for every replica. Raises `SessionUnavailableError`."""
        self.manifests.delete(session.session_id)
        self._drop_unused(self._forget_turns(session))

    def summaries(self) -> tuple[Summary, ...]:
        """The summaries of all conversations, whichever replica answered them. Raises `SessionUnavailableError`."""
        known = {summary.session_id: summary for summary in self.manifests.summaries()}
        with self._lock:
            self._known = known
            histories = (*(summary.keys for summary in known.values()), *self._unsaved_keys.values())
            self._references = Counter(key for keys in histories for key in keys)
        return tuple(known.values())

    def known(self, session_ids: Iterable[str]) -> tuple[Summary, ...]:
        """The summaries of these conversations, as they are on the server. Raises `SessionUnavailableError`."""
        return tuple(self.manifests.summaries(list(session_ids)))

    def ids(self) -> tuple[str, ...]:
        return self.manifests.ids()

    def delete_all(self, session_ids: Iterable[str]) -> None:
        """Delete the conversations of these ids for every replica. Raises `SessionUnavailableError`."""
        keys: set[EntryKey] = set()
        for session_id in session_ids:
            self.manifests.delete(session_id)
            with self._lock:
                session = self._live.pop(session_id, None)
                keys |= self._set_summary(session_id, None)
            if session is not None:
                session.deleted = True
        self._drop_unused(keys)

    def server_stats(self) -> RemoteStats:
        return self.manifests.health.stats(0)

    @contextmanager
    def telling(self, keys: Sequence[EntryKey]) -> Iterator[None]:
        """See `Sessions.telling`. Noted first: a kill, or an outage of the server, only delays what is told."""
        if keys:
            self._untold.add(*keys)
        yield
        try:
            self._tell(keys)
        except SessionUnavailableError as error:
            log.warning("Other replicas are told of %d deleted entries later: %s", len(keys), error)

    def _tell(self, keys: Sequence[EntryKey]) -> None:
        """Tell the other replicas of deleted entries. Raises `SessionUnavailableError`."""
        if keys:
            self.manifests.announce(keys)
            self._untold.discard(*keys)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        super().close()
        self.manifests.close()

    def _open(self, session_id: str) -> Session:
        return Session(self, session_id, self._empty())  # `refresh` reads its state

    def _remember(self, session_id: str, used_at: float) -> None:
        """Note the latest state of a conversation that this replica saw. Needs `_lock`."""
        self._latest[session_id] = used_at
        self._latest.move_to_end(session_id)
        if len(self._latest) > REMEMBERED:
            self._latest.popitem(last=False)

    def _in_vocabulary(self, conversation: Conversation) -> bool:
        """Whether the model has all token ids; without a secret anyone who can write to the server can forge them."""
        ids = conversation.history.token_ids
        return not ids or (min(ids) >= 0 and max(ids) < self.adapter.vocabulary)

    def _drop_unused(self, keys: set[EntryKey]) -> None:
        """Delete the blocks of these keys that are in no history of any replica."""
        if not keys:
            return
        try:
            self.summaries()
        except SessionUnavailableError as error:
            log.warning("Blocks of a conversation were not deleted: %s", error)
        else:
            self.drop(keys)

    def _drop_deleted(self) -> None:
        """Delete the blocks and chunks that others deleted since the last time."""
        while not self._closing.is_set():
            position, keys = self.manifests.deleted(self._last_deletion)
            if position == self._last_deletion:
                return
            self._last_deletion = position
            self._drop_unused(set(keys))

    def _follow_deletions(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                self.manifests.probe()
                self.manifests.sweep()
                self._tell(sorted(self._untold.keys))
                self._drop_deleted()
                if time.monotonic() >= self._orphans_at:
                    self.drop_orphans()
                    self._orphans_at = time.monotonic() + ORPHANS_S
            except SessionUnavailableError as error:
                self._orphans_at = 0.0  # the log may be lost with the server, or deletions may have left it
                log.debug("%s", error)
            except Exception:  # an unexpected error must not end the thread
                log.exception("Deletions by other replicas were not followed; trying again.")


__all__ = ["SharedSessions"]
