"""Bystanders, who ask a question once a second; clients that hold conversations, and clients that cut streams."""

import random
import threading
import time
import traceback
from abc import ABC, abstractmethod
from typing import Any

from .caller import CONFLICT, Caller, Reply, answer_of
from .findings import LOST_TURN, OWN, UNLIKE, Findings
from .solo import Solo, Talk, question_body, turn_request
from .world import World

SESSIONS = "/v1/sessions"
KEPT = 4  # KEPT ended conversations of a client stay, to be verified.
SAMPLE = 3  # SAMPLE acknowledged things are verified after each replacement.
RETRY_S = 0.1  # RETRY_S lie between two attempts.


class Worker(ABC):
    """One client of the service, on its own thread. What it does follows from the seed and its name."""

    every_s = 1.0  # between the beginnings of two steps

    def __init__(self, world: World, findings: Findings, solo: Solo, tenant: str, name: str, seed: int) -> None:
        self.world, self.findings, self.solo, self.name = world, findings, solo, name
        self.caller = Caller(world, findings, tenant)
        self.rng = random.Random(f"{seed} {name}")
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name)
        self.round = 0

    @abstractmethod
    def step(self) -> None:
        """Do one thing."""

    def verify(self, most: int | None = None) -> None:  # noqa: B027 - to most workers nothing is acknowledged
        """Verify what was acknowledged: all of it, or a sample of `most`."""

    def next_name(self) -> str:
        self.round += 1
        return f"{self.name}-{self.round}"

    def until_answered(self, method: str, path: str, **more: Any) -> Reply | None:
        """Send a request, to any replica each time, until it is answered; `None` if the soak ends before."""
        while True:
            reply = self.caller.send(self.caller.choose(self.rng), method, path, **more)
            if reply.is_answered:
                return reply
            if self.stop.wait(RETRY_S):
                return None

    def turns_of(self, session: str) -> int | None:
        """The turns of a conversation; `None` if the soak ends before a replica says."""
        reply = self.until_answered("GET", f"{SESSIONS}/{session}", expected=(200, 404), named=True)
        if reply is None:
            return None
        return int(reply.body["turns"]) if reply.status == 200 else 0

    def compare(self, reply: Reply, expected: str, question: str) -> None:
        self.findings.count("answers compared")
        if (answer := answer_of(reply)) != expected:
            where = f"{self.name} at {reply.replica.name}"
            self.findings.fail(UNLIKE, f"{where}: {question!r}: {answer!r}, not {expected!r}")

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


class Bystander(Worker):
    """Asks a question once a second, of any replica, until it is answered."""

    phase = "quiet"

    def step(self) -> None:
        question = self.rng.choice(list(self.solo.questions))
        body = question_body(question, self.rng.choice(("fused", "fused", "fused", "prefix")))
        began = time.monotonic()
        reply = self.until_answered("POST", "/v1/ask", json=body)
        if reply is not None:
            self.findings.take(f"a bystander, {self.phase}", 200, time.monotonic() - began)
            self.compare(reply, self.solo.questions[question], question)


class Talker(Worker):
    """Holds conversations over several replicas. Every acknowledged turn must be there until it deletes them."""

    every_s = 0.3

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.talk: Talk = self.solo.talks[0]
        self.session = ""  # the conversation under way
        self.said: list[str] = []  # its acknowledged answers
        self.doubt = False  # whether an earlier attempt at this turn may be stored still
        self.kept: dict[str, int] = {}  # ended conversations: name and turns

    def step(self) -> None:
        if not self.said:
            self.talk, self.session = self.rng.choice(self.solo.talks), self.next_name()
        turn, named = len(self.said), self.talk.kind != "unnamed"
        path, body = turn_request(self.talk, turn, self.said, self.session)
        body["stream"] = self.rng.random() < 0.5
        allowed = (CONFLICT,) if self.doubt else ()
        reply = self.caller.send(self.caller.choose(self.rng), "POST", path, json=body, named=named, allowed=allowed)
        if reply.is_answered:
            self.compare(reply, self.talk.answers[turn], self.talk.turns[turn])
            self.findings.count("turns acknowledged")
        elif not (named and self._was_stored(turn)):
            self.stop.wait(RETRY_S)
            return
        self.doubt = False
        self.said.append(self.talk.answers[turn])
        if len(self.said) == len(self.talk.turns):
            if named:
                self.kept[self.session] = len(self.said)
            self.said = []
            if len(self.kept) > KEPT:
                self._delete(next(iter(self.kept)))

    def verify(self, most: int | None = None) -> None:
        held = list(self.kept.items())
        held = held if most is None else self.rng.sample(held, min(most, len(held)))
        if self.said and self.talk.kind != "unnamed":
            held.append((self.session, len(self.said)))
        for session, turns in held:
            found = self.turns_of(session)
            if found is None:
                return
            self.findings.count("turns verified", turns)
            if found != turns and not (self.doubt and session == self.session and found == turns + 1):
                self.findings.fail(LOST_TURN, f"conversation {session} has {found} turns, not {turns}")

    def _was_stored(self, turn: int) -> bool:
        """Whether a turn without an acknowledgement is stored all the same."""
        self.doubt = True
        found = self.turns_of(self.session)
        if found is not None and not turn <= found <= turn + 1:
            self.findings.fail(LOST_TURN, f"conversation {self.session} has {found} turns, not {turn} or {turn + 1}")
        return found == turn + 1

    def _delete(self, session: str) -> None:
        del self.kept[session]
        reply = self.until_answered("DELETE", f"{SESSIONS}/{session}", expected=(200, 404), named=True)
        if reply is not None and self.turns_of(session):
            self.findings.fail(LOST_TURN, f"conversation {session} was deleted, and is there again")
        self.findings.count("conversations deleted")


class Cutter(Worker):
    """Closes streams of a conversation half-way. What is cut is no turn; what was there stays."""

    every_s = 0.7

    def step(self) -> None:
        talk = next(talk for talk in self.solo.talks if talk.kind == "chat")
        session = self.next_name()
        path, body = turn_request(talk, 0, [], session)
        how: dict[str, Any] = {"named": True, "allowed": (CONFLICT,)}
        if self.until_answered("POST", path, json=body, **how) is None:
            return
        for cut_after in self.rng.choices((1, 2, 3), k=2):
            stream = {**body, "stream": True}
            self.caller.send(self.caller.choose(self.rng), "POST", path, json=stream, cut_after=cut_after, **how)
            self.findings.count("streams cut")
        if self.turns_of(session) == 0:
            self.findings.fail(LOST_TURN, f"conversation {session} has lost its turn after cut streams")
        self.until_answered("DELETE", f"{SESSIONS}/{session}", expected=(200, 404), named=True)
