"""Conversations: their turns, and their states in a folder or on a server that replicas share."""

from .conversations import Conversations
from .session import Session, SessionInfo
from .storage import SESSIONS, SessionStorage
from .turn import Turn

__all__ = ["SESSIONS", "Conversations", "Session", "SessionInfo", "SessionStorage", "Turn"]
