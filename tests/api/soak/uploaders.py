"""Clients that store, replace and delete documents and collections, and verify at once on any replica that it holds."""

from typing import Any

from .caller import BROKEN, CONFLICT, LOCKED, MISSING, Reply
from .files import KINDS, Stored, new_document, upload
from .findings import DELETED, LOST_DOCUMENT
from .workers import Worker

COLLECTIONS = "/v1/collections"
HELD = 12  # documents that an uploader has at most
WRITES = (LOCKED,)  # documented for a request that changes a collection: another replica is writing to it


class Uploader(Worker):
    """Alone in its collection, so it knows what must be there. Bounded: what it stores it deletes again."""

    every_s = 1.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._number, self._round = 0, 0
        self._held: dict[str, Stored] = {}  # acknowledged and not deleted
        self._collection = ""

    def step(self) -> None:
        if not self._collection:
            self._create()
            return
        if not self._held:
            self._add()
            return
        actions = (self._add, self._look, self._replace, self._delete, self._drop)
        weights = (3 if len(self._held) < HELD else 0, 3, 1, 2 + len(self._held) // HELD, 0.15)
        self.rng.choices(actions, weights)[0]()

    def verify(self, most: int | None = None) -> None:
        if not self._collection:
            return
        held = list(self._held.values())
        for one in held if most is None else self.rng.sample(held, min(most, len(held))):
            self._assert_held(one)
        if most is None:
            self._assert_listed()

    def _create(self) -> None:
        name, self._round = f"{self.name}-{self._round}", self._round + 1
        if self._write("POST", COLLECTIONS, (200, 201), json={"name": name}) is not None:
            self._collection = name

    def _add(self) -> None:
        kind = self.rng.choice(KINDS)
        names = [f"{self.name}d{self._number + n}" for n in range(self.rng.randint(1, 3))]
        self._number += len(names)
        new = [new_document(self.rng, name, kind) for name in names]
        if self._write("POST", self._documents, (201,), **upload(new, kind)) is None:
            return
        self._held.update({one.id: one for one in new})
        self.findings.count("documents acknowledged", len(new))
        self._assert_held(self.rng.choice(new))

    def _look(self) -> None:
        self._assert_held(self.rng.choice(list(self._held.values())))

    def _replace(self) -> None:
        before = self.rng.choice(list(self._held.values()))
        now = Stored(before.id, before.name, new_document(self.rng, "", "").word)
        if self._write("PUT", f"{self._documents}/{before.id}", (200,), json={"text": now.text}) is None:
            return
        self._held[now.id] = now
        self.findings.count("documents replaced")
        self._assert_gone(before)
        self._assert_held(now)

    def _delete(self) -> None:
        one = self.rng.choice(list(self._held.values()))
        if self._write("DELETE", f"{self._documents}/{one.id}", (200,)) is None:
            return
        del self._held[one.id]
        self.findings.count("documents deleted")
        self._assert_gone(one)

    def _drop(self) -> None:
        """Delete the collection."""
        if self._write("DELETE", f"{COLLECTIONS}/{self._collection}", (200,)) is None:
            return
        path, self._held = self._documents, {}
        self._collection = ""
        self.findings.count("collections deleted")
        found = self.until_answered("GET", path, expected=(200, 404))
        if found is not None and found.status == 200:
            self.findings.fail(DELETED, f"{path} at {found.replica.name} is there after its deletion")

    @property
    def _documents(self) -> str:
        return f"{COLLECTIONS}/{self._collection}/documents"

    def _write(self, method: str, path: str, expected: tuple[int, ...], **more: Any) -> Reply | None:
        """Send a change until it is acknowledged; `None` if the soak ends before.

        A deletion whose connection broke may have been made: then there is nothing to delete.
        """
        broke = False
        while True:
            allowed = (*expected, 404) if broke and method == "DELETE" else expected
            reply = self.caller.send(self.caller.choose(self.rng), method, path, allowed, allowed=WRITES, **more)
            if reply.is_answered:
                return reply
            broke = broke or reply.code == BROKEN
            if self.stop.wait(0.1):
                self._held.clear()  # the last request may have changed any of them
                self._collection = ""
                return None

    def _assert_held(self, one: Stored) -> None:
        """The document has its text, and a search finds it."""
        shown = self.until_answered("GET", f"{self._documents}/{one.id}", expected=(200, 404))
        found = self._search(one)
        if shown is None or found is None:
            return
        self.findings.count("documents verified")
        if shown.status == 404 or one.word not in shown.body["text"]:
            self.findings.fail(LOST_DOCUMENT, f"{self._documents}/{one.id} at {shown.replica.name}: {shown.body}")
        if found.status == 404 or not any(one.word in hit["text"] for hit in found.body["hits"]):
            self.findings.fail(LOST_DOCUMENT, f"{self._documents}/{one.id} is not found at {found.replica.name}")

    def _assert_listed(self) -> None:
        """The list has the documents that must be there, and no other."""
        listed = self.until_answered("GET", self._documents, params={"limit": 1000})
        if listed is None:
            return
        found = {one["id"] for one in listed.body["data"]}
        if lost := self._held.keys() - found:
            self.findings.fail(LOST_DOCUMENT, f"{self._documents} at {listed.replica.name} does not list {lost}")
        if more := found - self._held.keys():
            self.findings.fail(DELETED, f"{self._documents} at {listed.replica.name} lists {more}")

    def _assert_gone(self, one: Stored) -> None:
        """No search finds the text, and no answer rests on it."""
        body = {"question": one.question, "collection": self._collection, "max_tokens": 8}
        answered = self.until_answered("POST", "/v1/ask", json=body)
        for reply in (self._search(one), answered):
            self.findings.count("deleted texts looked for")
            if reply is not None and one.word in str(reply.body):
                self.findings.fail(
                    DELETED, f"{self._documents}/{one.id} at {reply.replica.name}: {str(reply.body)[:500]}"
                )

    def _search(self, one: Stored) -> Reply | None:
        body = {"query": one.word, "k": 5, "retriever": "bm25"}  # no other text has the word
        return self.until_answered("POST", f"{COLLECTIONS}/{self._collection}/search", expected=(200, 404), json=body)


class Racer(Worker):
    """Two of these change the same collection at once: no outcome is known, but every status must be documented."""

    every_s = 1.0
    shared = "raced"

    def step(self) -> None:
        path = f"{COLLECTIONS}/{self.shared}"
        document = new_document(self.rng, f"raced{self.rng.randrange(5)}", "json")
        actions: tuple[tuple[str, str, tuple[int, ...], dict[str, Any]], ...] = (
            ("POST", COLLECTIONS, (200, 201), {"json": {"name": self.shared}}),
            ("PUT", f"{path}/documents/{document.id}", (200,), {"json": {"text": document.text}}),
            ("DELETE", f"{path}/documents/{document.id}", (200,), {}),
            ("POST", f"{path}/search", (200,), {"json": {"query": document.question}}),
            ("POST", "/v1/ask", (200,), {"json": {"question": document.question, "collection": self.shared}}),
            ("DELETE", path, (200,), {}),
        )
        method, path, expected, more = self.rng.choices(actions, (2, 3, 2, 2, 1, 0.5))[0]
        allowed = (*WRITES, MISSING, "409", CONFLICT)
        self.caller.send(self.caller.choose(self.rng), method, path, expected, allowed=allowed, **more)
