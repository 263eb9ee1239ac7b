"""Bystanders, who ask a question once a second; clients that cut streams; clients that hold conversations."""

import time
from collections import deque
from typing import Any

from .caller import CONFLICT, Reply, answer_of
from .findings import LOST_TURN, UNLIKE
from .solo import Solo, Talk, question_body, turn_request
from .workers import RETRY_S, Worker

CHAT, SESSIONS = "/v1/chat/completions", "/v1/sessions"
KEPT = 4  # ended conversations that a client keeps, to verify them


class Asking(Worker):
    """A worker that compares its answers with the solo ones."""

    solo: Solo

    def compare(self, reply: Reply, expected: str, question: str) -> None:
        self.findings.count("answers compared")
        if (answer := answer_of(reply)) != expected:
            self.findings.fail(
                UNLIKE, f"{self.name} at {reply.replica.name}: {question!r}: {answer!r}, not {expected!r}"
            )


class Bystander(Asking):
    """Asks a question once a second, of the replica that stays or of any replica."""

    stays = True
    phase = "quiet"

    def step(self) -> None:
        question = self.rng.choice(list(self.solo.questions))
        body = question_body(question, self.rng.choice(("fused", "fused", "fused", "prefix")))
        began = time.monotonic()
        while True:
            replica = self.world.serving[0] if self.stays else self.caller.choose(self.rng)
            reply = self.caller.send(replica, "POST", "/v1/ask", json=body)
            if reply.is_answered:
                break
            if self.stop.wait(RETRY_S):
                return
        where = "of the replica that stays" if self.stays else "of any replica"
        self.findings.take(f"bystander {where}, {self.phase}", time.monotonic() - began)
        self.compare(reply, self.solo.questions[question], question)


class Talker(Asking):
    """Holds conversations over several replicas. Every acknowledged turn must be there until it deletes them."""

    every_s = 0.3
    talk: Talk
    session, number = "", 0  # the conversation under way, and its acknowledged turns

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._round = 0
        self._said: list[str] = []
        self._doubt = False  # whether an earlier attempt at this turn may be stored still
        self._kept: deque[tuple[str, int]] = deque()  # ended conversations: name and turns

    def step(self) -> None:
        if not self._said:
            self.talk = self.rng.choice(self.solo.talks)
            self.session, self._round = f"{self.name}-{self._round}", self._round + 1
        turn = len(self._said)
        path, body = turn_request(self.talk, turn, self._said, self.session)
        named = self.talk.kind != "unnamed"
        replica = self.caller.choose(self.rng)
        options: dict[str, Any] = {"named": named, "allowed": (CONFLICT,) if self._doubt else ()}
        if self.rng.random() < 0.5:
            reply = self.caller.stream(replica, path, body, **options)
        else:
            reply = self.caller.send(replica, "POST", path, json=body, **options)
        if reply.is_answered:
            self.compare(reply, self.talk.answers[turn], self.talk.turns[turn])
            self.findings.count("turns acknowledged")
        elif not self._was_stored(turn, named):
            self.stop.wait(RETRY_S)
            return
        self._doubt = False
        self._said.append(self.talk.answers[turn])
        if len(self._said) == len(self.talk.turns):
            self._end(named)

    def verify(self, most: int | None = None) -> None:
        ended = list(self._kept)
        held = [(self.session, len(self._said))] if self._said and self.talk.kind != "unnamed" else []
        for session, turns in held + (ended if most is None else self.rng.sample(ended, min(most, len(ended)))):
            found = self._turns_of(session)
            if found is None:
                return
            self.findings.count("turns verified", turns)
            if found != turns and not (self._doubt and session == self.session and found == turns + 1):
                self.findings.fail(LOST_TURN, f"conversation {session} has {found} turns, not {turns}")

    def ended(self) -> list[str]:
        """The conversations that have ended and are kept."""
        return [session for session, _ in self._kept]

    def _was_stored(self, turn: int, named: bool) -> bool:
        """Whether a turn without an acknowledgement is stored all the same."""
        if not named:
            return False
        self._doubt = True
        found = self._turns_of(self.session)
        if found is not None and not turn <= found <= turn + 1:
            self.findings.fail(LOST_TURN, f"conversation {self.session} has {found} turns, not {turn} or {turn + 1}")
        if found == turn + 1:
            self.findings.count("turns stored without an acknowledgement")
        return found == turn + 1

    def _turns_of(self, session: str) -> int | None:
        """The turns of a conversation; `None` if the soak ends before a replica says."""
        reply = self.until_answered("GET", f"{SESSIONS}/{session}", expected=(200, 404), named=True)
        if reply is None:
            return None
        return int(reply.body["turns"]) if reply.status == 200 else 0

    def _end(self, named: bool) -> None:
        turns, self._said = len(self._said), []
        if not named:
            return
        self._kept.append((self.session, turns))
        if len(self._kept) > KEPT:
            self._delete(self._kept.popleft()[0])

    def _delete(self, session: str) -> None:
        reply = self.until_answered("DELETE", f"{SESSIONS}/{session}", expected=(200, 404), named=True)
        if reply is not None and self._turns_of(session):
            self.findings.fail(LOST_TURN, f"conversation {session} was deleted, and is there again")
        self.findings.count("conversations deleted")


class Cutter(Asking):
    """Closes streams half-way, of questions and of conversations. What is cut is no turn; what was there stays."""

    every_s = 0.7

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._round = 0

    def step(self) -> None:
        if self.rng.random() < 0.6:
            question = self.rng.choice(list(self.solo.questions))
            self._cut("/v1/ask", question_body(question, "fused"))
        else:
            self._cut_a_conversation()

    def _cut_a_conversation(self) -> None:
        talk = next(talk for talk in self.solo.talks if talk.kind == "chat")
        session, self._round = f"{self.name}-{self._round}", self._round + 1
        path, body = turn_request(talk, 0, [], session)
        if self.until_answered("POST", path, json=body, named=True, allowed=(CONFLICT,)) is None:
            return
        cuts = self.rng.randint(1, 3)
        for _ in range(cuts):
            self._cut(path, body)
        shown = self.until_answered("GET", f"{SESSIONS}/{session}", expected=(200, 404), named=True)
        if shown is not None and not (shown.status == 200 and shown.body["turns"]):
            self.findings.fail(LOST_TURN, f"conversation {session} has lost its turn after {cuts} cut streams")
        self.until_answered("DELETE", f"{SESSIONS}/{session}", expected=(200, 404), named=True)

    def _cut(self, path: str, body: dict[str, Any]) -> None:
        named = "session_id" in body
        replica, after = self.caller.choose(self.rng), self.rng.randint(1, 3)
        self.caller.stream(replica, path, body, cut_after=after, named=named, allowed=(CONFLICT,))
        self.findings.count("streams cut")
