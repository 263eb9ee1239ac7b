"""Rates per key (requests and tokens per minute) and quotas per tenant (collections, documents and
sessions).

Requests are counted as they arrive, in a moving window. Tokens are charged when an answer is
finished, because their number is not known earlier: a key with tokens left in this minute is
served, and one with none waits for the next.
"""

import math
import time
from typing import Literal

from limits import RateLimitItemPerMinute, WindowStats
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter

from .errors import ApiError
from .keys import Principal
from .settings import QuotaConfig

Held = Literal["collections", "documents", "sessions"]


class RateLimiter:
    """The rates of all keys, in memory: a restart forgets them. Thread-safe."""

    def __init__(self) -> None:
        storage = MemoryStorage()
        self._requests = MovingWindowRateLimiter(storage)
        self._tokens = FixedWindowRateLimiter(storage)

    def take_request(self, principal: Principal) -> None:
        """Count one request. Raises `ApiError` 429 above the rate."""
        if (limit := principal.rate.tokens_per_minute) is not None:
            left = self._tokens.get_window_stats(
                RateLimitItemPerMinute(limit), *_names(principal, "tokens")
            )
            if left.remaining <= 0:
                raise _too_many("tokens", limit, left)
        if (limit := principal.rate.requests_per_minute) is not None:
            item = RateLimitItemPerMinute(limit)
            names = _names(principal, "requests")
            if not self._requests.hit(item, *names):
                raise _too_many("requests", limit, self._requests.get_window_stats(item, *names))

    def charge_tokens(self, principal: Principal, tokens: int) -> None:
        """Count the tokens of a finished answer, also above the limit."""
        limit = principal.rate.tokens_per_minute
        if limit is not None and tokens > 0:
            self._tokens.hit(
                RateLimitItemPerMinute(limit), *_names(principal, "tokens"), cost=tokens
            )


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


def _names(principal: Principal, what: str) -> tuple[str, str]:
    return principal.key_id or "anyone", what


def _too_many(what: str, limit: int, left: WindowStats) -> ApiError:
    after_s = max(1, math.ceil(left.reset_time - time.time()))
    message = (
        f"This key may use {limit} {what} a minute, and has used them. Ask again in {after_s} s."
    )
    return ApiError(429, message, "rate_limit_exceeded", retry_after_s=after_s)
