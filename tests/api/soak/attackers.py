"""The tenant that attacks: floods of searches and embeddings, hostile uploads, malformed requests."""

import socket
import threading
from collections.abc import Callable
from typing import Any

from tests.api.attacks import uploads
from tests.api.attacks.values import CHAT, JSON, ODD_BODIES

from .caller import FLOODED, LOCKED, MISSING, Caller
from .findings import STATUS
from .solo import COLLECTION
from .workers import Worker

BURST = 12  # requests of a flood at once
WORDS = "harbour mill orchard lantern glacier copper sparrow thunder velvet compass "
PATH = "/v1/collections/facts/documents"
FORM = {"content-type": uploads.FORM_TYPE}
HOSTILE: tuple[tuple[Callable[[], bytes], dict[str, str]], ...] = (  # bodies and content types, refused with 400
    (lambda: uploads.form([("a.pdf", uploads.shared_stream_pdf(400, 8_000))]), FORM),
    (lambda: uploads.form([("a.pdf", uploads.inflating_pdf(20, 70_000_000))]), FORM),
    (lambda: uploads.form([("a.pdf", uploads.deep_outline_pdf(20_000))]), FORM),
    (lambda: uploads.form([("a.html", uploads.angle_brackets(4_000_000))]), FORM),
    (lambda: uploads.form([("a.html", uploads.nested_html(100_000))]), FORM),
    (lambda: uploads.form([("a.jsonl", uploads.many_lines(100_000))]), FORM),
    (lambda: uploads.many_values(1_000_000), JSON),
    (lambda: uploads.deep_json(150), JSON),
    (lambda: uploads.many_parts(20_000), FORM),
)
RAW = (  # bytes that are no request
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
    b"POST /v1/ask HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
)


class Flooder(Worker):
    """Sends bursts of searches and embeddings, as much work as the limits allow its tenant."""

    every_s = 20.0

    def step(self) -> None:
        threads = [threading.Thread(target=self._flood, args=[self.rng.random()]) for _ in range(BURST)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.findings.count("floods")

    def _flood(self, choice: float) -> None:
        caller = Caller(self.world, self.findings, self.caller.tenant)
        replica = self.caller.world.choose(self.rng)
        if choice < 0.5:
            body: dict[str, Any] = {"model": "all-MiniLM-L6-v2", "input": [WORDS * 5] * 40}
            caller.send(replica, "POST", "/v1/embeddings", json=body, allowed=FLOODED)
        else:
            for _ in range(10):
                body = {"query": WORDS * 200, "k": 60}
                caller.send(replica, "POST", f"/v1/collections/{COLLECTION}/search", json=body, allowed=FLOODED)
        caller.close()


class Poisoner(Worker):
    """Uploads files that are much work to parse: each is refused with 400, and nothing of it is stored."""

    every_s = 6.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._bodies: dict[int, bytes] = {}  # made once

    def step(self) -> None:
        number = self.rng.randrange(len(HOSTILE))
        if number not in self._bodies:
            self._bodies[number] = HOSTILE[number][0]()
        body, headers = self._bodies[number], HOSTILE[number][1]
        replica = self.caller.choose(self.rng)
        self.caller.send(replica, "POST", PATH, (400,), content=body, headers=headers, allowed=FLOODED)
        shown = self.caller.send(self.caller.choose(self.rng), "GET", PATH.removesuffix("/documents"), allowed=FLOODED)
        if shown.is_answered and shown.body["documents"]:
            self.findings.fail(STATUS, f"{shown.body['documents']} documents of hostile uploads are stored")
        self.findings.count("hostile uploads")


class Malformer(Worker):
    """Sends bodies with odd values, and bytes that are no request."""

    every_s = 2.0

    def step(self) -> None:
        self.findings.count("malformed requests")
        replica = self.caller.choose(self.rng)
        if self.rng.random() < 0.3:
            self._send_bytes(replica.process.port)
            return
        path, body = self.rng.choice(ODD_BODIES)
        expected = (400, 404, 413) if path == "/v1/embeddings" else (400, 413)
        allowed = (*FLOODED, LOCKED, MISSING)
        self.caller.send(replica, "POST", path, expected, content=body.encode(), headers=JSON, allowed=allowed)
        self.caller.send(replica, "POST", "/v1/chat/completions", (400,), json={**CHAT, "n": 100}, allowed=FLOODED)

    def _send_bytes(self, port: int) -> None:
        """What is no request gets an error of the client's, or its connection is closed."""
        answer = b""
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as one:
                one.sendall(self.rng.choice(RAW))
                answer = one.recv(1024)
        except OSError:
            return  # closed, or the replica ends
        if answer and not answer.startswith(b"HTTP/1.1 4"):
            self.findings.fail(STATUS, f"bytes that are no request got {answer[:200]!r}")
