"""A share of a tier kept free, so that what comes in never waits for an eviction (CachedAttention section 3.3.1)."""

import logging
import threading

from .tiers import Tier

log = logging.getLogger(__name__)


class Reserve:
    """Evicts in the background as soon as less than the reserve is free."""

    def __init__(self, tier: Tier, size_bytes: int) -> None:
        """With 0 bytes it does nothing."""
        self._tier, self._size_bytes = tier, size_bytes
        self._used = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="ragkv-reserve", daemon=True)
        if size_bytes:
            self._thread.start()

    def used(self) -> None:
        """Something was put into the tier, or may go from it now. Returns at once."""
        self._used.set()

    def close(self) -> None:
        """Stop. Twice is harmless."""
        self._closing = True
        self._used.set()
        if self._size_bytes:
            self._thread.join()

    def _work(self) -> None:
        while self._used.wait() and not self._closing:
            self._used.clear()
            try:
                self._tier.free(self._size_bytes)
            except Exception:  # a store failure never fails a request
                log.exception("Room could not be made ahead; the next entry will make its own.")
