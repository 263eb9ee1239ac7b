"""What replicas share: entries on Redis and S3, sessions on Redis, and deletions that every replica
follows.

On a single machine this package is never imported. It is above the store and the sessions, which
import it by name, and only if the settings ask for it. redis-py and obstore are imported in one
file each.

A `Connector` keeps entries as values on a server (Redis, S3). A `RemoteTier` makes a tier of it: a
`RemoteReader` looks entries up and fetches them, a `RemoteLease` hands one out.
`RedisSessionStorage` keeps the states of sessions.
"""

from .open import open_redis, open_s3, open_session_storage, secret_from_environment
from .remote_tier import RemoteTier
from .shared_deletions import SharedDeletions

__all__ = [
    "RemoteTier",
    "SharedDeletions",
    "open_redis",
    "open_s3",
    "open_session_storage",
    "secret_from_environment",
]
