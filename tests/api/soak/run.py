"""The course of a soak: start, solo answers, a quiet time, load with replacements and outages, verification, table."""

import os
import signal
import statistics
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TypeVar

import redis

from ragkv.config import MIB
from tests.api.attacks.helpers import livez_status
from tests.api.attacks.replicas import AwayRedis
from tests.api.whole import assert_goes_on, documents, ingest

from .caller import Caller
from .clients import Bystander, Cutter, Talker, Worker
from .findings import KINDS, LOST_TURN, OWN, STATUS, Findings
from .leftovers import check_leftovers
from .solo import COLLECTION, Solo, answer_alone
from .uploaders import Uploader
from .world import BYSTANDER, World

W = TypeVar("W", bound=Worker)

VERIFY_S = 120.0  # Within VERIFY_S all that was acknowledged to one client must be found.
ENDS = (signal.SIGKILL, signal.SIGTERM)  # Replicas are ended by one of ENDS, in turns.
OUTAGES = ("refused", "stalled")
FLAT_MINUTES = 20.0  # A soak of less than FLAT_MINUTES is not long enough to say what is flat.
GROWTH = {  # By GROWTH (a factor, and a number more) the last quarter of the time may be above the second one.
    "rss_mib": (1.03, 0),
    "descriptors": (1.0, 5),
    "threads": (1.0, 5),
    "redis_mib": (1.05, 20),
    "home_files": (1.05, 20),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a soak does."""

    minutes: float  # under load
    out: Path  # its log, and the replicas' logs
    seed: int = 1
    quiet_s: float = 60.0
    replace_every_s: float = 60.0
    outage_every_s: float = 150.0
    outage_s: float = 6.0
    reading_s: float = 5.0


@dataclass(slots=True)
class Soak:
    """One soak under way."""

    plan: Plan
    world: World
    findings: Findings
    workers: list[Worker] = field(default_factory=list)
    readings: list[dict[str, float]] = field(default_factory=list)  # of the replica that stays, one each few seconds
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Run to the end."""
        self.world.open()
        solo = self._solo()
        bystanders = [self._begin(Bystander, solo, BYSTANDER, number) for number in range(2)]
        time.sleep(self.plan.quiet_s)
        for one in bystanders:
            one.phase = "load"
        for tenant in ("town", "city"):
            for kind, number in ((Talker, 0), (Talker, 1), (Cutter, 0), (Uploader, 0), (Uploader, 1)):
                self._begin(kind, solo, tenant, number)
        self._load()
        self.stop()
        self.findings.log("verifying everything that was acknowledged")
        for worker in self.workers:
            self._verify(worker)
        self.findings.log("listing what is stored")
        check_leftovers(self.world, self.findings)
        self.world.check_logs()
        if self.plan.minutes >= FLAT_MINUTES:
            self._assert_flat()

    def stop(self) -> None:
        """Stop the load. Twice is harmless."""
        self._ended.set()
        for worker in self.workers:
            worker.stop.set()
        for worker in self.workers:
            worker.thread.join()

    def _solo(self) -> Solo:
        """Store what every tenant asks about; the answers without load, which are the same for all tenants."""
        stays = self.world.serving[0]
        for headers in self.world.headers.values():
            with stays.process.client(headers=headers) as client:
                assert ingest(client, documents(), name=COLLECTION).status_code == 201
        caller = Caller(self.world, self.findings, BYSTANDER)
        solo = answer_alone(caller, stays)
        caller.close()
        self.findings.log(f"solo answers: {len(solo.questions)} questions, {len(solo.talks)} conversations")
        return solo

    def _begin(self, kind: type[W], solo: Solo, tenant: str, number: int) -> W:
        name = f"{kind.__name__.lower()}-{tenant}-{number}"
        worker = kind(self.world, self.findings, solo, tenant, name, self.plan.seed)
        self.workers.append(worker)
        worker.thread.start()
        return worker

    def _load(self) -> None:
        """Replace replicas, let Redis go away, and take readings, until the time is over."""
        ends = time.monotonic() + 60 * self.plan.minutes
        others = [threading.Thread(target=self._outages), threading.Thread(target=self._read)]
        for thread in others:
            thread.start()
        try:
            number = 0
            while time.monotonic() < ends:
                self.world.replace(ENDS[number % len(ENDS)])
                self.world.check_logs()
                number += 1
                self._ended.wait(max(0.0, min(self.plan.replace_every_s, ends - time.monotonic())))
        finally:
            self._ended.set()
            for thread in others:
                thread.join()

    def _outages(self) -> None:
        rng, number = Random(f"{self.plan.seed} outages"), 0
        while not self._ended.wait(self.plan.outage_every_s * rng.uniform(0.5, 1.5)):
            how, number = OUTAGES[number % len(OUTAGES)], number + 1
            self.findings.log(f"Redis is away ({how})")
            self.world.outage(how, self.plan.outage_s * rng.uniform(0.5, 1.5), self._ended)

    def _read(self) -> None:
        """Take readings of the replica that stays, and time its /livez."""
        up = self.world.staying
        while not self._ended.wait(self.plan.reading_s):
            began = time.monotonic()
            status = livez_status(up.process.port)
            self.findings.take("/livez of the replica that stays", status, time.monotonic() - began)
            if status != 200:
                self.findings.fail(STATUS, f"/livez: {status}")
            with redis.Redis(unix_socket_path=self.world.redis.server.socket) as client:
                redis_mib = client.info("memory")["used_memory"] / MIB
            shared = [one for one in self.world.home.iterdir() if not one.name.startswith("kv-")]
            files = sum(len(names) for folder in shared for _, _, names in os.walk(folder))
            values = (up.rss_bytes() / MIB, up.descriptors(), up.threads(), redis_mib, files)
            self.readings.append(dict(zip(GROWTH, values, strict=True)))
            self.findings.log(", ".join(f"{name} {value:.0f}" for name, value in self.readings[-1].items()))

    def _assert_flat(self) -> None:
        """The last quarter of the time has no more than the second one, but for `GROWTH`."""
        size = len(self.readings) // 4
        for name, (factor, more) in GROWTH.items():
            quarters = [
                statistics.median(reading[name] for reading in self.readings[n * size : (n + 1) * size])
                for n in range(4)
            ]
            if quarters[3] > quarters[1] * factor + more:
                self.findings.fail(OWN, f"{name} is not flat: {quarters}")

    def _verify(self, worker: Worker) -> None:
        """Verify all that was acknowledged to a client, and that each of its ended conversations goes on."""
        worker.stop.clear()
        late = threading.Timer(VERIFY_S, worker.stop.set)
        late.start()
        worker.verify()
        if worker.stop.is_set():
            self.findings.fail(STATUS, f"{worker.name}: the verification at the end did not end in time")
        late.cancel()
        if isinstance(worker, Talker):
            with self.world.serving[-1].process.client(headers=self.world.headers[worker.caller.tenant]) as client:
                for session in worker.kept:
                    try:
                        assert_goes_on(client, session)
                        self.findings.count("conversations continued at the end")
                    except AssertionError as error:
                        self.findings.fail(LOST_TURN, f"conversation {session} does not go on: {error}")
        worker.caller.close()


def soak(plan: Plan) -> list[str]:
    """Run a soak and print its table; returns the checks that failed."""
    plan.out.mkdir(parents=True, exist_ok=True)
    for before in plan.out.glob("*.log"):
        before.unlink()
    findings = Findings(plan.out / "soak.log")
    with ExitStack() as stack:
        stack.callback(findings.close)
        home = Path(stack.enter_context(TemporaryDirectory(prefix="ragkv-soak-", ignore_cleanup_errors=True)))
        away = AwayRedis()
        stack.callback(away.close)
        world = World(home, plan.out, findings, away)
        stack.callback(world.close)
        running = Soak(plan, world, findings)
        stack.callback(running.stop)
        running.run()
        findings.log(findings.table())
    return [f"{findings.failures[kind]} {kind}" for kind in KINDS if findings.failures[kind]]
