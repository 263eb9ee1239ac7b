"""What a soak found: failures by kind, refusals that the API documents, counts, and latencies. Thread-safe."""

import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TextIO

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

SHOWN = 20  # failures of each kind that are kept and logged in full


class Log:
    """Lines with the time since the start, on standard output and in a file."""

    def __init__(self, path: Path) -> None:
        self._began, self._lock = time.monotonic(), threading.Lock()
        self._file: TextIO = path.open("w", encoding="utf-8")

    def __call__(self, text: str) -> None:
        minutes, seconds = divmod(time.monotonic() - self._began, 60)
        with self._lock:
            for line in text.splitlines():
                shown = f"{int(minutes):3d}:{seconds:04.1f}  {line}"
                print(shown, flush=True)
                print(shown, file=self._file, flush=True)

    def close(self) -> None:
        self._file.close()


class Findings:
    """The outcome of a soak so far."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.failures: Counter[str] = Counter()  # by kind
        self.details: dict[str, list[str]] = defaultdict(list)
        self.refusals: Counter[str] = Counter()  # documented ones, by their code
        self.statuses: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()
        self.latencies: dict[str, Responses] = defaultdict(Responses)
        self.is_open = True  # nothing is recorded once the soak is interrupted
        self._lock = threading.Lock()

    def fail(self, kind: str, detail: str) -> None:
        """Record a failure."""
        with self._lock:
            if not self.is_open:
                return
            self.failures[kind] += 1
            is_shown = self.failures[kind] <= SHOWN
            if is_shown:
                self.details[kind].append(detail)
        if is_shown:
            self.log(f"FAILED {kind}: {detail}")

    def count(self, what: str, times: int = 1) -> None:
        with self._lock:
            self.counts[what] += times

    def respond(self, status: int) -> None:
        """Count a response; status 0 is a broken connection."""
        with self._lock:
            self.statuses[status] += 1

    def refuse(self, code: str) -> None:
        """Count a refusal that the API documents for that moment."""
        with self._lock:
            self.refusals[code] += 1

    def take(self, who: str, seconds: float) -> None:
        """Record how long one of `who`'s requests took until it was answered, retries included."""
        with self._lock:
            self.latencies[who].add(200, seconds)

    def close(self) -> None:
        """Record nothing more."""
        with self._lock:
            self.is_open = False

    def progress(self) -> str:
        """One line about the soak so far."""
        with self._lock:
            answered = sum(count for status, count in self.statuses.items() if 200 <= status < 300)
            requests, refused = sum(self.statuses.values()), sum(self.refusals.values())
            counts = self.counts
            return (
                f"{requests} requests, {answered} answered, {refused} refused as documented, "
                f"{counts['answers compared']} answers compared, {counts['documents acknowledged']} documents, "
                f"{counts['turns acknowledged']} turns, {counts['replacements']} replacements, "
                f"{sum(self.failures.values())} failures"
            )
