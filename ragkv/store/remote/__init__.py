"""The remote tier: entries on storage that replicas share (Redis, S3), behind connectors that
faults cannot hurt.

Nothing here is imported unless a remote tier is configured; redis-py and obstore load in their
connector's file alone.
"""

from .open import open_remote, secret_from_environment
from .tier import RemoteTier

__all__ = ["RemoteTier", "open_remote", "secret_from_environment"]
