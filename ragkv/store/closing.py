"""Closes a store: by its owner, at the end of the process, or when nobody holds it any more."""

import logging
import threading
from collections.abc import Sequence

from .copying import TierCopies, or_none
from .prefetch import Prefetcher
from .tiers import Tier

log = logging.getLogger(__name__)


def close_parts(prefetcher: Prefetcher, copies: TierCopies, tiers: Sequence[Tier]) -> None:
    """Write what waits, and close every tier. Twice is harmless."""
    prefetcher.close()
    copies.close()
    for tier in tiers:
        or_none("close a tier", tier.close)


def close_dropped(prefetcher: Prefetcher, copies: TierCopies, tiers: Sequence[Tier]) -> None:
    """Close the parts of a store that nobody closed: the process ends, or nobody holds it."""
    parts = prefetcher, copies, tiers
    if not threading.main_thread().is_alive():  # the process ends
        close_parts(*parts)
        return
    log.warning("A store was dropped without being closed, and is closed now. Call its `close`.")
    # The garbage collector may call this in a thread that holds a lock which closing waits for.
    threading.Thread(target=close_parts, args=parts, name="ragkv-close-store").start()
