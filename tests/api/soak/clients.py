"""Clients that talk and that store: they know what the service acknowledged to them, and verify it
on any replica.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.api.attacks.uploads import FORM_TYPE, form, pages_pdf, stream

from .client import ASK, BROKEN, CHAT, RETRY_S, SESSIONS, Client, Reply, Talk
from .world import LETTERS

KEPT = 4  # ended conversations of a client that stay, to be verified
HELD = 12  # documents that an uploader has at most
CONFLICT = "session_conflict"
LOCKED = "store_locked"
COLLECTIONS = "/v1/collections"
FILLER = (
    "The harbour was built by people of the town and every visitor of the festival travels "
    "over the old bridge."
)


class Talker(Client):
    """Holds conversations over several replicas. Every acknowledged turn must be there until it
    deletes them.
    """

    every_s = 0.3

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.talk = Talk(False, ())
        self.session = ""  # the conversation under way
        self.said: list[str] = []  # its acknowledged answers
        self.doubt = False  # whether an earlier attempt at this turn may be stored still
        self.kept: dict[str, int] = {}  # ended conversations: name and turns

    def step(self) -> None:
        if not self.said:
            self.talk = self.rng.choice(self.solo.talks)
            self.session = self.next_name()
        turn = len(self.said)
        named = self.talk.named
        body = {**self.talk.body(self.said, self.session), "stream": self.rng.random() < 0.5}
        reply = self.send(
            "POST", CHAT, json=body, named=named, allowed=(CONFLICT,) if self.doubt else ()
        )
        if reply.is_answered:
            self.compare(reply, self.talk.answers[turn], self.talk.turns[turn])
            self.findings.count("turns acknowledged")
        elif not (named and self._was_stored(turn)):
            self.stop.wait(RETRY_S)
            return
        self._go_on()

    def verify(self, most: int | None = None) -> None:
        held = list(self.kept.items())
        held = held if most is None else self.rng.sample(held, min(most, len(held)))
        if self.said and self.talk.named:
            held.append((self.session, len(self.said)))
        for session, turns in held:
            found = self._turns_of(session)
            if found is None:
                return
            self.findings.count("turns verified", turns)
            if self.doubt and session == self.session and found == turns + 1:
                self._go_on()
            elif found != turns:
                self.findings.fail(f"conversation {session} has {found} turns, not {turns}")

    def _go_on(self) -> None:
        """Go on to the next turn, or end the conversation."""
        self.doubt = False
        self.said.append(self.talk.answers[len(self.said)])
        if len(self.said) < len(self.talk.turns):
            return
        turns = len(self.said)
        self.said = []
        if self.talk.named and self.rng.random() < 0.5:
            self._cut(turns)
        elif self.talk.named:
            self.kept[self.session] = turns
        if len(self.kept) > KEPT:
            self._delete(next(iter(self.kept)))

    def _cut(self, turns: int) -> None:
        """Close a stream of the ended conversation half-way: what was there stays. Then
        delete it.
        """
        body = {**self.talk.body([], self.session), "stream": True}
        self.send(
            "POST",
            CHAT,
            json=body,
            cut_after=self.rng.randint(1, 3),
            named=True,
            allowed=(CONFLICT,),
        )
        self.findings.count("streams cut")
        found = self._turns_of(self.session)
        if found is not None and found < turns:
            self.findings.fail(
                f"conversation {self.session} has {found} turns after a cut stream, not {turns}"
            )
        self.until_answered("DELETE", f"{SESSIONS}/{self.session}", 200, 404, named=True)

    def _turns_of(self, session: str) -> int | None:
        """The turns of a conversation; `None` if the load ends before a replica says."""
        reply = self.until_answered("GET", f"{SESSIONS}/{session}", 200, 404, named=True)
        return None if reply is None else int(reply.body["turns"]) if reply.status == 200 else 0

    def _was_stored(self, turn: int) -> bool:
        """Whether a turn without an acknowledgement is stored all the same."""
        self.doubt = True
        found = self._turns_of(self.session)
        if found is not None and not turn <= found <= turn + 1:
            self.findings.fail(
                f"conversation {self.session} has {found} turns, not {turn} or {turn + 1}"
            )
        return found == turn + 1

    def _delete(self, session: str) -> None:
        del self.kept[session]
        reply = self.until_answered("DELETE", f"{SESSIONS}/{session}", 200, 404, named=True)
        if reply is not None and self._turns_of(session):
            self.findings.fail(f"conversation {session} was deleted, and is there again")
        self.findings.count("conversations deleted")


@dataclass(frozen=True, slots=True)
class Stored:
    """A document, and the word that only its text holds."""

    id: str
    word: str

    @property
    def text(self) -> str:
        return f"The code word of {self.id.partition('.')[0]} is {self.word}. {FILLER}"


class Uploader(Client):
    """Stores, replaces and deletes in a collection of its own, so it knows what must be there, on
    any replica.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.number = 0
        self.held: dict[str, Stored] = {}  # acknowledged and not deleted
        # whether they are stored is not known: the load ended during their last change
        self.unsure: set[str] = set()
        self.collection = ""

    @property
    def documents(self) -> str:
        return f"{COLLECTIONS}/{self.collection}/documents"

    def step(self) -> None:
        if not self.collection:
            name = self.next_name()
            if self._write("POST", COLLECTIONS, 200, 201, json={"name": name}) is not None:
                self.collection = name
        elif not self.held:
            self._add()
        else:
            actions = (self._add, self._replace, self._delete, self._drop)
            self.rng.choices(actions, (3 if len(self.held) < HELD else 0, 2, 3, 0.15))[0]()

    def verify(self, most: int | None = None) -> None:
        if not self.collection:
            return
        held = list(self.held.values())
        for one in held if most is None else self.rng.sample(held, min(most, len(held))):
            self._assert_held(one)
        listed = self.until_answered("GET", self.documents, params={"limit": 1000})
        found = set(self.held) if listed is None else {one["id"] for one in listed.body["data"]}
        if wrong := (found ^ self.held.keys()) - self.unsure:
            self.findings.fail(f"{self.documents}: lost or not deleted: {sorted(wrong)}")

    def _add(self) -> None:
        kind = self.rng.choice(("txt", "pdf", "json"))
        names = [f"{self.name}d{self.number + n}.{kind}" for n in range(self.rng.randint(1, 3))]
        self.number += len(names)
        new = [self._new(name) for name in names]
        if (
            self._write("POST", self.documents, 201, touched=names, **_upload(new, kind))
            is not None
        ):
            self.held.update({one.id: one for one in new})
            self.findings.count("documents acknowledged", len(new))
            self._assert_held(new[0])

    def _replace(self) -> None:
        before = self.rng.choice(list(self.held.values()))
        now = self._new(before.id)
        if (
            self._write("POST", self.documents, 201, touched=[now.id], **_upload([now], "json"))
            is not None
        ):
            self.held[now.id] = now
            self._assert_gone(before)
            self._assert_held(now)

    def _delete(self) -> None:
        one = self.rng.choice(list(self.held.values()))
        if self._write("DELETE", f"{self.documents}/{one.id}", 200, touched=[one.id]) is not None:
            del self.held[one.id]
            self.findings.count("documents deleted")
            self._assert_gone(one)

    def _drop(self) -> None:
        """Delete the collection."""
        path = self.documents
        if (
            self._write("DELETE", f"{COLLECTIONS}/{self.collection}", 200, touched=list(self.held))
            is not None
        ):
            self.held = {}
            self.collection = ""
            found = self.until_answered("GET", path, 200, 404)
            if found is not None and found.status == 200:
                self.findings.fail(f"{path} at {found.replica.name} is there after its deletion")

    def _new(self, name: str) -> Stored:
        return Stored(name, "w" + "".join(self.rng.choices(LETTERS, k=12)))

    def _write(
        self, method: str, path: str, *expected: int, touched: Sequence[str] = (), **more: Any
    ) -> Reply | None:
        """Send a change of the documents `touched` until it is acknowledged; `None` if the load
        ends before.

        A deletion whose connection broke may have been made: then there is nothing to delete.
        Another replica may be writing to the collection: then the store is locked.
        """
        broke = False
        while True:
            right = (*expected, 404) if broke and method == "DELETE" else expected
            reply = self.send(method, path, right, allowed=(LOCKED,), **more)
            if reply.is_answered:
                return reply
            broke = broke or reply.code == BROKEN
            if self.stop.wait(RETRY_S):
                self.unsure.update(touched)
                self.held = {
                    name: one for name, one in self.held.items() if name not in self.unsure
                }
                return None

    def _assert_held(self, one: Stored) -> None:
        """The document has its text, and a search finds it."""
        self.findings.count("documents verified")
        shown = self.until_answered("GET", f"{self.documents}/{one.id}", 200, 404)
        for reply in (shown, self._search(one)):
            if reply is not None and one.word not in str(reply.body):
                self.findings.fail(
                    f"lost: {self.documents}/{one.id} at {reply.replica.name}: "
                    f"{str(reply.body)[:500]}"
                )

    def _assert_gone(self, one: Stored) -> None:
        """No search finds the text, and no answer rests on it."""
        question = f"What is the code word of {one.id.partition('.')[0]}?"
        body = {"question": question, "collection": self.collection, "max_tokens": 8}
        for reply in (self._search(one), self.until_answered("POST", ASK, json=body)):
            self.findings.count("deleted texts looked for")
            if reply is not None and one.word in str(reply.body):
                where = f"{self.documents}/{one.id} at {reply.replica.name}"
                self.findings.fail(f"deleted and found: {where}: {str(reply.body)[:500]}")

    def _search(self, one: Stored) -> Reply | None:
        body = {"query": one.word, "k": 5, "retriever": "bm25"}  # no other text has the word
        return self.until_answered(
            "POST", f"{COLLECTIONS}/{self.collection}/search", 200, 404, json=body
        )


def _upload(documents: list[Stored], kind: str) -> dict[str, Any]:
    """The request's arguments that upload documents of one kind."""
    if kind == "json":
        return {"json": {"documents": [{"id": one.id, "text": one.text} for one in documents]}}
    files = [(one.id, one.text.encode()) for one in documents]
    if kind == "pdf":
        drawn = b"BT /F1 9 Tf 1 0 0 1 20 700 Tm (%s) Tj ET"
        files = [(name, pages_pdf(1, stream(drawn % text))) for name, text in files]
    return {"content": form(files), "headers": {"content-type": FORM_TYPE}}
