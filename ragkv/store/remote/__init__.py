"""What lies behind a remote tier: connectors to shared storage, the format of values, and what keeps faults cheap.

Nothing here is imported unless a remote tier is configured; redis-py and obstore load in their connector's file alone.
"""

from .breaker import Breaker, State
from .connector import Connector, Held, Placed, Usage
from .values import RemoteHead, Seal, Value

__all__ = ["Breaker", "Connector", "RemoteHead", "Held", "Placed", "Seal", "State", "Usage", "Value"]
