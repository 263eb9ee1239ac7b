"""Attacks on a server behind nginx, one of them in a process: from another address than the
bystander's.

python -m tests.api.attacks.attackers NAME PORT KEY SECONDS CLIENTS
"""

import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.reader import READER

from . import uploads

ADDRESS = "127.0.0.2"  # Linux has all of 127.0.0.0/8
WORDS = "harbour mill orchard lantern glacier copper sparrow thunder velvet compass "
FORM = {"content-type": uploads.FORM_TYPE}
JSON = {"content-type": "application/json"}
MODEL = Path(os.environ.get("ATTACKED_MODEL", READER)).name
DOCUMENTS = "/v1/collections/c/documents"
SEARCH = "/v1/collections/c/search"
CHAT = "/v1/chat/completions"
ASK = "/v1/ask"
GENERATE = "/api/generate"
HEAD = b"POST /v1/ask HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
TWO_LENGTHS = HEAD + b"content-length: 9\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"


@dataclass(slots=True)
class Attacker:
    """Sends requests until `ends`, and gives each up after `patience_s`, as a client that
    leaves.
    """

    port: int
    key: str
    ends: float  # on the monotonic clock
    patience_s: float = 1e9
    statuses: Counter[int] = field(default_factory=Counter)  # 0: given up

    def left_s(self) -> float:
        return min(self.patience_s, max(0.01, self.ends - time.monotonic()))

    def send(self, method: str, path: str, *, keyed: bool = True, **more: Any) -> None:
        """Send a request over a connection of its own."""
        headers = {"authorization": f"Bearer {self.key}"} if keyed else {}
        headers |= more.pop("headers", {})
        url = f"http://127.0.0.1:{self.port}"
        # certificates would take 25 ms to load
        transport = httpx.HTTPTransport(verify=False, local_address=ADDRESS)
        status = 0
        left_s = self.left_s()
        giving_up = time.monotonic() + left_s
        with (
            httpx.Client(
                transport=transport, base_url=url, headers=headers, timeout=left_s, trust_env=False
            ) as client,
            suppress(httpx.HTTPError),
            client.stream(method, path, **more) as response,
        ):
            for _ in response.iter_raw():
                if time.monotonic() > giving_up:
                    break
            else:
                status = response.status_code
        self.statuses[status] += 1

    def post(self, path: str, **body: Any) -> None:
        self.send("POST", path, json=body)

    def upload(self, name: str, data: bytes) -> None:
        self.send("POST", DOCUMENTS, content=uploads.form([(name, data)]), headers=FORM)

    def raw(self, *pieces: bytes) -> None:
        """Send bytes as they are, and read what comes until the end."""
        status = b""
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 5, (ADDRESS, 0)) as one,
        ):
            for piece in pieces:
                one.settimeout(self.left_s())
                one.sendall(piece)
            while got := one.recv(1 << 16):
                status = status or got[9:12]
                one.settimeout(self.left_s())
        self.statuses[int(status or 0)] += 1


class Attack(NamedTuple):
    """What each of so many clients does again and again, giving every request up after
    `patience_s`.
    """

    clients: int
    act: Callable[[Attacker], None]
    patience_s: float = 1e9


def fresh(words: int) -> str:
    """A text that was not sent before."""
    return f"{random.random()} {WORDS * (words // 10)}"


@cache
def long(begin: bytes, piece: bytes, times: int, end: bytes = b"") -> bytes:
    """It is made once: that takes the clients' time, which must not count as the server's."""
    return begin + piece * times + end


def one_text_many_times(by: Attacker) -> None:
    by.post(
        DOCUMENTS,
        documents=[{"id": "alike", "text": "the mill " * 11_000, "metadata": {"a": "x" * 19_000}}],
    )
    for _ in range(3):
        by.post(SEARCH, query="the mill", k=1)


def hostile_grammar(by: Attacker) -> None:
    properties = {f"p{n}": {"type": "string", "pattern": "(a|b|c)*a(a|b|c){9}"} for n in range(30)}
    schema = {"type": "object", "required": [f"p{random.random()}"], "properties": properties}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    by.post("/v1/ask", question="x", collection="c", response_format=form)


def many_collections(by: Attacker) -> None:
    name = f"c{random.randrange(20)}"
    by.post("/v1/collections", name=name)
    by.post(f"/v1/collections/{name}/documents", documents=[{"text": fresh(20)}])
    by.send("DELETE", f"/v1/collections/{name}")


def long_chat(by: Attacker) -> None:
    by.post(
        CHAT,
        model=MODEL,
        messages=[{"role": "user", "content": fresh(400)}],
        max_tokens=256,
        stream=True,
    )


@cache
def long_messages() -> bytes:
    message = {"role": "user", "content": WORDS * 1200}
    return json.dumps({"model": MODEL, "messages": [message] * 40}).encode()


PIECES = (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n", 43_000)
BLANKS = (b"# a", b" ", 2_000_000, b"b")
HEADING = (b"# ", b"x", 300_000, b"\n\n" + WORDS.encode() * 20_000)
SOURCE = (b'{"id": "a", "text": "y", "source": "', b"x", 2_000_000, b'"}')
HEADINGS = (b"", b"# a\n\nb\n\n", 90_000)
CONDITIONS = {f"k{n}": {"gte": n} for n in range(250)}
LEAVES_S = 1.0
ATTACKS: dict[str, Attack] = {
    # no key
    "pieces of one byte": Attack(100, lambda by: by.raw(long(*PIECES))),
    "two lengths": Attack(20, lambda by: by.raw(TWO_LENGTHS)),
    "/openapi.json": Attack(8, lambda by: by.send("GET", "/openapi.json", keyed=False)),
    "heads that do not end": Attack(200, lambda by: by.raw(b"GET /livez HTT")),
    "bodies that do not end": Attack(60, lambda by: by.raw(HEAD + b"content-length: 900\r\n\r\n{")),
    "bodies of 100 MB": Attack(
        8, lambda by: by.raw(HEAD + b"content-length: 104857600\r\n\r\n", b"x" * 1_000_000)
    ),
    # any key
    "silent to MCP": Attack(64, lambda by: by.send("GET", "/mcp")),
    "heading of blanks": Attack(4, lambda by: by.upload("a.md", long(*BLANKS))),
    "heading of 300,000": Attack(4, lambda by: by.upload("b.md", long(*HEADING))),
    "one text, many times": Attack(4, one_text_many_times),
    "source of 2 MB": Attack(4, lambda by: by.upload("a.jsonl", long(*SOURCE))),
    "90,000 headings": Attack(6, lambda by: by.upload("headings.md", long(*HEADINGS)), LEAVES_S),
    "250 conditions": Attack(
        16, lambda by: by.post(SEARCH, query="mill", filter=CONDITIONS), LEAVES_S
    ),
    "pages share a stream": Attack(
        4, lambda by: by.upload("a.pdf", uploads.shared_stream_pdf(400, 8_000))
    ),
    "angle brackets": Attack(4, lambda by: by.upload("a.html", uploads.angle_brackets(8_000_000))),
    "5,000,000 values": Attack(
        4,
        lambda by: by.send("POST", DOCUMENTS, content=uploads.many_values(5_000_000), headers=JSON),
    ),
    "embeddings": Attack(
        6, lambda by: by.post("/v1/embeddings", model="all-MiniLM-L6-v2", input=[WORDS * 1000] * 12)
    ),
    "documents": Attack(
        6, lambda by: by.post(DOCUMENTS, documents=[{"text": fresh(9_000)} for _ in range(12)])
    ),
    "long searches": Attack(6, lambda by: by.post(SEARCH, query=fresh(9_000), k=10)),
    "long chats": Attack(32, long_chat),
    "long questions": Attack(
        32, lambda by: by.post("/v1/ask", question=fresh(150), collection="c", max_tokens=256)
    ),
    "prompts": Attack(
        16,
        lambda by: by.post(GENERATE, model=MODEL, prompt=fresh(400), options={"num_predict": 256}),
    ),
    "grammars": Attack(8, hostile_grammar),
    "long messages": Attack(
        8, lambda by: by.send("POST", CHAT, content=long_messages(), headers=JSON)
    ),
    "question of 90,000": Attack(
        32, lambda by: by.post(ASK, question=fresh(11_000), collection="c")
    ),
    "250 conditions, asked": Attack(
        32, lambda by: by.post(ASK, question="x", collection="c", filter=CONDITIONS), 1.0
    ),
    "collections": Attack(6, many_collections),
}
# After a client of these has left, what is still computed for it is counted.
LEAVING = (
    "long chats", "long questions", "prompts", "embeddings", "documents", "long searches", "250 conditions",
    "90,000 headings", "angle brackets", "pages share a stream", "grammars",
)  # fmt: skip


def main(name: str, port: str, key: str, seconds: str, clients: str) -> None:
    """Wait for a line on standard input, attack, and print how often each status came. 0 clients:
    as in the table.
    """
    attack = ATTACKS[name]
    os.nice(5)  # attackers are other machines
    warm = Attacker(int(port), key, 0.0)
    attack.act(warm)  # what is sent is made before the attack begins
    print("ready", flush=True)
    sys.stdin.readline()
    by = Attacker(int(port), key, time.monotonic() + float(seconds), attack.patience_s)

    def again() -> None:
        while time.monotonic() < by.ends:
            attack.act(by)

    threads = [threading.Thread(target=again) for _ in range(int(clients) or attack.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(by.statuses), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
