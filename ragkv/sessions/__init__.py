"""Sessions: conversations that an engine keeps. Their turns, and their states in a folder or on a
server that replicas share.
"""

from .folder_storage import SESSIONS, FolderStorage
from .history_blocks import HistoryBlocks
from .session import Session
from .sessions import SessionInfo, Sessions
from .storage import SessionStorage
from .turn import Turn

__all__ = [
    "SESSIONS",
    "FolderStorage",
    "HistoryBlocks",
    "Session",
    "SessionInfo",
    "SessionStorage",
    "Sessions",
    "Turn",
]
