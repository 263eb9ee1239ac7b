"""How fast a count grows, when it reaches its total, and both in words. Pure Python."""

import time
from collections import deque

from ragkv.errors import ConfigError

# The time of which the rate is measured: what was stored already takes no time.
WINDOW_S = 60.0


class Rate:
    """How fast a count grows, and when it will reach its total."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()  # time, done
        self._left = 0.0

    def update(self, done: float, total: float) -> None:
        """The count is `done` now. The time before it first grew does not count: it went to work
        that is done only once.
        """
        now = time.monotonic()
        if done and self._seen and not self._seen[0][1]:
            self._seen.clear()
        self._left = total - done
        self._seen.append((now, done))
        while now - self._seen[0][0] > WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()

    @property
    def per_s(self) -> float:
        """How much it grew in a second of the last minute; 0 while nothing is known."""
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if ended - began > 0.5 else 0.0

    @property
    def left(self) -> str:
        """Such as ", about 2 min 5 s left"; empty while nothing is known."""
        return (
            f", about {duration(self._left / self.per_s)} left"
            if self._seen and self.per_s > 0
            else ""
        )


def seconds_of(text: str) -> float:
    """Parse a duration such as "90", "90s" or "2h", in seconds. Raises `ConfigError`."""
    number, unit = (text[:-1], text[-1:]) if text[-1:] in ("s", "m", "h") else (text, "s")
    try:
        return float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError as error:
        raise ConfigError(f"{text!r} is no time; give such as 90s, 10m or 2h.") from error


def counted(count: int, noun: str) -> str:
    """Such as 1 passage, 2 passages or 3 entries: every count of things that is shown to people."""
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {noun if count == 1 else many}"


def duration(seconds: float) -> str:
    """A duration in words, such as "3 min 20 s"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
