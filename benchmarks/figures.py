"""The papers' figures and tables that no other command shows, in their simplest form: one table
each.

    python -m benchmarks.figures "cacheblend 7" "cacheblend 15c" [--model smollm2] python -m
    benchmarks.figures "cachedattention 4" --trace ShareGPT_V3.json --profile HOME/kv/profile.json
    python -m benchmarks.figures --list

Measured on a model over the articles of `examples/corpus`, or simulated from a trace
(docs/research/policies.md) and a profile.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import lens, report
from benchmarks.kcache import random_kv
from benchmarks.simulate import ReplaySetting, load_trace, simulate
from benchmarks.simulate.command import profile_in
from ragkv import Engine, EngineConfig
from ragkv.config import ControllerConfig, KCacheConfig, RedisConfig, StoreConfig
from ragkv.model import Adapter, PromptKV, full_pass
from ragkv.model.decode.batching import DecodeRow, decode_rows
from ragkv.model.kcache import OffloadedKV
from ragkv.scheduling import joint_prefills
from tests.store.fakes import ThrottledTier

CORPUS = Path(__file__).parents[1] / "examples" / "corpus"
Row = list[Any]
TOP_N = (16, 32, 64, 128)
QUESTION = "What do these passages say?"
REDIS_USD = 8.0  # A GB of a managed Redis costs so much a month.


class Bench:
    """What figures are made of; each part is made when it is first needed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.quick = options.quick

    @cached_property
    def engine(self) -> Engine:
        return Engine.from_pretrained(
            self.options.model, EngineConfig(store=StoreConfig(codec="raw"))
        )

    @cached_property
    def articles(self) -> dict[str, list[int]]:
        """Token ids by article."""
        files = sorted(CORPUS.glob("*.md"))[: 3 if self.quick else None]
        return {file.stem: list(self.engine.chunk(file.read_text()).token_ids) for file in files}

    def chunks(self, count: int, tokens: int = 128) -> list[list[int]]:
        """The first tokens of each article, from several articles in turn; stored."""
        articles = list(self.articles.values())
        made = [
            articles[i % len(articles)][i // len(articles) * tokens :][:tokens]
            for i in range(count)
        ]
        self.engine.warm(made)
        return made

    @cached_property
    def trace(self) -> Any:
        return load_trace(self.options.trace, 16)

    @cached_property
    def profile(self) -> Any:
        path = self.options.profile
        return self.engine.profiler.measure(quick=True) if path is None else profile_in(path)


def answers(bench: Bench) -> Iterator[Row]:
    """Answers by full recompute, full KV reuse and selective recompute."""
    chunks = bench.chunks(4)
    for name, how in (
        ("full", {"reuse": "none"}),
        ("reuse", {"ratio": 0.0}),
        ("fused .15", {"ratio": 0.15}),
    ):
        yield [name, bench.engine.answer(QUESTION, chunks, max_new_tokens=24, **how).text.strip()]


def attention(bench: Bench) -> Iterator[Row]:
    """The question's attention to all chunks but the last by full recompute, by reuse, and the
    distance of both.
    """
    chunks = bench.chunks(3)
    engine = bench.engine
    model = engine.model.adapter.model
    model.set_attn_implementation("eager")
    ids = [*(token for chunk in chunks for token in chunk), *engine.chunk(QUESTION).token_ids]
    owner = torch.tensor(
        [i for i, chunk in enumerate(chunks) for _ in chunk] + [-1] * (len(ids) - 384)
    )
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    apart = causal & ((owner[:, None] == owner[None]) | (owner == -1)[:, None])
    seen = []
    for mask in (causal, apart):
        bias = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(
            ~mask, torch.finfo(model.dtype).min
        )
        with torch.no_grad():
            out = model(
                torch.tensor([ids]), attention_mask=bias[None, None], output_attentions=True
            )
        seen.append([layer[0, :, 384:, :384].float().mean((0, 1)) for layer in out.attentions])
    for layer in range(0, len(seen[0]), max(1, len(seen[0]) // 6)):
        full = seen[0][layer]
        reuse = seen[1][layer]
        yield [
            layer,
            float(full[:256].sum()),
            float(reuse[:256].sum()),
            float((full - reuse).norm() / full.norm()),
        ]


def placement(bench: Bench) -> Iterator[Row]:
    """A corpus three times as big as memory, Zipf's use: its share there, USD a month for 1,000
    such, first tokens.

    The last two are a new replica with the controller, alone, and with a Redis that has every entry
    of another one.
    """
    rng = np.random.default_rng(0)
    zipf = 1 / np.arange(1, 25)
    chunks = bench.chunks(24, 32 if bench.quick else 128)
    asked = [
        rng.choice(24, 6, replace=False, p=zipf / zipf.sum())
        for _ in range(12 if bench.quick else 30)
    ]
    # entries and profile are made once
    encoded = []
    store = bench.engine.store
    profile = None
    for info in [one for one in store.infos() if list(one.token_ids) in chunks]:
        with store.lease(info.identity, info.token_ids) as lease:
            encoded.append(lease.read_encoded())
    size = sum(entry.size_bytes for entry in encoded)
    cells = [
        *product((1e12, 8e6), ("controller", "LRU", "memory", "disk")),
        (1e12, "new"),
        (1e12, "new, Redis"),
    ]
    for speed, name in cells if shutil.which("redis-server") else cells[:-1]:
        memory = {"memory": 2.0, "disk": 0.0}.get(name, 0.3)
        ratio = None if name[0] in "cn" else 0.15
        times = []
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            settings = StoreConfig(
                folder, memory_bytes=int(memory * size), codec="raw", prefetch=False
            )
            if name == "new, Redis":
                from tests.store.remote.servers import RedisServer

                stack.callback((redis := RedisServer()).close)
                settings = replace(settings, redis=RedisConfig(redis.url, timeout_s=30.0))
            config = EngineConfig(settings, controller=ControllerConfig(False, ratio is None))
            engine = stack.enter_context(bench.engine.with_config(config))
            profile = profile or engine.profiler.measure(quick=True)
            engine.controller.apply_profile(profile)
            slow = [
                ThrottledTier(one, speed) if one.kind.value == "disk" else one
                for one in engine.store._tiers
            ]
            engine.store._tiers = engine.store._promoter._tiers = tuple(slow)
            for entry in encoded if name != "new" else ():
                (slow[-1] if name[0] == "n" else engine.store).put(entry)
            engine.flush()
            for numbers in asked:
                times.append(
                    engine.prefill(
                        QUESTION, [chunks[n] for n in numbers], ratio=ratio
                    ).timing.first_token_s
                )
                engine.flush()
            tiers = engine.stats().store.tiers
            held = {
                tier.kind.value: size if tier.used_bytes is None else tier.used_bytes
                for tier in tiers
            }
        prices = asdict(engine.config.controller.prices) | {"redis_usd_per_gb_month": REDIS_USD}
        usd = sum(prices[f"{kind}_usd_per_gb_month"] * used / 1e6 for kind, used in held.items())
        counted = times[0 if name[0] == "n" else 9 :]
        yield [
            f"{speed:.0e}",
            name,
            held.get("memory", 0) / held["disk"],
            usd,
            *np.percentile(counted, (50, 90)),
        ]


def deviations(bench: Bench) -> Iterator[Row]:
    """KV deviation of tokens on some layers, relative to the layer's mean."""
    found = lens.truth(bench.engine, bench.chunks(6)).deviation().numpy()
    for layer in range(0, len(found), max(1, len(found) // 6)):
        one = found[layer] / max(found[layer].mean(), 1e-9)
        yield [layer, *(float(np.percentile(one, at)) for at in (10, 50, 75, 90, 99))]


def together(bench: Bench) -> Iterator[Row]:
    """Seconds until N fused prompts of 600 tokens that wait together are prefilled, and until one
    is on average: one after another, and in joint passes.
    """
    engine = bench.engine
    most = joint_prefills.JOINT_ROWS

    def both(prompts: list[list[list[int]]], rows: int) -> tuple[float, float]:
        joint_prefills.JOINT_ROWS = rows
        with ThreadPoolExecutor(len(prompts)) as pool:
            with engine.scheduler.turn():
                waiting = [
                    pool.submit(engine.prefill, QUESTION, chunks, ratio=0.15) for chunks in prompts
                ]
                while len(engine.scheduler.prefills._waiting) < len(prompts) and not any(
                    one.done() for one in waiting
                ):
                    time.sleep(0.01)
                began = time.perf_counter()
            ends = [
                pool.submit(lambda one=one: one.result() and time.perf_counter() - began)
                for one in waiting
            ]
            took = [end.result() for end in ends]
        return max(took), statistics.mean(took)

    engine.prefill(QUESTION, bench.chunks(1), ratio=0.15)  # the template's prefix is computed once
    for count in (1, 2) if bench.quick else (2, 4, 8):
        chunks = bench.chunks(5 * count, 112)
        prompts = [chunks[at : at + 5] for at in range(0, len(chunks), 5)]
        both(prompts, most)  # what is not stored is computed once
        engine.flush()
        times = [(*both(prompts, 0), *both(prompts, most)) for _ in range(2 if bench.quick else 5)]
        all_s, mean_s, joint_s, joint_mean_s = map(statistics.median, zip(*times, strict=True))
        yield [count, all_s, joint_s, all_s / joint_s, mean_s, joint_mean_s]


def after_overflow(bench: Bench) -> Iterator[Row]:
    """Share of an article's last 96 tokens predicted right behind 1,024 tokens whose oldest half
    was dropped: by stored KV at new positions, by the text computed again, by stored KV at its old
    positions.
    """
    adapter = bench.engine.model.adapter
    half = 512
    text = list[int]()
    for name, ids in bench.articles.items():
        text = [*text, *ids][-1024 - 96 :]
        if len(text) < 1024 + 96:
            continue
        record = adapter.new_recording(0, 1024)
        asked = torch.tensor(text[1024:])
        full_pass(adapter, text[:1024], adapter.new_kv(1024), record=record)
        right = []
        for at in (0, None, half):
            kv = adapter.new_kv(half + 96)
            for layer, (k_raw, v) in enumerate(record.kv[:, :, :, half:]):
                rotation = adapter.rope.tables(1024).span(
                    adapter.rope_kind(layer), at or 0, (at or 0) + half
                )
                kv.put(layer, 0, adapter.rotate(layer, k_raw[None], *rotation), v[None])
            if at is None:
                full_pass(adapter, text[half:1024], kv)
            guesses = adapter.logits(full_pass(adapter, asked[:-1], kv, start=half)).argmax(1)
            right.append(float((guesses == asked[1:]).float().mean()))
        yield [name, *right]


def phases(bench: Bench) -> Iterator[Row]:
    """Prefill by the profile's fit, and a decoding step behind it."""
    adapter = bench.engine.model.adapter
    for length in (128, 256, 512, 1024, 2048):
        kv = random_kv(adapter, length + 1, None)
        step = partial(full_pass, adapter, torch.tensor([0]), kv, start=length)
        yield [
            length,
            bench.profile.prefill.at(length),
            report.alternate({"step": step}, 5)["step"],
        ]


def lengths(bench: Bench) -> Iterator[Row]:
    """Turns and tokens of the trace's conversations."""
    last = {turn.group: turn for turn in bench.trace.turns}.values()
    for name, values in (
        ("turns", [t.number for t in last]),
        ("tokens", [16 * t.length for t in last]),
    ):
        yield [
            name,
            len(values),
            statistics.mean(values),
            *(float(np.percentile(values, p)) for p in (50, 75, 90, 99)),
        ]


def recomputation(bench: Bench) -> Iterator[Row]:
    """By turn: history and new tokens, the seconds to prefill all and the new ones alone, tokens/s
    of both.
    """
    by_turn = defaultdict(list)
    for turn in bench.trace.turns:
        by_turn[min(turn.number, 20)].append((16 * turn.shared, 16 * (turn.prompt - turn.shared)))
    for number, seen in sorted(by_turn.items()):
        history, new = (statistics.mean(column) for column in zip(*seen, strict=True))
        all_s = bench.profile.prefill.at(history + new)
        new_s = bench.profile.prefill.at(new)
        yield [
            number,
            history,
            new,
            all_s,
            new_s,
            (history + new) / all_s,
            (history + new) / max(new_s, 1e-9),
        ]


def overflow(bench: Bench) -> Iterator[Row]:
    """Reused share of histories if an overflow of the window drops all KV, and if half is kept at
    new positions.
    """
    for window in (2048, 4096, 8192, 32768):
        whole = kept = dropped = 0
        for turn in bench.trace.turns:
            history = 16 * turn.shared
            prompt = 16 * turn.prompt
            whole += history
            dropped += history if prompt <= window else 0
            kept += history if prompt <= window else min(history, window // 2)
        yield [window, dropped / max(1, whole), kept / max(1, whole)]


def capacities(bench: Bench) -> Iterator[Row]:
    """Hit rates of LRU at capacities, as shares of peak live: device memory alone, with host
    memory, with a disk.
    """
    for share in (0.02, 0.1, 0.3, 1.0):
        (found,) = simulate(bench.trace, ["lru"], ReplaySetting(int(share * bench.trace.peak_live)))
        yield [share, found.hit_rate, found.median_ms, found.p99_ms]


def uncached(bench: Bench) -> Iterator[Row]:
    """Seconds of a prefill over cached and new tokens, measured in conversations."""
    engine = bench.engine
    ids = [token for article in bench.articles.values() for token in article]
    for cached in (0, 256, 512, 1024)[: 2 if bench.quick else None]:
        session = engine.session(f"of {cached}")
        if cached:
            engine.append(session, ids[:cached], ids[:1], raw=True)
        times = [
            engine.prefill(ids[:new], session=session, raw=True).timing.prefill_s
            for new in (16, 128, 256, 512)
        ]
        yield [cached, *times]


@torch.no_grad()
def top_n(bench: Bench) -> Iterator[Row]:
    """Perplexity of an article's last 48 tokens behind another article, each fed whatever was
    predicted, by N and L.

    Geometric means over the articles, and the share of steps with the most probable token of
    ordinary decoding. All settings decode a token in one step, each over its own copy of one
    prefill.
    """
    adapter = bench.engine.model.adapter
    before = list[int](list(bench.articles.values())[-1])
    settings = [
        KCacheConfig(None, 10**6),
        *(KCacheConfig(n, resident) for resident in (0, 1, 2) for n in TOP_N),
    ]
    losses = []
    agreed = []
    for ids in bench.articles.values():
        text = [*before, *ids]
        before = ids
        kv = adapter.new_kv(len(text))
        full_pass(adapter, torch.tensor(text[:-48]), kv)
        kvs = [_offloaded(adapter, kv, setting) for setting in settings]
        for token, following in pairwise(text[-48:]):
            logits = decode_rows(adapter, [DecodeRow(own, token) for own in kvs])
            losses.append(-logits.double().log_softmax(-1)[:, following])
            agreed.append((logits.argmax(-1) == logits.argmax(-1)[0]).double())
    perplexity, same = (torch.stack(column).mean(0) for column in (losses, agreed))
    for at, setting in enumerate(settings):
        own = float((perplexity[at] - perplexity[0]).exp())
        level = setting.resident_layers if at else "-"
        yield [setting.top_n or "all", level, float(perplexity[at].exp()), own, float(same[at])]


def _offloaded(adapter: Adapter, kv: PromptKV, config: KCacheConfig) -> OffloadedKV:
    """A copy of a prefilled `kv` with values in host memory as `config` says."""
    made = OffloadedKV(adapter.kv_shape, kv.capacity, adapter.dtype, adapter.device, config)
    for layer in range(adapter.layer_count):
        made.put(layer, 0, *kv.view(layer, kv.length))
        made.finish_prefill(layer, kv.length)
    made.length = kv.length
    return made


def prompts(bench: Bench) -> Iterator[Row]:
    """Tokens of the articles: a prompt with one has as many."""
    sizes = [len(ids) for ids in bench.articles.values()]
    yield [len(sizes), min(sizes), statistics.median(sizes), max(sizes)]


Figure = tuple[Callable[[Bench], Iterator[Row]], str]
SPREAD = "what n mean P50 P75 P90 P99"
BY_TURN = "turn history new all_s new_s tokens/s_RE tokens/s_CA"
FIGURES: dict[str, Figure] = {
    "cacheblend 3": (answers, "method answer"),
    "cacheblend 4": (attention, "layer other_chunks_full other_chunks_reuse distance"),
    "cacheblend 7": (deviations, "layer P10 P50 P75 P90 P99"),
    "cacheblend 10b": (placement, "disk_bytes/s placement in_memory USD P50_s P90_s"),
    "cacheblend 15c": (
        together,
        "prompts one_by_one_s together_s gain mean_one_by_one_s mean_together_s",
    ),
    "cachedattention 1": (phases, "tokens prefill_s decode_step_s"),
    "cachedattention 2": (lengths, SPREAD),
    "cachedattention 4": (recomputation, BY_TURN),
    "cachedattention 15": (recomputation, BY_TURN),
    "cachedattention 16": (recomputation, BY_TURN),
    "cachedattention 22": (overflow, "window dropped kept"),
    "cachedattention 24": (capacities, "capacity hits median_ms P99_ms"),
    "cachedattention table 2": (after_overflow, "article CA TT NKVT"),
    "tlru 3": (uncached, "cached 16_new 128_new 256_new 512_new"),
    "tlru 4": (lengths, SPREAD),
    "tlru 6": (lengths, SPREAD),
    "kcache 2": (prompts, "articles least median most"),
    "kcache table 2": (top_n, "N L perplexity over_all agreement"),
    "kcache table 4": (top_n, "N L perplexity over_all agreement"),
}


def main() -> None:
    """Print the tables, and write the JSON."""
    parser = report.parser(__doc__, quick="three articles, few points", threads=1)
    parser.add_argument("figures", nargs="*", help="paper and figure, in quotes; none: all")
    parser.add_argument("--list", action="store_true", help="print their names")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--trace", default="sharegpt-like", help="of the simulator")
    parser.add_argument("--profile", type=Path, help="profile.json of a store; none: measured")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    results = {}
    for name in options.figures or FIGURES:
        make, headings = FIGURES[name]
        if options.list:
            print(f"{name}: {make.__doc__}")
            continue
        began = time.perf_counter()
        rows = list(make(bench))
        print(f"\n{name} ({time.perf_counter() - began:.0f} s). {make.__doc__}")
        report.table(headings.split(), rows)
        results[name] = {"headings": headings.split(), "rows": rows}
    if not options.list:
        print("written:", report.save("figures", results))


if __name__ == "__main__":
    main()
