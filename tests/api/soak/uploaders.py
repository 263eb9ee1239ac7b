"""Clients that store, replace and delete documents and collections, and verify at once on any replica that it holds."""

import random
from dataclasses import dataclass
from typing import Any

from tests.api.attacks.uploads import FORM_TYPE, form, pages_pdf, stream

from .caller import BROKEN, LOCKED, Reply
from .clients import RETRY_S, Worker
from .findings import DELETED, LOST_DOCUMENT

COLLECTIONS = "/v1/collections"
HELD = 12  # HELD documents are the most that an uploader has.
LETTERS = "bcdfghjklmnpqrstvz"  # LETTERS make the words that only one text holds.
KINDS = ("txt", "html", "pdf", "json")
FILLER = "The harbour was built by people of the town and every visitor of the festival travels over the old bridge."


@dataclass(frozen=True, slots=True)
class Stored:
    """A document, and the word that only its text holds."""

    id: str
    word: str

    @classmethod
    def new(cls, rng: random.Random, name: str) -> "Stored":
        return cls(name, "w" + "".join(rng.choices(LETTERS, k=12)))

    @property
    def text(self) -> str:
        return f"The code word of {self.id.partition('.')[0]} is {self.word}. {FILLER}"


def upload(documents: list[Stored], kind: str) -> dict[str, Any]:
    """The request's arguments that upload documents of one kind."""
    if kind == "json":
        return {"json": {"documents": [{"id": one.id, "text": one.text} for one in documents]}}
    files = [(one.id, one.text.encode()) for one in documents]
    if kind == "html":
        files = [(name, b"<html><body><h1>Words</h1><p>%s</p></body></html>" % text) for name, text in files]
    if kind == "pdf":
        drawn = b"BT /F1 9 Tf 1 0 0 1 20 700 Tm (%s) Tj ET"
        files = [(name, pages_pdf(1, stream(drawn % text))) for name, text in files]
    return {"content": form(files), "headers": {"content-type": FORM_TYPE}}


class Uploader(Worker):
    """Alone in its collection, so it knows what must be there. Bounded: what it stores it deletes again."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.number = 0
        self.held: dict[str, Stored] = {}  # acknowledged and not deleted
        self.collection = ""

    @property
    def documents(self) -> str:
        return f"{COLLECTIONS}/{self.collection}/documents"

    def step(self) -> None:
        if not self.collection:
            name = self.next_name()
            if self._write("POST", COLLECTIONS, (200, 201), json={"name": name}) is not None:
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
        if listed is not None and (found := {one["id"] for one in listed.body["data"]}) != self.held.keys():
            kind = LOST_DOCUMENT if self.held.keys() - found else DELETED
            self.findings.fail(kind, f"{self.documents} at {listed.replica.name}: {found ^ self.held.keys()}")

    def _add(self) -> None:
        kind = self.rng.choice(KINDS)
        names = [f"{self.name}d{self.number + n}.{kind}" for n in range(self.rng.randint(1, 3))]
        self.number += len(names)
        new = [Stored.new(self.rng, name) for name in names]
        if self._write("POST", self.documents, (201,), **upload(new, kind)) is not None:
            self.held.update({one.id: one for one in new})
            self.findings.count("documents acknowledged", len(new))
            self._assert_held(new[0])

    def _replace(self) -> None:
        before = self.rng.choice(list(self.held.values()))
        now = Stored.new(self.rng, before.id)
        if self._write("PUT", f"{self.documents}/{before.id}", (200,), json={"text": now.text}) is not None:
            self.held[now.id] = now
            self.findings.count("documents replaced")
            self._assert_gone(before)
            self._assert_held(now)

    def _delete(self) -> None:
        one = self.rng.choice(list(self.held.values()))
        if self._write("DELETE", f"{self.documents}/{one.id}", (200,)) is not None:
            del self.held[one.id]
            self.findings.count("documents deleted")
            self._assert_gone(one)

    def _drop(self) -> None:
        """Delete the collection."""
        path = self.documents
        if self._write("DELETE", f"{COLLECTIONS}/{self.collection}", (200,)) is not None:
            self.held, self.collection = {}, ""
            self.findings.count("collections deleted")
            found = self.until_answered("GET", path, expected=(200, 404))
            if found is not None and found.status == 200:
                self.findings.fail(DELETED, f"{path} at {found.replica.name} is there after its deletion")

    def _write(self, method: str, path: str, expected: tuple[int, ...], **more: Any) -> Reply | None:
        """Send a change until it is acknowledged; `None` if the soak ends before.

        A deletion whose connection broke may have been made: then there is nothing to delete. Another replica may be
        writing to the collection: then the store is locked.
        """
        broke = False
        while True:
            right = (*expected, 404) if broke and method == "DELETE" else expected
            reply = self.caller.send(self.caller.choose(self.rng), method, path, right, allowed=(LOCKED,), **more)
            if reply.is_answered:
                return reply
            broke = broke or reply.code == BROKEN
            if self.stop.wait(RETRY_S):
                self.held, self.collection = {}, ""  # the last request may have changed any of them
                return None

    def _assert_held(self, one: Stored) -> None:
        """The document has its text, and a search finds it."""
        self.findings.count("documents verified")
        shown = self.until_answered("GET", f"{self.documents}/{one.id}", expected=(200, 404))
        for reply in (shown, self._search(one)):
            if reply is not None and one.word not in str(reply.body):
                where = f"{self.documents}/{one.id} at {reply.replica.name}"
                self.findings.fail(LOST_DOCUMENT, f"{where}: {str(reply.body)[:500]}")

    def _assert_gone(self, one: Stored) -> None:
        """No search finds the text, and no answer rests on it."""
        question = f"What is the code word of {one.id.partition('.')[0]}?"
        body = {"question": question, "collection": self.collection, "max_tokens": 8}
        for reply in (self._search(one), self.until_answered("POST", "/v1/ask", json=body)):
            self.findings.count("deleted texts looked for")
            if reply is not None and one.word in str(reply.body):
                where = f"{self.documents}/{one.id} at {reply.replica.name}"
                self.findings.fail(DELETED, f"{where}: {str(reply.body)[:500]}")

    def _search(self, one: Stored) -> Reply | None:
        body = {"query": one.word, "k": 5, "retriever": "bm25"}  # no other text has the word
        return self.until_answered("POST", f"{COLLECTIONS}/{self.collection}/search", expected=(200, 404), json=body)
