"""The contract of a storage for the states of sessions.

`folder_storage.py` keeps manifests in a folder of this machine. `cluster/redis_session_storage.py`
keeps them on a server that replicas share.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from ragkv.prompt.history import SessionState
from ragkv.runtime import Closing
from ragkv.store.tiers import RemoteStats

from .manifest import Summary
from .session import Session


@dataclass(frozen=True, slots=True)
class StoredState:
    """A session as it is kept."""

    version: str | None  # None: nothing is kept under this id
    state: SessionState | None  # None: nothing is kept, or it is damaged
    notes: tuple[str, ...] = ()  # for the report of the next turn


class Saved(NamedTuple):
    """What a session notes of a state that it saved."""

    version: str
    # The write to disk; its result is a note if it failed. None: `save` returned when it was done.
    write: Future[str | None] | None = None


class SessionStorage(Closing, ABC):
    """Keeps the states of sessions. All methods are thread-safe.

    A session's `version` names the state that it has; `load` and `save` return or compare it. The
    caller of `save` holds the session, or for one machine alone the guard of its state.
    """

    # whether other processes change the states, so that they are read again before they are used
    shared = False
    # whether `summaries` has all sessions: blocks that are in none of them are left over
    lists_all = True

    @abstractmethod
    def load(self, session_id: str, known: str | None) -> StoredState | None:
        """The state that is kept, or `None` if its version is `known`.

        Raises `SessionUnavailableError` if it cannot be read now, though it may be sound.
        """

    @abstractmethod
    def save(
        self, session: Session, state: SessionState, is_over: Callable[[], bool] = lambda: False
    ) -> Saved:
        """Keep `state` under a new version. If it raises, the state before is kept.

        A storage of one machine waits for nothing if `state` is the session's own already, and for
        no room once `is_over`.
        """

    @abstractmethod
    def delete(self, session_id: str, known: str | None = None) -> None:
        """Keep the session no longer; if other processes may have changed it, only in the version
        `known`. Raises `SessionUnavailableError` if it is still kept.
        """

    @abstractmethod
    def summaries(self, session_ids: Sequence[str] | None = None) -> Iterable[Summary]:
        """The summaries of all sessions that are kept, or of those of these ids."""

    def stats(self) -> RemoteStats | None:
        """The health of a server that replicas share."""
        return None

    def flush(self) -> None:
        """Return when everything is saved."""
