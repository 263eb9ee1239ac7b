"""Conversations: turns, their durable manifests, and conversations shared between replicas (`shared`)."""

from .manifest import Manifests, OtherVersionError, Summary, decoded, encoded
from .session import House, OpenTurn, Session, SessionInfo, Sessions, SessionTurn

__all__ = [
    "House",
    "Manifests",
    "OpenTurn",
    "OtherVersionError",
    "Session",
    "SessionInfo",
    "SessionTurn",
    "Sessions",
    "Summary",
    "decoded",
    "encoded",
]
