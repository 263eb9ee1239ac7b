"""What replicas share: entries on Redis and S3, conversations on Redis, and deletions that every
replica follows.

On a single machine this package is never imported. It is above the packages that it serves: the
store and the conversations open it by name, and only if the settings ask for it. redis-py and
obstore are imported in one file each.
"""

from .open import open_redis, open_s3, open_storage, secret_from_environment
from .shared_deletions import SharedDeletions
from .tier import RemoteTier

__all__ = [
    "RemoteTier",
    "SharedDeletions",
    "open_redis",
    "open_s3",
    "open_storage",
    "secret_from_environment",
]
