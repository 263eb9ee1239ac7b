"""The course of a soak: start, solo answers, load with replacements and outages, verification, what
is left.
"""

import os
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from ragkv.config import MIB
from tests.api.attacks.helpers import Target, livez_status
from tests.api.attacks.replicas import AwayRedis
from tests.api.whole import assert_goes_on, documents, ingest

from .client import COLLECTION, Asker, Client, Solo, answered_alone
from .clients import Talker, Uploader
from .leftovers import check_leftovers
from .world import TENANTS, World

VERIFY_S = 120.0  # within this time all that was acknowledged to one client must be found
ENDS = (signal.SIGKILL, signal.SIGTERM)  # replicas are ended by one of them, in turns
OUTAGES = ("refused", "stalled")
FLAT_MINUTES = 20.0  # a shorter soak cannot say what is flat
# by so much (a factor, and a number more) the last quarter of the time may be above the second one
GROWTH = {
    "rss_mib": (1.03, 0),
    "descriptors": (1.0, 5),
    "threads": (1.0, 5),
    "home_files": (1.05, 20),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a soak does."""

    minutes: float  # under load
    out: Path  # its log, and the replicas' logs
    seed: int = 1
    behind_nginx: bool = False
    replace_every_s: float = 60.0
    outage_every_s: float = 150.0
    outage_s: float = 6.0
    reading_s: float = 5.0


def prepared(world: World) -> Solo:
    """Store what every tenant asks about; the answers without load, which are the same for all
    tenants.
    """
    for headers in world.headers.values():
        with world.serving[0].process.client(headers=headers) as client:
            assert ingest(client, documents(), name=COLLECTION).status_code == 201
    return answered_alone(world, TENANTS[0])


def clients_of(world: World, solo: Solo, seed: int = 1) -> list[Client]:
    """The clients of a mixed load: one tenant asks, the others ask, talk and store. They are not
    started yet.
    """
    kinds = {
        TENANTS[0]: (Asker, Asker),
        **dict.fromkeys(TENANTS[1:], (Talker, Talker, Uploader, Uploader)),
    }
    return [
        kind(world, solo, tenant, f"{kind.__name__.lower()}-{tenant}-{number}", seed)
        for tenant, of_tenant in kinds.items()
        for number, kind in enumerate(of_tenant)
    ]


def verify_all(world: World, clients: list[Client]) -> None:
    """Verify all that was acknowledged to clients that have ended, and that each of their
    conversations goes on.
    """
    for one in clients:
        one.stop.clear()
        late = threading.Timer(VERIFY_S, one.stop.set)
        late.start()
        one.verify()
        if one.stop.is_set():
            world.findings.fail(f"{one.name}: the verification did not end in time")
        late.cancel()
        one.close()
        with world.serving[-1].process.client(headers=world.headers[one.tenant]) as client:
            for session in one.kept if isinstance(one, Talker) else ():
                try:
                    assert_goes_on(client, session)
                except AssertionError as error:
                    world.findings.fail(f"conversation {session} does not go on: {error}")


@dataclass(slots=True)
class Soak:
    """One soak under way."""

    plan: Plan
    world: World
    clients: list[Client] = field(default_factory=list)
    # of the replica that stays, one each few seconds
    readings: list[dict[str, float]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Run to the end."""
        self.world.start("stays", "kv-stays")
        self.world.start()
        self.clients = clients_of(self.world, prepared(self.world), self.plan.seed)
        for one in self.clients:
            one.start()
        self._load()
        self.stop()
        self.world.findings.log("verifying everything that was acknowledged")
        verify_all(self.world, self.clients)
        self.world.findings.log("listing what is stored")
        check_leftovers(self.world)
        for replica in self.world.serving:
            self.world.check_log(replica)
        if self.readings[3:]:
            self._check_flat()

    def stop(self) -> None:
        """Stop the load. Twice is harmless."""
        self._ended.set()
        for one in self.clients:
            one.end()

    def _load(self) -> None:
        """Replace replicas, let Redis go away, and take readings, until the time is over."""
        ends = time.monotonic() + 60 * self.plan.minutes
        number = 0
        others = [threading.Thread(target=self._outages), threading.Thread(target=self._read)]
        for thread in others:
            thread.start()
        try:
            while time.monotonic() < ends:
                self.world.replace(ENDS[number % len(ENDS)])
                self.world.check_log(self.world.serving[0])
                number += 1
                self._ended.wait(max(0.0, min(self.plan.replace_every_s, ends - time.monotonic())))
        finally:
            self._ended.set()
            for thread in others:
                thread.join()

    def _outages(self) -> None:
        rng = Random(f"{self.plan.seed} outages")
        number = 0
        while not self._ended.wait(self.plan.outage_every_s * rng.uniform(0.5, 1.5)):
            self.world.outage(
                OUTAGES[number % len(OUTAGES)],
                self.plan.outage_s * rng.uniform(0.5, 1.5),
                self._ended,
            )
            number += 1

    def _read(self) -> None:
        """Take readings of the replica that stays, whose /livez must answer, whatever the others
        do.
        """
        stays = self.world.serving[0]
        findings = self.world.findings
        up = Target(stays.process, {}, {}, stays.port).system
        while not self._ended.wait(self.plan.reading_s):
            if (status := livez_status(stays.port)) != 200:
                findings.fail(f"/livez: {status}")
            shared = [one for one in self.world.home.iterdir() if not one.name.startswith("kv-")]
            files = sum(len(names) for folder in shared for _, _, names in os.walk(folder))
            values = (up.memory_info().rss / MIB, up.num_fds(), up.num_threads(), files)
            self.readings.append(dict(zip(GROWTH, values, strict=True)))
            findings.log(
                ", ".join(f"{name} {value:.0f}" for name, value in self.readings[-1].items())
            )

    def _check_flat(self) -> None:
        """Tell the second and the last quarter of the time; in a long soak the last has no more,
        but for `GROWTH`.
        """
        size = len(self.readings) // 4
        for name, (factor, more) in GROWTH.items():
            quarters = (
                sorted(one[name] for one in self.readings[n * size : (n + 1) * size])
                for n in (1, 3)
            )
            # low: what runs at that moment comes on top
            second, last = (found[size // 10] for found in quarters)
            told = f"{name}: {second:.0f} in the second quarter, {last:.0f} in the last"
            self.world.findings.log(told)
            if self.plan.minutes >= FLAT_MINUTES and last > second * factor + more:
                self.world.findings.fail(f"not flat: {told}")


def soak(plan: Plan) -> list[str]:
    """Run a soak and print what happened; returns the failures."""
    plan.out.mkdir(parents=True, exist_ok=True)
    for before in plan.out.glob("*.log"):
        before.unlink()
    with ExitStack() as stack:
        home = Path(
            stack.enter_context(
                TemporaryDirectory(prefix="ragkv-soak-", ignore_cleanup_errors=True)
            )
        )
        away = AwayRedis("--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru")
        stack.callback(away.close)
        world = World(home, plan.out, away, plan.behind_nginx)
        stack.callback(world.close)
        running = Soak(plan, world)
        stack.callback(running.stop)
        running.run()
        counts = [f"{what:<50}{times:>8}" for what, times in sorted(world.findings.counts.items())]
        world.findings.log("\n".join([f"{len(world.findings.failures)} failures", *counts]))
    return world.findings.failures
