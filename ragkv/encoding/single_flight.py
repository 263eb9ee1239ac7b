"""Single flight: replicas that miss the same chunk at once encode it once.

Who encodes holds a claim, with an expiry, in the storage that replicas share; it ends when the entry is written there.
Who finds a chunk claimed waits for its entry, never longer than encoding it would take, and then encodes it all the
same. Requests never wait here: what they miss they compute in place. Where no storage is shared, or it does not answer,
everybody goes ahead.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ragkv.store import Claim, Store

UNMEASURED_S = 60.0  # a claim's expiry until something was encoded here
SPARE = 4.0  # times what encoding takes: a claim outlives a slow one
LEAST_S = 5.0
POLLS = 20  # looks at most while waiting


@dataclass(frozen=True, slots=True)
class EncodingClaim:
    """An entry that is being made here."""

    claim: Claim
    tokens: int
    began_s: float  # monotonic


class Pace:
    """How long it takes here until an entry is encoded and written, from the latest. Thread-safe."""

    def __init__(self) -> None:
        self._token_s: deque[float] = deque(maxlen=8)

    def took(self, tokens: int, seconds: float) -> None:
        """An entry of so many tokens was there after that time."""
        self._token_s.append(seconds / max(1, tokens))

    def seconds(self, tokens: int) -> float | None:
        """What one of so many takes at the longest; `None` if nothing was encoded yet."""
        latest = tuple(self._token_s)
        return max(latest) * tokens if latest else None


class SingleFlight:
    """Claims on what is to be encoded. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.pace = Pace()

    def claim(self, key: str, tokens: int, is_there: Callable[[], bool]) -> EncodingClaim | None:
        """Be the one who encodes the entry of `key`; `None` if another replica is, or was. `finish` must follow.

        `is_there` looks once more: another's entry may have come, and its claim ended, since the caller looked.
        """
        takes_s = self.pace.seconds(tokens)
        expires_s = UNMEASURED_S if takes_s is None else max(LEAST_S, SPARE * takes_s)
        claim = self._store.claim(key, expires_s)
        if claim is not None and claim.tier is not None and is_there():
            self._store.release(claim)
            return None
        return None if claim is None else EncodingClaim(claim, tokens, time.monotonic())

    def finish(self, flight: EncodingClaim, encoded: bool) -> None:
        """It is put, if it was `encoded`. Returns at once; the claim ends when what was put is written."""

        def landed() -> None:
            if encoded:
                self.pace.took(flight.tokens, time.monotonic() - flight.began_s)

        self._store.release(flight.claim, landed)

    def arrived(self, key: str, tokens: int, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait for another replica's entry; `False` once it takes longer than encoding would, or `given_up`."""
        takes_s = self.pace.seconds(tokens)
        if takes_s is None:
            return self._store.contains(key)
        until = time.monotonic() + takes_s
        while not (here := self._store.contains(key)) and time.monotonic() < until and not given_up():
            time.sleep(min(takes_s / POLLS, max(0.0, until - time.monotonic())))
        return here


__all__ = ["EncodingClaim", "SingleFlight", "Pace"]
