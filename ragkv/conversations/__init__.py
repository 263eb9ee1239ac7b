"""Conversations: their turns, and their states, in a folder or on a server that replicas share."""

from .conversations import Conversations, SessionInfo
from .folder_storage import SESSIONS, LazyStorage
from .history_blocks import HistoryBlocks
from .session import Session
from .sessions import Sessions
from .storage import SessionStorage
from .turn import Turn

__all__ = [
    "SESSIONS",
    "Conversations",
    "HistoryBlocks",
    "LazyStorage",
    "Session",
    "SessionInfo",
    "SessionStorage",
    "Sessions",
    "Turn",
]
