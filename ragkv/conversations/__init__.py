"""Conversations: their turns, and their state in manifests on disk or on a server that replicas share."""

from .local import LocalSessions
from .manifest import Manifests
from .opening import open_sessions
from .registry import Sessions
from .session import Session, SessionInfo
from .turn import DetachedTurn, SessionTurn

__all__ = [
    "DetachedTurn",
    "LocalSessions",
    "Manifests",
    "Session",
    "SessionInfo",
    "SessionTurn",
    "Sessions",
    "open_sessions",
]
