"""The course of a soak: start, solo answers, a quiet time, load with replacements and outages, verification, table."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TypeVar

from tests.api.attacks.replicas import AwayRedis
from tests.api.whole import assert_goes_on

from .askers import Asking, Bystander, Cutter, Talker
from .attackers import Flooder, Malformer, Poisoner
from .caller import Caller
from .findings import LOST_TURN, Findings, Log
from .leftovers import check_leftovers
from .readings import Readings
from .report import failures, table
from .solo import Solo, answer_alone, store_examples
from .uploaders import Racer, Uploader
from .workers import Worker
from .world import BYSTANDER, FLOOD, World, without_interrupts

W = TypeVar("W", bound=Worker)

PROGRESS_S = 10.0
VERIFY_S = 120.0  # in which all that was acknowledged to one worker must be found
ENDS = (signal.SIGKILL, signal.SIGTERM)  # how replicas are ended, in turns
OUTAGES = ("refused", "stalled")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a soak does."""

    minutes: float  # under load
    out: Path  # log, readings, the replicas' logs
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
    readings: Readings
    workers: list[Worker] = field(default_factory=list)
    began: float = 0.0  # of the load
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Run to the end. Raises `KeyboardInterrupt`."""
        self.world.open()
        solo = self._solo()
        bystanders = self._bystanders(solo)
        self._start(bystanders)
        self._wait(self.plan.quiet_s)
        for one in bystanders:
            one.phase = "load"
        self._start(self._others(solo))
        self.began = time.monotonic()
        self.readings.start()
        self._load()
        self.stop()
        self.findings.log("verifying everything that was acknowledged")
        self._verify()
        self.findings.log("listing what is stored")
        check_leftovers(self.world, self.findings)
        self.world.check_logs()

    @property
    def minutes(self) -> float:
        """How long the load has lasted."""
        return (min(time.monotonic(), self._ends) - self.began) / 60 if self.began else 0.0

    @property
    def _ends(self) -> float:
        return self.began + 60 * self.plan.minutes

    def stop(self) -> None:
        """Stop the load."""
        self._stop.set()
        for worker in self.workers:
            worker.stop.set()
        for worker in self.workers:
            worker.join()
        if self.began:
            self.readings.stop()

    def _solo(self) -> Solo:
        """Store what every tenant asks about; the answers without load, which are the same for all tenants."""
        stays = self.world.serving[0]
        for tenant in self.world.headers:
            caller = Caller(self.world, self.findings, tenant)
            store_examples(caller, stays)
            if tenant == FLOOD:
                assert caller.send(stays, "POST", "/v1/collections", (201,), json={"name": "facts"}).is_answered
            caller.close()
        caller = Caller(self.world, self.findings, BYSTANDER)
        solo = answer_alone(caller, stays)
        caller.close()
        self.findings.log(f"solo answers: {len(solo.questions)} questions, {len(solo.talks)} conversations")
        return solo

    def _bystanders(self, solo: Solo) -> list[Bystander]:
        found = [self._worker(Bystander, BYSTANDER, number) for number in range(2)]
        for number, one in enumerate(found):
            one.solo, one.stays = solo, number == 0
        return found

    def _others(self, solo: Solo) -> list[Worker]:
        people: list[Worker] = []
        for tenant in ("town", "city"):
            people += [self._worker(Talker, tenant, number) for number in range(2)]
            people += [self._worker(Cutter, tenant, 0), self._worker(Uploader, tenant, 0)]
        people += [self._worker(Uploader, "town", 1)]
        people += [self._worker(Racer, "city", number) for number in range(2)]
        people += [self._worker(Flooder, FLOOD, 0), self._worker(Poisoner, FLOOD, 0), self._worker(Malformer, FLOOD, 0)]
        for one in people:
            if isinstance(one, Asking):
                one.solo = solo
        return people

    def _worker(self, kind: type[W], tenant: str, number: int) -> W:
        name = f"{kind.__name__.lower()}-{tenant}-{number}"
        return kind(self.world, self.findings, tenant, name, self.plan.seed)

    def _start(self, workers: Sequence[Worker]) -> None:
        self.workers += workers
        for worker in workers:
            worker.start()

    def _load(self) -> None:
        """Replace replicas, and let Redis go away, until the time is over."""
        outages = threading.Thread(target=self._outages, name="outages")
        outages.start()
        try:
            number = 0
            while time.monotonic() < self._ends:
                self.world.replace(ENDS[number % len(ENDS)])
                self.world.check_logs()
                number += 1
                self._wait(min(self.plan.replace_every_s, self._ends - time.monotonic()))
        finally:
            self._stop.set()
            outages.join()

    def _outages(self) -> None:
        rng, number = Random(f"{self.plan.seed} outages"), 0
        while not self._stop.wait(self.plan.outage_every_s * rng.uniform(0.5, 1.5)):
            how, number = OUTAGES[number % len(OUTAGES)], number + 1
            self.findings.log(f"Redis is away ({how})")
            self.world.outage(how, self.plan.outage_s * rng.uniform(0.5, 1.5), self._stop)
            self.findings.log("Redis is back")

    def _wait(self, seconds: float) -> None:
        """Let time pass."""
        self._stop.wait(max(0.0, seconds))

    def _verify(self) -> None:
        """Verify all that was acknowledged, and that a conversation of each client goes on."""
        for worker in self.workers:
            worker.stop.clear()
            late = threading.Timer(VERIFY_S, worker.give_up)
            late.start()
            worker.verify()
            late.cancel()
            if isinstance(worker, Talker):
                for session in worker.ended():
                    self._assert_goes_on(worker, session)
            worker.caller.close()

    def _assert_goes_on(self, worker: Talker, session: str) -> None:
        headers = self.world.headers[worker.caller.tenant]
        with self.world.serving[-1].process.client(headers=headers) as client:
            try:
                assert_goes_on(client, session)
                self.findings.count("conversations continued at the end")
            except AssertionError as error:
                self.findings.fail(LOST_TURN, f"conversation {session} does not go on: {error}")


def soak(plan: Plan) -> list[str]:
    """Run a soak and print its table; returns the checks that failed."""
    plan.out.mkdir(parents=True, exist_ok=True)
    for before in plan.out.glob("*.log"):
        before.unlink()
    log = Log(plan.out / "soak.log")
    findings = Findings(log)
    with ExitStack() as stack:
        stack.callback(log.close)
        home = Path(stack.enter_context(TemporaryDirectory(prefix="ragkv-soak-", ignore_cleanup_errors=True)))
        with without_interrupts():
            redis = AwayRedis()
        stack.callback(redis.close)
        world = World(home, plan.out, findings, redis)
        stack.callback(world.close)
        readings = Readings(world, plan.out / "readings.csv", plan.reading_s)
        running = Soak(plan, world, findings, readings)
        with _progress(running):
            try:
                running.run()
            except KeyboardInterrupt:
                findings.close()
                log("interrupted")
                running.stop()
                log(table(findings, readings, running.minutes))
                return [*failures(findings, readings, 0.0), "interrupted"]
        log(table(findings, readings, plan.minutes))
        return failures(findings, readings, plan.minutes)


@contextmanager
def _progress(running: Soak) -> Iterator[None]:
    """A line every ten seconds."""
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(PROGRESS_S):
            running.findings.log(f"{running.findings.progress()}; {running.readings.progress()}")

    thread = threading.Thread(target=show, name="progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
