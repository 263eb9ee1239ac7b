"""What a soak found: failures by kind, counts of what happened, and latencies. Thread-safe."""

import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.api.attacks.helpers import Responses

# Kinds of failures. Each is a row of the table, and must be 0.
UNLIKE = "answers unlike the solo ones"
STATUS = "wrong statuses"
LOST_DOCUMENT = "acknowledged documents lost"
LOST_TURN = "acknowledged turns lost"
DELETED = "deleted texts found"
LEFT = "entries of deleted texts or conversations"
PROCESS = "processes that did not end as they should"
ERROR = "errors in the servers' logs"
OWN = "errors of the soak itself"
KINDS = (UNLIKE, STATUS, LOST_DOCUMENT, LOST_TURN, DELETED, LEFT, PROCESS, ERROR, OWN)

SHOWN = 20  # SHOWN is how many failures of each kind are logged in full.


class Findings:
    """The outcome of a soak so far, and its log: lines with the time since the start."""

    def __init__(self, log: Path) -> None:
        self.failures: Counter[str] = Counter()  # by kind
        self.counts: Counter[str] = Counter()
        self.latencies: dict[str, Responses] = defaultdict(Responses)
        self._began, self._lock, self._file = time.monotonic(), threading.Lock(), log.open("w", encoding="utf-8")

    def log(self, text: str) -> None:
        minutes, seconds = divmod(time.monotonic() - self._began, 60)
        with self._lock:
            for line in text.splitlines():
                shown = f"{int(minutes):3d}:{seconds:04.1f}  {line}"
                print(shown, flush=True)
                print(shown, file=self._file, flush=True)

    def fail(self, kind: str, detail: str) -> None:
        """Record a failure."""
        with self._lock:
            self.failures[kind] += 1
            is_shown = self.failures[kind] <= SHOWN
        if is_shown:
            self.log(f"FAILED {kind}: {detail}")

    def count(self, what: str, times: int = 1) -> None:
        with self._lock:
            self.counts[what] += times

    def take(self, who: str, status: int, seconds: float) -> None:
        """Record how long one of `who`'s requests took until it was answered, retries included."""
        with self._lock:
            self.latencies[who].add(status, seconds)

    def table(self) -> str:
        """The findings for people."""
        with self._lock:
            lines = ["", *(f"  {kind:<50}{self.failures[kind]:>8}" for kind in KINDS), ""]
            lines += [f"  {what:<50}{times:>8}" for what, times in sorted(self.counts.items())]
            return "\n".join([*lines, "", *(f"  {who}: {times}" for who, times in sorted(self.latencies.items()))])

    def close(self) -> None:
        self._file.close()
