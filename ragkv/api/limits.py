"""How much a key may ask a minute, and a tenant may hold.

Requests are counted as they come, in a moving window. Tokens are charged when an answer is over, since nobody knows
them before: a key that has any left this minute is served, and what it uses beyond is owed until the minute is over.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter

from .errors import ApiError
from .keys import Principal

Counted = Literal["documents", "sessions"]


@dataclass(frozen=True, slots=True)
class Window:
    """What is left of one rate."""

    limit: int
    remaining: int
    reset_s: float  # until more is left


class Limiter:
    """The rates of all keys, in memory: a restart forgets them. Thread-safe."""

    def __init__(self) -> None:
        storage = MemoryStorage()
        self._requests = MovingWindowRateLimiter(storage)
        self._tokens = FixedWindowRateLimiter(storage)

    def take_request(self, principal: Principal) -> Mapping[str, str]:
        """Count one request; the headers that say what is left. Raises `ApiError` 429 where nothing is."""
        headers: dict[str, str] = {}
        if (limit := principal.rate.tokens_per_minute) is not None:
            item = RateLimitItemPerMinute(limit)
            left = _window(limit, *self._tokens.get_window_stats(item, *_names(principal, "tokens")))
            if left.remaining == 0:
                raise _too_many(f"{limit} tokens a minute", left)
            headers |= _headers("tokens", left)
        if (limit := principal.rate.requests_per_minute) is not None:
            item, names = RateLimitItemPerMinute(limit), _names(principal, "requests")
            taken = self._requests.hit(item, *names)
            left = _window(limit, *self._requests.get_window_stats(item, *names))
            if not taken:
                raise _too_many(f"{limit} requests a minute", left)
            headers |= _headers("requests", left)
        return headers

    def charge_tokens(self, principal: Principal, tokens: int) -> None:
        """Count the tokens of an answer that is over, also past the limit."""
        limit = principal.rate.tokens_per_minute
        if limit is not None and tokens > 0:
            item: RateLimitItem = RateLimitItemPerMinute(limit)
            self._tokens.hit(item, *_names(principal, "tokens"), cost=tokens)


def check_quota(principal: Principal, what: Counted, held: int, more: int = 1) -> None:
    """Raise `ApiError` 403 if a tenant that holds `held` documents or sessions may not have `more`."""
    quota = principal.quota.documents if what == "documents" else principal.quota.sessions
    if quota is not None and held + more > quota:
        raise ApiError(
            403,
            f"This key's quota is {quota} {what}; {held} are there and {more} more were asked for. Delete some, or ask "
            "for a larger quota.",
            "permission_error",
            code="quota_exceeded",
            param=what,
        )


class Quotas:
    """What a tenant is about to have: two requests that each fit alone do not both get the last place. Thread-safe."""

    def __init__(self) -> None:
        self.ingesting = threading.Lock()  # held from the check to the last document, where there is a quota
        self._lock = threading.Lock()
        self._begun: Counter[str] = Counter()  # conversations whose first turn is under way

    @contextmanager
    def documents(self, principal: Principal, held: Callable[[], int], more: Callable[[], int]) -> Iterator[None]:
        """Store `more` documents inside; raises `ApiError` 403 if they are too many. One at a time, under a quota."""
        if principal.quota.documents is None:
            yield
            return
        with self.ingesting:
            check_quota(principal, "documents", held(), more())
            yield

    @contextmanager
    def session(self, principal: Principal, session_id: str, held: Callable[[], Collection[str]]) -> Iterator[None]:
        """Begin a conversation inside, or go on with it; raises `ApiError` 403 if it is one too many."""
        with self._lock:
            names = {*held(), *self._begun}
            check_quota(principal, "sessions", len(names), session_id not in names)
            self._begun[session_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._begun[session_id] -= 1
                if not self._begun[session_id]:
                    del self._begun[session_id]


def _names(principal: Principal, what: str) -> tuple[str, str]:
    return principal.key_id or "anyone", what


def _window(limit: int, reset_at: float, remaining: int) -> Window:
    return Window(limit, max(0, remaining), max(0.0, reset_at - time.time()))


def _headers(what: str, window: Window) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(window.limit),
        f"x-ratelimit-remaining-{what}": str(window.remaining),
        f"x-ratelimit-reset-{what}": f"{window.reset_s:.3f}s",
    }


def _too_many(rate: str, window: Window) -> ApiError:
    after_s = max(1, math.ceil(window.reset_s))
    return ApiError(
        429,
        f"This key may ask for {rate}, and has. Ask again in {after_s} s.",
        "rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=after_s,
    )


__all__ = ["Counted", "Limiter", "Window", "Quotas", "check_quota"]
