"""All conversations of one engine: lists them, deletes them, and removes left-over blocks.
`sessions` handles a single conversation and its turns.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from ragkv.errors import SessionUnavailableError
from ragkv.runtime import Closing
from ragkv.store import EntryKey, RemoteStats

from .history_blocks import HistoryBlocks
from .manifest import Summary
from .sessions import Sessions

if TYPE_CHECKING:
    from ragkv.cluster.shared_deletions import SharedDeletions


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as it is listed."""

    session_id: str
    turns: int
    tokens: int  # of its history
    stored_bytes: int  # KV of its history that is stored on this machine
    used_at: float  # seconds since the epoch
    title: str = ""


@dataclass(eq=False)
class Conversations(Closing):
    """The conversations of one engine. All methods are thread-safe, and raise what those of
    `Sessions` raise.
    """

    sessions: Sessions
    kv_bytes_per_token: int
    _deletions: "SharedDeletions | None" = field(default=None, init=False)

    @property
    def blocks(self) -> HistoryBlocks:
        """The blocks of their histories."""
        return self.sessions.blocks

    def begin(self) -> None:
        """Open the storage now, and delete what earlier processes left that is too old or in no
        conversation. Replicas that share conversations do that again and again.
        """
        storage = self.sessions.storage()
        if storage.shared:
            # By name: that room is above this one, and nobody with one machine imports it.
            follow = resolve_name("ragkv.cluster:SharedDeletions")
            self._deletions = follow(
                storage, self.sessions.storage.folder, self.blocks.drop, self.tidy
            )
        else:
            self.sessions.sweep()
            self.blocks.writer.flush()
            self.blocks.writer.then(self.blocks.drop_orphans)

    def list(self, session_ids: Iterable[str] | None = None) -> tuple[SessionInfo, ...]:
        """Every conversation that has turns, the last used first; with `session_ids`, of these
        only.
        """
        found = self._last_used_first(None if session_ids is None else tuple(session_ids))
        return tuple(
            self._info(one) for one in found if one.turns and not self.sessions.idle_too_long(one)
        )

    def has(self, session_id: str) -> bool:
        """Whether there is a conversation of that id that has turns, or has its first one under way
        in this process: quick.
        """
        session = self.sessions.live(session_id)
        if session is not None and session.lock.locked():
            return True
        return any(summary.turns for summary in self.sessions.storage().summaries([session_id]))

    def ids(self) -> tuple[str, ...]:
        """The ids of the conversations that have turns, the last used first. No state is read, and
        idle ones count until they are cleared.
        """
        return tuple(summary.session_id for summary in self._last_used_first() if summary.turns)

    def delete_all(self, session_ids: Iterable[str]) -> None:
        """Delete conversations: those that replicas share also while a turn of theirs runs."""
        storage = self.sessions.storage()
        left = [one for one in session_ids if storage.shared or not self._delete(one)]
        keys = {key for summary in storage.summaries(left) for key in summary.keys}
        for session_id in left:
            storage.delete(session_id)
            self.sessions.forget(session_id)
        self.blocks.drop(keys)

    def _delete(self, session_id: str) -> bool:
        """Delete a conversation after its turn; `False` if its state cannot be read."""
        try:
            self.sessions.open(session_id).delete()
        except SessionUnavailableError:  # a deletion need not read what it deletes
            return False
        return True

    def server_stats(self) -> RemoteStats | None:
        """The health of the server that replicas share, as conversations see it; `None` if they
        share none.
        """
        storage = self.sessions.storage.opened
        return None if storage is None else storage.stats()

    def telling(self, keys: Sequence[EntryKey]) -> AbstractContextManager[None]:
        """The block deletes the entries of `keys`; the replicas that share the conversations are
        told of it.
        """
        return nullcontext() if self._deletions is None else self._deletions.telling(keys)

    def tidy(self) -> None:
        """Delete what no replica needs any more: idle conversations, and blocks that are in
        none.
        """
        self.sessions.sweep()
        self.blocks.drop_orphans()

    def flush(self) -> None:
        """Return when blocks and states are saved."""
        self.blocks.writer.flush()
        if self.sessions.storage.opened is not None:
            self.sessions.storage.opened.flush()

    def close(self) -> None:
        """Save what waits and stop. Twice is harmless."""
        if self._deletions is not None:
            self._deletions.close()
        self.blocks.writer.close()
        if self.sessions.storage.opened is not None:
            self.sessions.storage.opened.close()

    def _last_used_first(self, session_ids: Sequence[str] | None = None) -> Sequence[Summary]:
        found = self.sessions.storage().summaries(session_ids)
        return sorted(found, key=lambda summary: -summary.used_at)

    def _info(self, summary: Summary) -> SessionInfo:
        sizes = zip(summary.keys, summary.key_tokens, strict=True)
        stored = sum(tokens for key, tokens in sizes if self.blocks.writer.stored(key))
        size = stored * self.kv_bytes_per_token
        return SessionInfo(
            summary.session_id, summary.turns, summary.tokens, size, summary.used_at, summary.title
        )
