"""The server under load: many clients at once, and batched against unbatched decoding, over HTTP.

    python -m benchmarks.serve [--quick] [--part clients|decode ...] [--clients 64] [--seconds 60] [--shape NAME]

clients: the bundled reader answers the questions of the example corpus. 64 clients ask without pause; every answer is a
stream at temperature 0 and is compared with the answer to the same question asked alone. The time to the first token is
measured by the client, from sending the request to the first token event. The server's memory, open files and threads
are sampled twice a second; their means in the second and the last quarter are compared.

decode: chat answers of a fixed length on a real model shape with random weights, for 1, 4 and 16 clients, from two
servers that differ in `scheduler.batch_rows`: all waiting requests together, and one by one. The servers take turns.
Tokens/s are those of whole requests, including the prefill of a short prompt.

Client and server share the machine's cores.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import report
from benchmarks.serve_process import Sample, Server, serving, talker

EXAMPLES = Path(__file__).parents[1] / "examples"
PARTS = ("clients", "decode")
SAMPLE_S = 0.5


@dataclass(slots=True)
class Results:
    """What the clients measured."""

    ttft_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    tokens: int = 0
    different: list[str] = field(default_factory=list)
    refused: int = 0  # 503
    failed: list[str] = field(default_factory=list)


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        if "clients" in options.part:
            _clients(Path(folder), options)
        if "decode" in options.part:
            _decode(Path(folder), options)


def _clients(folder: Path, options: argparse.Namespace) -> None:
    settings = {"queue__limit": 2 * options.clients, "limits__max_tokens": 64}
    with serving(folder / "reader", options.threads, settings) as server:
        alone = _alone(server)
        samples, seen = asyncio.run(_load(server, alone, options.clients, options.seconds))
        errors = server.errors
    machine = report.machine()
    print(f"\n{options.clients} clients for {options.seconds:g} s: reader, {machine['cpu']}, {options.threads} threads")
    answered = len(seen.whole_s)
    ttft = statistics.quantiles(seen.ttft_s, n=100) if len(seen.ttft_s) > 1 else [0.0] * 99
    second, last = (_mean(samples, options.seconds, quarter) for quarter in (1, 3))
    report.table(
        ("answers", "a second", "differ from alone", "refused", "failed", "TTFT P50 ms", "P99 ms", "log errors"),
        [
            (
                answered,
                f"{answered / options.seconds:.1f}",
                len(seen.different),
                seen.refused,
                len(seen.failed),
                f"{ttft[49] * 1000:.0f}",
                f"{ttft[98] * 1000:.0f}",
                errors,
            )
        ],
    )
    report.table(
        ("", "second quarter", "last quarter", "change"),
        [
            (name, f"{second[name]:.1f}", f"{last[name]:.1f}", f"{100 * (last[name] / second[name] - 1):+.1f} %")
            for name in second
        ],
    )
    for text in (seen.different + seen.failed)[:5]:
        print("!", text)
    found = {
        "clients": options.clients,
        "seconds": options.seconds,
        "answers": answered,
        "different": seen.different,
        "refused": seen.refused,
        "failed": seen.failed,
        "ttft_p50_s": ttft[49],
        "ttft_p99_s": ttft[98],
        "second_quarter": second,
        "last_quarter": last,
        "samples": [asdict(sample) for sample in samples],
        "log_errors": errors,
    }
    print("written:", report.save(f"serve-clients{options.tag}", found))


def _alone(server: Server) -> dict[str, str]:
    """Ingest the example corpus; returns the answer to each question without other load, asked twice to warm up."""
    documents = [{"id": p.name, "text": p.read_text("utf-8")} for p in sorted((EXAMPLES / "corpus").iterdir())]
    lines = (EXAMPLES / "questions.jsonl").read_text("utf-8").splitlines()
    answers: dict[str, str] = {}
    with server.client() as client:
        client.post("/v1/collections", json={"name": "world"}).raise_for_status()
        client.post("/v1/collections/world/documents", json={"documents": documents}).raise_for_status()
        for _ in range(2):
            for line in lines:
                question = json.loads(line)["question"]
                found = client.post("/v1/ask", json=_body(question))
                answers[question] = found.raise_for_status().json()["answer"]
    return answers


def _body(question: str, **more: Any) -> dict[str, Any]:
    return {"question": question, "collection": "world", "max_tokens": 16, **more}


async def _load(server: Server, alone: dict[str, str], clients: int, seconds: float) -> tuple[list[Sample], Results]:
    seen, began = Results(), time.perf_counter()
    ends = began + seconds
    samples: list[Sample] = []

    async def sampling() -> None:
        while time.perf_counter() < ends:
            samples.append(server.sample(began))
            await asyncio.sleep(SAMPLE_S)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=300.0, trust_env=False, limits=limits) as client:
        await asyncio.gather(sampling(), *(_client(client, number, alone, seen, ends) for number in range(clients)))
    return samples, seen


async def _client(client: httpx.AsyncClient, number: int, alone: dict[str, str], seen: Results, ends: float) -> None:
    questions = list(alone)
    at = number  # each client begins with another question
    while time.perf_counter() < ends:
        question = questions[at % len(questions)]
        at += 1
        try:
            answer = await _asked(client, question, seen)
        except httpx.HTTPError as error:
            seen.failed.append(repr(error))
            continue
        if answer is not None and answer != alone[question]:
            seen.different.append(f"{question}: {answer!r}, alone {alone[question]!r}")


async def _asked(client: httpx.AsyncClient, question: str, seen: Results) -> str | None:
    """The answer to one question, or `None` if it was refused."""
    began, first = time.perf_counter(), None
    async with client.stream("POST", "/v1/ask", json=_body(question, stream=True)) as response:
        if response.status_code == 503:
            await asyncio.sleep(float(response.headers["retry-after"]))
            seen.refused += 1
            return None
        if response.status_code != 200:
            seen.failed.append(f"{response.status_code} {(await response.aread())[:200]!r}")
            return None
        event = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
                if event == "token" and first is None:
                    first = time.perf_counter() - began
            elif line.startswith("data: ") and event in ("answer", "error"):
                data = json.loads(line.removeprefix("data: "))
                if event == "error":
                    seen.failed.append(str(data)[:200])
                    return None
                seen.whole_s.append(time.perf_counter() - began)
                seen.ttft_s.append(seen.whole_s[-1] if first is None else first)
                return str(data["answer"])
    seen.failed.append("a stream ended without an answer event")
    return None


def _mean(samples: Sequence[Sample], seconds: float, quarter: int) -> dict[str, float]:
    inside = [s for s in samples if quarter <= s.at_s / seconds * 4 < quarter + 1] or list(samples)
    return {
        "MiB": statistics.fmean(s.rss_bytes for s in inside) / 1024**2,
        "open files": statistics.fmean(s.files for s in inside),
        "threads": statistics.fmean(s.threads for s in inside),
    }


def _decode(folder: Path, options: argparse.Namespace) -> None:
    model = talker(options.shape, folder / options.shape)
    shared = {"model": model, "engine__dtype": "bfloat16", "queue__limit": 64}
    modes = {"together": {}, "one by one": {"engine__scheduler__batch_rows": 1}}
    found: list[dict[str, Any]] = []
    with (
        serving(folder / "together", options.threads, {**shared, **modes["together"]}) as together,
        serving(folder / "one", options.threads, {**shared, **modes["one by one"]}) as one,
    ):
        servers = {"together": together, "one by one": one}
        for clients in options.rows:
            rates: dict[str, list[float]] = {name: [] for name in servers}
            for turn in range(options.runs + 1):
                for name, server in servers.items():
                    rate = asyncio.run(_talk(server, options.shape, clients, options.tokens, turn))
                    if turn:  # the first turn warms up
                        rates[name].append(rate)
            medians = {name: statistics.median(values) for name, values in rates.items()}
            found += [
                {"clients": clients, "how": name, "tokens_per_s": rate, "gain": rate / medians["one by one"]}
                for name, rate in medians.items()
            ]
    machine = report.machine()
    print(f"\nDecoding over HTTP: {options.shape}, random weights, bf16, {machine['cpu']}, {options.threads} threads")
    report.table(
        ("clients", "how", "tokens/s", "of one by one"),
        [(r["clients"], r["how"], f"{r['tokens_per_s']:.1f}", f"{r['gain']:.2f}x") for r in found],
    )
    print("written:", report.save(f"serve-decode-{options.shape}{options.tag}", found))


async def _talk(server: Server, shape: str, clients: int, tokens: int, turn: int) -> float:
    """Tokens per second of concurrent clients, one answer each."""

    async def one(client: httpx.AsyncClient, number: int) -> int:
        messages = [{"role": "user", "content": f"{number} {turn}"}]
        body = {"model": shape, "messages": messages, "max_tokens": tokens}
        response = await client.post("/v1/chat/completions", json=body)
        return int(response.raise_for_status().json()["usage"]["completion_tokens"])

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600.0, trust_env=False, limits=limits) as client:
        began = time.perf_counter()
        said = await asyncio.gather(*(one(client, number) for number in range(clients)))
        return sum(said) / (time.perf_counter() - began)


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="about a minute: fewer seconds, a tiny shape", threads=2)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--shape")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="numbers of clients in the part decode")
    parser.add_argument("--tokens", type=int, help="tokens per answer in the part decode")
    parser.add_argument("--runs", type=int, help="turns of each server, after one that warms up")
    options = parser.parse_args()
    quick = options.quick
    options.tag = "-quick" if quick else ""
    options.seconds = options.seconds or (12.0 if quick else 60.0)
    options.shape = options.shape or ("tiny" if quick else "qwen2.5-0.5b")
    options.tokens = options.tokens or (16 if quick else 32)
    options.runs = options.runs or (1 if quick else 3)
    return options


if __name__ == "__main__":
    main()
