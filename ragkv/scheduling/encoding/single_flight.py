"""Single-flight encoding: replicas that miss the same chunk at the same time encode it once.

The replica that encodes a chunk holds a claim in the storage that replicas share. The claim ends when the entry is
written there, or when it expires. A replica that finds a chunk claimed waits for the entry, but never longer than
encoding would take, and then encodes the chunk itself. Requests never wait here: they compute what they miss. Without
shared storage, or if it does not answer, every replica encodes at once.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ragkv.store import Claim, EntryKey, Store

UNMEASURED_S = 60.0  # `UNMEASURED_S` is a claim's expiry until this replica has encoded an entry.
HEADROOM = 4.0  # `HEADROOM` times what encoding takes is a claim's expiry, so that it outlives a slow encoding.
LEAST_S = 5.0  # `LEAST_S` is the shortest expiry of a claim.
POLLS = 20  # `POLLS` is how often an entry is looked for at most while it is waited for.


@dataclass(frozen=True, slots=True)
class EncodingClaim:
    """The right to encode one entry."""

    claim: Claim
    tokens: int
    began_s: float  # monotonic


class SingleFlight:
    """Claims on chunks to be encoded. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._token_s: deque[float] = deque(maxlen=8)  # seconds per token to encode and write the latest entries here

    def claim(self, key: EntryKey, tokens: int, is_stored: Callable[[], bool]) -> EncodingClaim | None:
        """Claim the entry of `key`; `None` if another replica encodes it or has done so. `finish` must follow.

        `is_stored` looks up the entry again: another replica may have stored it and ended its claim after the caller
        looked.
        """
        takes_s = self._expected_s(tokens)
        expires_s = UNMEASURED_S if takes_s is None else max(LEAST_S, HEADROOM * takes_s)
        claim = self._store.claim(key.to_text(), expires_s)
        if claim is not None and claim.tier is not None and is_stored():
            self._store.release(claim)
            return None
        return None if claim is None else EncodingClaim(claim, tokens, time.monotonic())

    def finish(self, claim: EncodingClaim, encoded: bool) -> None:
        """End a claim; `encoded` says whether the entry was put. Returns at once; the claim ends after the write."""

        def record() -> None:
            if encoded:
                self.took(claim.tokens, time.monotonic() - claim.began_s)

        self._store.release(claim.claim, record)

    def arrived(self, key: EntryKey, tokens: int, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait for another replica's entry. `False` once that takes longer than encoding would, or `stop` says so."""
        takes_s = self._expected_s(tokens)
        if takes_s is None:
            return self._store.contains(key)
        until = time.monotonic() + takes_s
        while not (here := self._store.contains(key)) and time.monotonic() < until and not stop():
            time.sleep(min(takes_s / POLLS, max(0.0, until - time.monotonic())))
        return here

    def took(self, tokens: int, seconds: float) -> None:
        """Record that this replica took that time to encode and write an entry of so many tokens."""
        self._token_s.append(seconds / max(1, tokens))

    def _expected_s(self, tokens: int) -> float | None:
        """The longest time that an entry of so many tokens takes; `None` if nothing was encoded here yet."""
        latest = tuple(self._token_s)
        return max(latest) * tokens if latest else None


__all__ = ["EncodingClaim", "SingleFlight"]
