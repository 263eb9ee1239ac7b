"""What every worker of a soak does: steps until it is stopped, and verifications after each replacement."""

import random
import threading
import time
import traceback
from abc import ABC, abstractmethod
from typing import Any

from .caller import Caller, Reply
from .findings import OWN, STATUS, Findings
from .world import World

SAMPLE = 3  # acknowledged things that a worker verifies after each replacement
RETRY_S = 0.1  # between two attempts


class Worker(ABC):
    """One client of the service, on its own thread. What it does follows from the seed and its name."""

    every_s = 1.0  # between the beginnings of two steps

    def __init__(self, world: World, findings: Findings, tenant: str, name: str, seed: int) -> None:
        self.world, self.findings, self.name = world, findings, name
        self.caller = Caller(world, findings, tenant)
        self.rng = random.Random(f"{seed} {name}")
        self.stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)

    @abstractmethod
    def step(self) -> None:
        """Do one thing."""

    def verify(self, most: int | None = None) -> None:  # noqa: B027 - to most workers nothing is acknowledged
        """Verify what was acknowledged: all of it, or a sample of `most`."""

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the last step. `stop` was set before."""
        self._thread.join()

    def give_up(self) -> None:
        """End a verification that takes too long."""
        self.findings.fail(STATUS, f"{self.name}: the verification at the end did not end in time")
        self.stop.set()

    def until_answered(self, method: str, path: str, **more: Any) -> Reply | None:
        """Send a request, to any replica each time, until it is answered; `None` if the soak ends before."""
        while True:
            reply = self.caller.send(self.caller.choose(self.rng), method, path, **more)
            if reply.is_answered:
                return reply
            if self.stop.wait(RETRY_S):
                return None

    def _run(self) -> None:
        seen = self.world.replacements
        while not self.stop.is_set():
            began = time.monotonic()
            try:
                if self.world.replacements != seen:
                    seen = self.world.replacements
                    self.verify(SAMPLE)
                self.step()
            except Exception:
                self.findings.fail(OWN, f"{self.name}: {traceback.format_exc(limit=-4)}")
            self.stop.wait(max(0.01, self.every_s * self.rng.uniform(0.8, 1.2) - (time.monotonic() - began)))
        self.caller.close()
