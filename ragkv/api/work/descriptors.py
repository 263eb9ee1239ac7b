"""File descriptors: how many files and connections the process may have open, and what share open collections get.

Connections get up to half of the process's limit (`ulimit -n`). Of the rest, a fixed part is for the process itself and
for each open tenant's store, and the remainder is for open collections.
"""

import resource

from ..logs import logger
from ..settings import ServeConfig

MOST = 65_536  # the limit is raised to no more: some libraries loop over all possible descriptors
PROCESS = 40  # the listener, the log, the event loop, child processes, files that are open for a moment
TENANT = 4  # of an open store: its index, its lock
COLLECTION = 5  # its database, a journal while it is written, and the mapped arrays of a BM25 snapshot
BEING_REFUSED = 24  # connections that are accepted and not closed yet, see `server.py`
FEWEST = 4  # collections are kept open even if the limit is too low for them


def raise_limit() -> None:
    """Raise the process's limit of open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logger().warning("descriptor_limit_not_raised", limit=soft, wanted=wanted, error=str(error))


def connection_limit(setting: int) -> int:
    """How many connections may be open at once: `setting`, or fewer if few files may be open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return setting
    return min(setting, max(1, limit // 2 - BEING_REFUSED))


def collection_limit(config: ServeConfig) -> int:
    """How many collections may be open at once: `open_collections`, or fewer if few files may be open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return config.open_collections
    connections = connection_limit(config.connections.limit)
    fitting = (limit - connections - BEING_REFUSED - PROCESS - TENANT * config.open_tenants) // COLLECTION
    chosen = min(config.open_collections, max(FEWEST, fitting))
    lowered = chosen < config.open_collections or connections < config.connections.limit
    (logger().warning if lowered else logger().info)(
        "descriptors", limit=limit, connections=connections, open_collections=chosen, setting=config.open_collections
    )
    return chosen
