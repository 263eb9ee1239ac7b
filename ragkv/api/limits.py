"""Rates per key (requests and tokens per minute) and quotas per tenant (collections, documents and
sessions).

Both rates count in a moving window of a minute, on the monotonic clock: the time of day may be set
back. Tokens are charged when an answer is finished, because their number is not known earlier. A
key with tokens left is served. One without waits until enough of them are a minute old.
"""

import math
import threading
import time
from collections import defaultdict, deque
from typing import Literal

from .errors import ApiError
from .keys import Principal
from .settings import QuotaConfig

Held = Literal["collections", "documents", "sessions"]

MINUTE_S = 60.0
STEP_S = 0.1  # Counts of one step leave the minute together.


class Window:
    """How much was counted in the last minute. One thread at a time."""

    def __init__(self) -> None:
        self._used = 0.0
        self._steps: deque[list[float]] = deque()  # when each began, and its count

    def count(self, amount: int, now: float) -> None:
        """Count `amount` at the time `now`."""
        self._used += amount
        if self._steps and now < self._steps[-1][0] + STEP_S:
            self._steps[-1][1] += amount
        else:
            self._steps.append([now, amount])

    def wait_s(self, limit: int, now: float) -> float:
        """Seconds until less than `limit` is counted; 0 if that is so already."""
        while self._steps and self._steps[0][0] + MINUTE_S <= now:
            self._used -= self._steps.popleft()[1]
        left = self._used
        waits_s = 0.0
        for step in self._steps:
            if left < limit:
                break
            left -= step[1]
            waits_s = step[0] + MINUTE_S - now
        return waits_s


class RateLimiter:
    """The rates of all keys, in memory: a restart forgets them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: defaultdict[tuple[str, str], Window] = defaultdict(Window)

    def take_request(self, principal: Principal) -> None:
        """Count one request. Raises `ApiError` 429 above the rate."""
        now = time.monotonic()
        with self._lock:
            for what in ("tokens", "requests"):
                limit = getattr(principal.rate, f"{what}_per_minute")
                used = self._windows[principal.key_id, what]
                if limit is not None and (waits_s := used.wait_s(limit, now)) > 0:
                    after_s = max(1, math.ceil(waits_s))
                    message = (
                        f"This key may use {limit} {what} a minute, and has used them. Ask again "
                        f"in {after_s} s."
                    )
                    raise ApiError(429, message, "rate_limit_exceeded", retry_after_s=after_s)
            if principal.rate.requests_per_minute is not None:
                self._windows[principal.key_id, "requests"].count(1, now)

    def charge_tokens(self, principal: Principal, tokens: int) -> None:
        """Count the tokens of a finished answer, also above the limit."""
        if principal.rate.tokens_per_minute is not None and tokens > 0:
            with self._lock:
                self._windows[principal.key_id, "tokens"].count(tokens, time.monotonic())


def check_at_most(count: int, limit: int, param: str, unit: str, code: str | None = None) -> None:
    """Raise `ApiError` 400 if the request has or asks for more than `limit` of something."""
    if count > limit:
        message = f"{param}: {count} {unit} are too many; this server accepts {limit}."
        raise ApiError(400, message, code, param)


def check_quota(
    principal: Principal, what: Held, held: int, more: int, defaults: QuotaConfig
) -> None:
    """Raise `ApiError` 403 if the tenant, which holds `held`, may not have `more`.

    `defaults` are the quotas of a tenant that has none of its own.
    """
    quota = getattr(principal.quota, what)
    source = "of this key's tenant"
    if quota is None:
        quota = getattr(defaults, what)
        source = f"the setting quotas.{what}"
    if quota is not None and held + more > quota:
        message = (
            f"The quota is {quota} {what} ({source}); {held} are there and {more} more were "
            "requested. Delete some, or "
            "request a larger quota."
        )
        raise ApiError(403, message, "quota_exceeded", what)


def check_disk(held_bytes: int, limit_bytes: int) -> None:
    """Raise `ApiError` 403 if the tenant's documents take all of its disk."""
    if held_bytes >= limit_bytes > 0:  # 0: the operator wants no KV on disk
        message = (
            f"The documents take {held_bytes} bytes with their vectors, and documents and KV of "
            "this tenant together "
            f"may take {limit_bytes} (disk_bytes of its quota, or store.disk_bytes). Delete some."
        )
        raise ApiError(403, message, "quota_exceeded", "documents")
