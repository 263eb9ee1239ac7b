"""Conversations: their turns, and their states in a folder or on a server that replicas share."""

from .conversations import Conversations
from .session import Session, SessionInfo
from .storage import SessionStorage
from .turn import Turn

__all__ = ["Conversations", "Session", "SessionInfo", "SessionStorage", "Turn"]
