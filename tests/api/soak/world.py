"""What a load runs against: server processes on one home, each with a KV directory of its own, and
what was found.

In a soak one replica stays, and the others are replaced; each of these has one of two KV
directories in turns, because a replica starts before the one that it replaces ends. A Redis server
that goes away at times is shared by all.
"""

import itertools
import json
import queue
import random
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from ragkv.config import MIB
from tests.api import serving
from tests.api.attacks.front import BEHIND, nginx
from tests.api.attacks.helpers import Target, runs
from tests.api.attacks.replicas import AwayRedis, process_settings
from tests.api.whole import key, server
from tests.scheduling.helpers import until

TENANTS = ("bystander", "town", "city")  # the first one only asks
LETTERS = "bcdfghjklmnpqrstvz"  # of the words that only one document holds
SECRET = "SOAK_SECRET"  # the variable with the secret of what replicas share
SETTINGS = {  # small, so that every bound is reached within minutes
    "RAGKV_STORE__MEMORY_BYTES": str(8 * MIB),
    "RAGKV_STORE__DISK_BYTES": str(32 * MIB),
    "RAGKV_STORE__REDIS__SECRET_VARIABLE": SECRET,
}
REDIS_TIMEOUT_S = 3.0  # above 1 s, the default: the proxy shares its processor with the clients
# the settings' defaults
GRACEFUL_S = 30.0
CLOSE_S = 10.0
RECOVERY_S = 15.0  # after Redis is back every replica notices within this time
LATE_S = 2.0  # a request that was sent so long before SIGTERM has arrived
ORPHAN_S = 30.0  # for so long the parsers of a killed replica may finish what they parse
SHOWN = 50  # failures that are logged in full


class Findings:
    """What was found so far, and its log: lines with the time since the start. Thread-safe."""

    def __init__(self, log: Path) -> None:
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._log = log

    def log(self, text: str) -> None:
        minutes, seconds = divmod(time.monotonic() - self._began, 60)
        with self._lock, self._log.open("a", encoding="utf-8") as file:
            for line in text.splitlines():
                shown = f"{int(minutes):3d}:{seconds:04.1f}  {line}"
                print(shown, flush=True)
                print(shown, file=file)

    def fail(self, detail: str) -> None:
        """Record a failure."""
        self.failures.append(detail)
        if len(self.failures) <= SHOWN:
            self.log(f"FAILED: {detail}")

    def count(self, what: str, times: int = 1) -> None:
        with self._lock:
            self.counts[what] += times


@dataclass(slots=True)
class Replica:
    """A server process."""

    name: str
    process: serving.Process
    port: int  # nginx's in front of it, or its own
    stack: ExitStack
    kv: Path  # its KV directory
    ended_by: signal.Signals | None = None
    ended_at: float = 0.0  # when it was sent the signal


@dataclass(slots=True)
class World:
    """The processes under one load. `redis=None`: they have no shared storage."""

    home: Path
    logs: Path  # the folder of the logs
    redis: AwayRedis | None = None
    behind_nginx: bool = False
    # those that take requests; in a soak the first one stays
    serving: list[Replica] = field(default_factory=list)
    replacements: int = 0
    headers: dict[str, dict[str, str]] = field(default_factory=dict)  # of each tenant
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    findings: Findings = field(init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _outages: list[tuple[float, float]] = field(default_factory=list)  # from, to
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _all: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.findings = Findings(self.logs / "soak.log")
        self.headers = {name: key(self.home, name, tenant=name) for name in TENANTS}

    def start(self, name: str = "", kv: str = "") -> Replica:
        """Start a replica; it takes requests once it is ready. Without a name it is one that will
        be replaced.
        """
        number = next(self._numbers)
        name = name or f"replaced-{number}"
        folder = self.home / (kv or f"kv-{number % 2}")
        settings: dict[str, str] = BEHIND if self.behind_nginx else {}
        if self.redis is not None:
            settings = {
                **settings,
                **process_settings(folder, self.redis.url, REDIS_TIMEOUT_S),
                **SETTINGS,
                SECRET: self.secret,
            }
        stack = ExitStack()
        began = time.monotonic()
        self._all.callback(stack.close)
        process = stack.enter_context(server(self.home, settings))
        port = process.port
        if self.behind_nginx:
            port = stack.enter_context(nginx(Path(stack.enter_context(TemporaryDirectory())), port))
        replica = Replica(name, process, port, stack, folder)
        self.findings.log(f"replica {name} is ready after {time.monotonic() - began:.1f} s")
        with self._lock:
            self.serving = [*(one for one in self.serving if one.ended_by is None), replica]
        return replica

    def choose(self, rng: random.Random) -> Replica:
        """A replica that takes requests."""
        with self._lock:
            return rng.choice(self.serving)

    def end(self, replica: Replica, by: signal.Signals, lag_s: float = 0.5) -> None:
        """End a replica: as the signal says, with all its children. Clients send to it for `lag_s`
        longer.
        """
        children = Target(replica.process, {}, {}, replica.port).children()
        self.check_log(replica)
        replica.ended_by, replica.ended_at = by, time.monotonic()
        replica.process.signal(by)
        time.sleep(lag_s)
        with self._lock:  # the only one is asked in vain until there is another
            self.serving = [one for one in self.serving if one is not replica] or [replica]
        status = replica.process.ended(GRACEFUL_S + CLOSE_S + 5.0)
        expected = 0 if by is signal.SIGTERM else -by
        if status != expected:
            self.findings.fail(
                f"{replica.name} ended with status {status} after {by.name}, not {expected}"
            )
        with suppress(AssertionError):
            until(lambda: not any(runs(child) for child in children), ORPHAN_S, 0.05)
        if left := [child for child in children if runs(child)]:
            self.findings.fail(f"{replica.name} left processes behind: {left}")
        with suppress(queue.Empty, AssertionError):  # the last lines of its log
            replica.process.wait_for(lambda line: line["event"] == "EOF", 5.0)
        self.check_log(replica)
        replica.stack.close()
        self.findings.count(f"replicas ended by {by.name}")

    def replace(self, by: signal.Signals) -> None:
        """Start a replica, then end the older of the replaced ones."""
        self.start()
        self.end(self.serving[1], by)
        self.replacements += 1

    def outage(self, how: str, seconds: float, stop: threading.Event) -> None:
        """Let Redis go away for some seconds."""
        assert self.redis is not None
        self.findings.log(f"Redis is away ({how})")
        began = time.monotonic()
        with self._lock:
            self._outages.append((began, float("inf")))
        self.redis.leave(how)
        stop.wait(seconds)
        self.redis.come_back()
        with self._lock:
            self._outages[-1] = began, time.monotonic()
        self.findings.count("outages of Redis")

    def allows(self, replica: Replica, code: str, began: float, named: bool) -> bool:
        """Whether a request to `replica` that began then may end so; `named`: it names a
        conversation.
        """
        if code == "connection":
            is_late = (
                began >= replica.ended_at - LATE_S
                or time.monotonic() > replica.ended_at + GRACEFUL_S
            )
            return replica.ended_by is signal.SIGKILL or (
                replica.ended_by is signal.SIGTERM and is_late
            )
        if code == "shutting_down":
            return replica.ended_by is signal.SIGTERM
        with self._lock:  # a replica may not know yet that Redis is back
            is_away = any(ended + RECOVERY_S >= began for _, ended in self._outages)
        return code == "session_unavailable" and named and is_away

    def check_log(self, replica: Replica) -> None:
        """Move the lines of a replica's log to its file, and record the errors."""
        # the parsers that it leaves behind tell of it in plain lines
        is_killed = replica.ended_by is signal.SIGKILL
        odd = ("ended_by_force",) if is_killed else ("", "ended_by_force")
        with (self.logs / f"{replica.name}.log").open("a", encoding="utf-8") as file:
            for line in replica.process.take_lines():
                file.write(json.dumps(line) + "\n")
                if line.get("level") in ("error", "critical") or line["event"] in odd:
                    self.findings.fail(f"{replica.name}: {json.dumps(line)[:2000]}")

    def close(self) -> None:
        """End every process."""
        self._all.close()
