"""Requests a second and time to the first token of servers of one model, asked by 1 to 16 clients
over HTTP.

    python -m benchmarks.serving --data FOLDER --targets fused=http://127.0.0.1:8000 \\
        prefix=http://127.0.0.1:8000 full=http://127.0.0.1:8000 llama.cpp=http://127.0.0.1:8080

FOLDER has XQuAD as published. A request is a question over `--passages` passages of a pool of
`--pool`: they come again, beside others and in any order. Every target gets the same requests as
streamed chat completions: those named `fused`, `prefix` and `full` are ragkv's, which get the
passages as documents; any other gets them in the message. Each of N clients sends its next request
when it has its answer. Before that, `fused` and `prefix` get every passage first in a prompt and
behind another one, so that its KV is stored. Other servers keep their own caches on.
"""

import argparse
import http.client
import itertools
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks import report, sets
from benchmarks.real import NO_DATA
from benchmarks.real_sets import questions

START_S = 300.0
OF_RAGKV = {
    "fused": {"reuse": "fused"},
    "prefix": {"reuse": "prefix"},
    "full": {"reuse": "none"},
}


class Asked(NamedTuple):
    """One request."""

    passages: tuple[str, ...]
    question: str


class Served(NamedTuple):
    """Seconds of one request."""

    first_s: float
    whole_s: float
    pieces: int  # of its answer, as streamed: tokens, mostly


def requests(options: argparse.Namespace) -> Iterator[Asked]:
    """Questions over passages of a pool, the same in every run and without an end."""
    found: dict[str, str] = {}  # passage -> a question about it
    for one in questions("xquad", options.data, "test", 400):
        right = next(text for text in one.passages if any(gold in text for gold in one.golds))
        found.setdefault(right, one.question)
    pool = list(found.items())[: options.pool]
    chance = random.Random(0)
    while True:
        drawn = chance.sample(pool, options.passages)
        yield Asked(tuple(text for text, _ in drawn), chance.choice(drawn)[1])


def serve(name: str, url: str, asked: Asked, tokens: int) -> Served:
    """Send one request and read its answer."""
    body: dict[str, Any] = {
        "model": "smollm2",
        "stream": True,
        "max_tokens": tokens,
        "temperature": 0,
    }
    if name in OF_RAGKV:
        body |= {"documents": [{"text": text} for text in asked.passages], "ragkv": OF_RAGKV[name]}
        message = asked.question
    else:
        message = "\n\n".join((*asked.passages, asked.question))
    body["messages"] = [{"role": "user", "content": message}]
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port or 80, timeout=600)
    began = time.perf_counter()
    first = 0.0
    pieces = 0
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
    except OSError as error:
        raise SystemExit(f"{name} does not answer at {url}: {error}") from error
    if response.status != 200:
        raise SystemExit(f"{name} answers {response.status}: {response.read(400).decode()}")
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if line.startswith(b"data: {") and any(
            c["delta"].get("content") for c in json.loads(data)["choices"]
        ):
            first = first or time.perf_counter()
            pieces = pieces + 1
    connection.close()
    ended = time.perf_counter()
    return Served((first or ended) - began, ended - began, pieces)


def measured(
    name: str, url: str, clients: int, asked: Sequence[Asked], tokens: int
) -> tuple[float, list[Served]]:
    """Seconds for all of `asked` by so many clients, and those of each request."""
    with ThreadPoolExecutor(clients) as pool:
        began = time.perf_counter()
        found = list(pool.map(lambda one: serve(name, url, one, tokens), asked))
    return time.perf_counter() - began, found


@contextmanager
def own_server(model: str) -> Iterator[str]:
    """The address of a server of ours with an empty home, which ends with the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "ragkv", "serve", "--home", home, "--model", model]
        process = subprocess.Popen(
            [*command, "--port", str(port), "--no-auth"], stdout=subprocess.DEVNULL
        )
        try:
            _wait_until_ready(process, port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    """Raises `SystemExit` if the server ends, or does not answer in `START_S` seconds."""
    ends = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < ends:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.5)
    raise SystemExit(f"Our own server did not start within {START_S:.0f} s.")


def main() -> None:
    options = _options()
    if options.data is None:
        report.skip(NO_DATA)
    if options.targets:
        measure(options, [target.partition("=")[::2] for target in options.targets])
        return
    with own_server(options.model) as url:
        measure(options, [(name, url) for name in OF_RAGKV])


def measure(options: argparse.Namespace, targets: Sequence[tuple[str, str]]) -> None:
    """Ask all targets, given by name and address; print the table, and write the JSON."""
    for name, url in targets:
        if name not in ("fused", "prefix"):
            continue
        pool = list(
            dict.fromkeys(
                text for one in itertools.islice(requests(options), 40) for text in one.passages
            )
        )
        # each once first, and once behind another
        for first, second in zip(pool, (*pool[1:], pool[0]), strict=True):
            serve(name, url, Asked((first, second), "What?"), 1)
    rows = []
    stream = requests(options)
    for clients, count in zip(options.clients, options.each, strict=True):
        asked = list(itertools.islice(stream, clients * count))
        for name, url in targets:
            own = asked if name in ("fused", "prefix") else asked[: max(clients, 2)]
            whole_s, served = measured(name, url, clients, own, options.tokens)
            first = [one.first_s for one in served]
            token_s = [(one.whole_s - one.first_s) / max(1, one.pieces - 1) for one in served]
            row = (
                name,
                clients,
                len(served),
                len(served) / whole_s,
                statistics.fmean(first),
                max(first),
            )
            rows.append((*row, 1e3 * statistics.fmean(token_s)))
            print(*rows[-1], flush=True)
    report.table(
        ("target", "clients", "requests", "requests/s", "first token, s", "longest", "ms/token"),
        rows,
    )
    print("written:", report.save("serving", rows))


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, "one and two clients")
    parser.add_argument(
        "--data", type=Path, default=sets.questions(), help="the folder with xquad.en.json"
    )
    parser.add_argument(
        "--targets", nargs="+", metavar="NAME=URL", help="none: a server of ours, three ways"
    )
    parser.add_argument("--model", default="smollm2", help="of a server of ours")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--each", nargs="+", type=int, default=[6, 5, 4, 3, 2], help="requests of a client, ragkv's"
    )
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--pool", type=int, default=24, help="of passages")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer, at most")
    options = parser.parse_args()
    if options.quick:
        options.clients = [1, 2]
        options.each = [1, 1]
    return options


if __name__ == "__main__":
    main()
