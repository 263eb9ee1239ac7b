"""vLLM's OpenAI server with ragkv's connector against vLLM alone, in the same run, on a CPU in float32.

    python -m benchmarks.vllm_server [--quick] [--part first|clients ...] [--threads 2] [--layers 24]

It runs in vLLM's environment (`make test-vllm` sets it up). Both servers run all the time and take turns, so noise hits
both alike. vLLM alone has its prefix caching on, which is its default; the connector needs it off. Prompts are the BOS
token, 6 of 12 chunks of 512 tokens in random order and a question of 32 tokens, all sent as token ids. Weights and
entries are random, which changes no time; every chunk is fused, none is exact.

first: seconds from sending a request to its first streamed token; medians of alternating requests.

clients: 8 and 16 clients send requests of one token of answer, each after a random pause, for some time; no prompt is
sent twice. vLLM alone is saturated first (no pauses), then measured with pauses for half of that rate: its mean time to
the first token is the bound. Then the connector is given 2, 3, 4, 6 and 8 times that rate, each for half of the time,
until its mean time to the first token exceeds the bound.
"""

import argparse
import asyncio
import importlib.util
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import report

PARTS = ("first", "clients")
QUESTION_TOKENS = 32
CORPUS = 12  # chunks that are stored
FIRST = (("fused, ratio .15", 0.15), ("fused, ratio .05", 0.05), ("reuse alone", 0.0))
FUSING = "fusing_seconds"
MULTIPLES = (2, 3, 4, 6, 8)
BASE_PORT = 18710


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts of stored chunks."""

    prefix: tuple[int, ...]  # what stands before the first chunk
    corpus: tuple[tuple[int, ...], ...]
    chunks: int  # of each prompt
    vocabulary: int

    def make(self, seed: int) -> list[int]:
        """Token ids (S,) of prompt number `seed`."""
        chance = random.Random(seed)
        chosen = chance.sample(self.corpus, self.chunks)
        question = [chance.randrange(300, self.vocabulary) for _ in range(QUESTION_TOKENS)]
        return [*self.prefix, *(token for chunk in chosen for token in chunk), *question]


@dataclass(frozen=True, slots=True)
class Load:
    """What clients measured at one rate."""

    rate: float  # requests per second that were answered
    ttft_s: float  # mean
    requests: int


def main() -> None:
    options = _options()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here; run this in the environment that `make test-vllm` sets up.", file=sys.stderr)
        return
    from benchmarks import vllm_process as process

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, prompts = folder / "model", _prepare(folder, options)
        longest = ["--max-model-len", str(options.chunks * options.tokens + 1024), *options.vllm]
        servers = {}
        for number, (name, more) in enumerate(
            {"vLLM alone": [], "with ragkv": process.with_connector(folder / "home")}.items()
        ):
            began, log = time.monotonic(), folder / f"log-{number}"
            started = process.vllm_server(model, BASE_PORT + number, log, options.threads, [*longest, *more])
            servers[name] = stack.enter_context(started)
            print(f"{name}: started in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        alone, ragkv = servers.values()
        found: dict[str, Any] = {}
        if "first" in options.part:
            found["first"] = asyncio.run(_first(alone, ragkv, prompts, options))
        if "clients" in options.part:
            found["clients"] = [
                row for count in options.clients for row in asyncio.run(_clients(alone, ragkv, prompts, count, options))
            ]
        where = f"{options.shape}, {options.layers} layers, float32, random weights, {options.threads} threads"
        size = f"{options.chunks} x {options.tokens} + {QUESTION_TOKENS} tokens"
        print(f"\n{where}, {size}, {report.machine()['cpu']}, load {report.machine()['load_before']:.1f}")
        for part, rows in found.items():
            print(f"\n{part}")
            report.table(tuple(rows[0]), [tuple(row.values()) for row in rows])
        print("written:", report.save(f"vllm-server-{options.shape}-{options.layers}", found))


def _prepare(folder: Path, options: argparse.Namespace) -> Prompts:
    """Save the model, and store random entries for the chunks."""
    from benchmarks.random_model import put_random_scores, talker
    from ragkv import Engine, EngineConfig, StoreConfig
    from ragkv.store import Entry, EntryInfo

    talker(options.shape, folder / "model", torch.float32, options.layers)
    store = StoreConfig(directory=str(folder / "home" / "kv"))
    config = EngineConfig(store=store, dtype="float32", packed_bytes=0)
    with Engine.from_pretrained(folder / "model", config) as engine:
        adapter, identity = engine.model.adapter, engine.entries.encoder.identity
        layers, heads, size = adapter.layer_count, adapter.kv_heads, adapter.head_dim
        kv = torch.randn((layers, 2, heads, options.tokens, size), generator=torch.Generator().manual_seed(0))
        chance, vocabulary = random.Random(1), adapter.vocabulary
        corpus = tuple(tuple(chance.randrange(300, vocabulary) for _ in range(options.tokens)) for _ in range(CORPUS))
        for chunk in corpus:
            info = EntryInfo(identity.key(chunk), identity, chunk, "of another prompt", layers, heads, size)
            engine.store.put(Entry(info, kv.clone()))
            put_random_scores(engine, info)
            engine.store.flush()
        return Prompts(tuple(engine.intake.runs.before_documents), corpus, options.chunks, vocabulary)


async def _first(alone: Any, ragkv: Any, prompts: Prompts, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians of the first token's time; the first round is not measured."""
    wishes: dict[str, Mapping[str, Any]] = {name: {"ratio": ratio} for name, ratio in FIRST}
    wishes["with ragkv, full prefill"] = {"reuse": "none"}
    taken: dict[str, list[float]] = {"vLLM alone": [], **{name: [] for name in wishes}}
    inside: dict[str, list[float]] = {name: [] for name in wishes}
    async with alone.client() as first, ragkv.client() as second:
        for round_ in range(options.runs + 1):
            for number, name in enumerate(taken):
                prompt = prompts.make(100 * round_ + number)
                if name == "vLLM alone":
                    one = await alone.stream(first, prompt, 1)
                else:
                    before = ragkv.counts()
                    one = await ragkv.stream(second, prompt, 1, wishes[name])
                    now = ragkv.counts()
                    _expect(before, now, fused=int(name != "with ragkv, full prefill"))
                    if round_:
                        inside[name].append(now.get(FUSING, 0.0) - before.get(FUSING, 0.0))
                if round_:
                    taken[name].append(one.ttft_s)
            _say(f"first: round {round_} of {options.runs}")
    full = statistics.median(taken["vLLM alone"])
    return [
        {
            "method": name,
            "first token s": statistics.median(values),
            "of it fusing": f"{statistics.median(inside[name]):.3f}" if inside.get(name) else "-",
            "times sooner": f"{full / statistics.median(values):.2f}x",
        }
        for name, values in taken.items()
    ]


async def _clients(
    alone: Any, ragkv: Any, prompts: Prompts, count: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rates of both servers with `count` clients, and whether the connector's stay under the bound."""
    took_s, seeds = options.seconds, itertools.count(10_000 * count)
    full = await _load(alone, prompts, seeds, count, took_s, 0.0, None)
    half = await _load(alone, prompts, seeds, count, took_s, max(0.0, 2 * count / full.rate - 1.5 / full.rate), None)
    rows = [_row(count, "vLLM alone, saturated", full, half), _row(count, "vLLM alone, half of it", half, half)]
    _say(f"clients: {count}: bound {half.ttft_s:.3f} s at {half.rate:.3f} requests/s, saturated at {full.rate:.3f}")
    for multiple in MULTIPLES:
        pause_s = max(0.0, count / (multiple * half.rate) - half.ttft_s / 2)
        load = await _load(ragkv, prompts, seeds, count, took_s / 2, pause_s, {"ratio": options.ratio})
        rows.append(_row(count, f"ragkv, {multiple}x asked", load, half))
        _say(f"clients: {count}: {load.ttft_s:.3f} s at {load.rate:.3f} requests/s")
        if load.ttft_s > half.ttft_s or pause_s == 0.0:
            break
    return rows


async def _load(
    server: Any,
    prompts: Prompts,
    seeds: Iterator[int],
    count: int,
    took_s: float,
    pause_s: float,
    wish: Mapping[str, Any] | None,
) -> Load:
    """`count` clients send requests for `took_s`, with random pauses of `pause_s` on average before each of them.

    What is sent in that time is measured to its end; the rate counts what was answered in that time.
    """
    chance, ttfts, answered = random.Random(count), list[float](), 0
    before, began = server.counts(), time.perf_counter()

    async def client() -> None:
        nonlocal answered
        async with server.client() as http:
            while True:
                left = began + took_s - time.perf_counter()
                await asyncio.sleep(min(chance.expovariate(1.0) * pause_s, max(0.0, left)))
                if time.perf_counter() - began >= took_s:
                    return
                ttfts.append((await server.stream(http, prompts.make(next(seeds)), 1, wish)).ttft_s)
                answered += time.perf_counter() - began < took_s

    await asyncio.gather(*(client() for _ in range(count)))
    _expect(before, server.counts(), fused=0 if wish is None else len(ttfts))
    if not answered:
        raise RuntimeError(f"No request was answered within {took_s:g} s: give more --seconds, or fewer --layers.")
    return Load(answered / took_s, statistics.fmean(ttfts), len(ttfts))


def _row(count: int, name: str, load: Load, half: Load) -> dict[str, Any]:
    return {
        "clients": count,
        "server": name,
        "requests": load.requests,
        "requests/s": load.rate,
        "of half": f"{load.rate / half.rate:.2f}x",
        "mean first token s": load.ttft_s,
        "in bound": "yes" if load.ttft_s <= half.ttft_s else "no",
    }


def _expect(before: Mapping[str, float], now: Mapping[str, float], fused: int) -> None:
    """Raise `RuntimeError` unless `fused` requests were fused."""
    counted = now.get("prompts_fused", 0) - before.get("prompts_fused", 0)
    if counted != fused:
        raise RuntimeError(f"{counted:.0f} requests were fused, not {fused}; the counts: {dict(now)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="4 layers, a minute of clients at one rate", threads=2, runs=5)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512, help="of each chunk")
    parser.add_argument("--clients", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--seconds", type=float, default=300.0, help="of vLLM alone at one rate, in the part clients")
    parser.add_argument("--ratio", type=float, default=0.15, help="of the part clients")
    parser.add_argument("--vllm", nargs="*", default=["--enforce-eager"], help="further arguments for both servers")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.runs, options.seconds = 4, 3, 60.0
    return options


if __name__ == "__main__":
    main()
