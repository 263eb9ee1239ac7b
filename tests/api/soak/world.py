"""What a soak runs against: a Redis server that goes away at times, a replica that stays, and one that is replaced.

Both replicas share a home. Each has its own KV directory; the replaced one has two in turns, because a replica starts
before the one that it replaces ends.
"""

import itertools
import json
import queue
import random
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ragkv.config import MIB
from tests.api import serving
from tests.api.attacks.helpers import Target, runs, wait_until
from tests.api.attacks.replicas import AwayRedis, process_settings
from tests.api.whole import key, server

from .findings import ERROR, PROCESS, Findings

BYSTANDER = "bystander"  # The tenant BYSTANDER asks only.
TENANTS = (BYSTANDER, "town", "city")
SECRET = "SOAK_SECRET"  # SECRET is the variable with the secret of what replicas share.
SETTINGS = {  # SETTINGS are small, so that every bound is reached within minutes.
    "RAGKV_STORE__MEMORY_BYTES": str(8 * MIB),
    "RAGKV_STORE__DISK_BYTES": str(32 * MIB),
    "RAGKV_STORE__REDIS__MAX_BYTES": str(32 * MIB),
    "RAGKV_STORE__REDIS__SECRET_VARIABLE": SECRET,
}
REDIS_TIMEOUT_S = 3.0  # REDIS_TIMEOUT_S is above 1 s, the default: the proxy shares its processor with the clients.
GRACEFUL_S, CLOSE_S = 30.0, 10.0  # GRACEFUL_S and CLOSE_S are the settings' defaults.
RECOVERY_S = 15.0  # RECOVERY_S pass after Redis is back until every replica has noticed.
LATE_S = 2.0  # A request that was sent LATE_S before SIGTERM has arrived.
ORPHAN_S = 30.0  # For ORPHAN_S the parsers of a killed replica may finish what they parse.


@dataclass(slots=True)
class Replica:
    """A server process."""

    name: str
    process: serving.Process
    stack: ExitStack
    kv: Path  # its KV directory
    ended_by: signal.Signals | None = None
    ended_at: float = 0.0  # when it was sent the signal


@dataclass(slots=True)
class World:
    """The processes of one soak."""

    home: Path
    logs: Path  # the folder of the replicas' logs
    findings: Findings
    redis: AwayRedis
    serving: list[Replica] = field(default_factory=list)  # the replicas that take requests; the first one stays
    replacements: int = 0
    headers: dict[str, dict[str, str]] = field(default_factory=dict)  # of each tenant
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _outages: list[tuple[float, float]] = field(default_factory=list)  # from, to
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _all: list[ExitStack] = field(default_factory=list)

    @property
    def staying(self) -> Target:
        """The replica that is never replaced."""
        return Target(self.serving[0].process, {}, self.headers[BYSTANDER], 0.0, self.home)

    def open(self) -> None:
        """Start the replica that stays, and the first one that will be replaced."""
        self.headers = {name: key(self.home, name, tenant=name) for name in TENANTS}
        self.serving.append(self._start("stays", "kv-stays"))
        self.start()

    def start(self) -> None:
        """Start a replica that will be replaced; it takes requests once it is ready."""
        number = next(self._numbers)
        replica = self._start(f"replaced-{number}", f"kv-replaced-{number % 2}")
        with self._lock:
            self.serving.append(replica)

    def choose(self, rng: random.Random) -> Replica:
        """A replica that takes requests."""
        with self._lock:
            return rng.choice(self.serving)

    def replace(self, by: signal.Signals, lag_s: float = 0.5) -> None:
        """Start a replica, then end the older of the replaced ones; clients send to it for `lag_s` longer."""
        self.start()
        ending = self.serving[1]
        children = Target(ending.process, {}, {}, 0.0, self.home).children()
        ending.ended_by, ending.ended_at = by, time.monotonic()
        ending.process.signal(by)
        time.sleep(lag_s)
        with self._lock:
            self.serving.remove(ending)
        self._check_end(ending, by, children)
        with suppress(queue.Empty):  # the last lines of its log
            ending.process.wait_for(lambda line: line["event"] == "EOF", 5.0)
        self._check_log(ending)
        ending.stack.close()
        self.replacements += 1
        self.findings.count("replacements")
        self.findings.count(f"replacements by {by.name}")

    def outage(self, how: str, seconds: float, stop: threading.Event) -> None:
        """Let Redis go away for some seconds."""
        began = time.monotonic()
        with self._lock:
            self._outages.append((began, float("inf")))
        self.redis.leave(how)
        stop.wait(seconds)
        self.redis.come_back()
        with self._lock:
            self._outages[-1] = began, time.monotonic()
        self.findings.count("outages of Redis")
        self.findings.count("seconds without Redis", round(time.monotonic() - began))

    def redis_was_away(self, since: float) -> bool:
        """Whether Redis was away after `since`, or so shortly before that a replica may not know that it is back."""
        with self._lock:
            return any(ended + RECOVERY_S >= since for _, ended in self._outages)

    def may_break(self, replica: Replica, began: float) -> bool:
        """Whether a request to `replica` that began then may end with a broken connection."""
        if replica.ended_by is signal.SIGKILL:
            return True
        arrived = began < replica.ended_at - LATE_S
        return replica.ended_by is signal.SIGTERM and (not arrived or time.monotonic() > replica.ended_at + GRACEFUL_S)

    def may_refuse(self, replica: Replica) -> bool:
        """Whether `replica` may say that it shuts down."""
        return replica.ended_by is signal.SIGTERM

    def check_logs(self) -> None:
        """Record the errors in the logs of the replicas that run, and forget the lines."""
        for replica in list(self.serving):
            self._check_log(replica)

    def close(self) -> None:
        """End every process."""
        for stack in self._all:
            stack.close()

    def _start(self, name: str, kv: str) -> Replica:
        shared = process_settings(self.home / kv, self.redis.url, REDIS_TIMEOUT_S)
        settings = {**shared, **SETTINGS, SECRET: self.secret}
        stack, began = ExitStack(), time.monotonic()
        self._all.append(stack)
        replica = Replica(name, stack.enter_context(server(self.home, settings)), stack, self.home / kv)
        self.findings.log(f"replica {name} is ready after {time.monotonic() - began:.1f} s")
        return replica

    def _check_end(self, replica: Replica, by: signal.Signals, children: list[int]) -> None:
        """Wait for a replica's end, and record it unless it ended as the signal says, with all its children."""
        try:
            status = replica.process.ended(GRACEFUL_S + CLOSE_S + 5.0)
        except Exception as error:
            self.findings.fail(PROCESS, f"{replica.name} did not end after {by.name}: {error}")
            return
        expected = 0 if by is signal.SIGTERM else -by
        if status != expected:
            self.findings.fail(PROCESS, f"{replica.name} ended with status {status} after {by.name}, not {expected}")
        if not wait_until(lambda: not any(runs(child) for child in children), ORPHAN_S):
            self.findings.fail(PROCESS, f"{replica.name} left processes behind: {[c for c in children if runs(c)]}")
        seconds = time.monotonic() - replica.ended_at
        self.findings.log(f"replica {replica.name} ended by {by.name} within {seconds:.1f} s")

    def _check_log(self, replica: Replica) -> None:
        """Move the lines of a replica's log to its file, and record the errors."""
        with (self.logs / f"{replica.name}.log").open("a", encoding="utf-8") as file:
            for line in replica.process.take_lines():
                file.write(json.dumps(line) + "\n")
                if line.get("level") == "warning":
                    self.findings.count("warnings in the servers' logs")
                if line.get("level") in ("error", "critical") or line["event"] in ("", "ended_by_force"):
                    self.findings.fail(ERROR, f"{replica.name}: {json.dumps(line)[:2000]}")
