"""CacheBlend's figures that no other command shows."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks import lens
from benchmarks.default_ways import attention_of_last
from benchmarks.figure_bench import QUESTION, Bench, Figure, Kind, Row
from benchmarks.real_judge import COMPARED_TOKENS, Reader, divergence
from examples.earlier_prompts import ask_before
from ragkv import Chunk, Engine, EngineConfig
from ragkv.config import ControllerConfig, FusionConfig, RedisConfig, StoreConfig
from ragkv.retrieval import Document, Index, Splitter
from ragkv.scheduling import joint_prefills
from ragkv.store.tiers import Tier
from tests.store.fakes import ThrottledTier, store_of

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.18, 0.3)
# KV as the paper stores it
ALONE = EngineConfig(StoreConfig(codec="raw"), FusionConfig(stored_kv="alone"))
# What a GB (1e9 bytes) costs a month (730 h), by rounded cloud prices: the additional price of a
# machine with more memory, a network SSD, and a managed Redis.
USD_PER_GB = {"memory": 2.5, "disk": 0.08, "redis": 8.0}


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


def deviations(bench: Bench) -> Iterator[Row]:
    """KV deviation of tokens on some layers, relative to the layer's mean."""
    found = lens.truth(bench.engine, bench.chunks(6)).deviation().numpy()
    for layer in range(0, len(found), max(1, len(found) // 6)):
        one = found[layer] / max(found[layer].mean(), 1e-9)
        yield [layer, *(float(np.percentile(one, at)) for at in (10, 50, 75, 90, 99))]


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
    store = bench.engine.parts.store
    profile = None
    for info in [one for one in store.contents.infos() if list(one.token_ids) in chunks]:
        with store.lease(info.identity, info.token_ids) as lease:
            encoded.append(lease.read_entry())
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
                from tests.cluster.servers import RedisServer

                stack.callback((redis := RedisServer()).close)
                settings = replace(settings, redis=RedisConfig(redis.url, timeout_s=30.0))
            config = EngineConfig(settings, controller=ControllerConfig(False, ratio is None))
            store = store_of(settings, partial(_with_disk_of, speed))
            engine = stack.enter_context(Engine(bench.engine.model, config=config, store=store))
            profile = profile or engine.parts.profiler.measure(quick=True)
            engine.parts.profiler.use(profile)
            for entry in encoded if name != "new" else ():
                (store.tiers[-1] if name[0] == "n" else store).put(entry)
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
                tier.kind: size if tier.used_bytes is None else tier.used_bytes for tier in tiers
            }
        usd = sum(USD_PER_GB[kind] * used / 1e6 for kind, used in held.items())
        counted = times[0 if name[0] == "n" else 9 :]
        yield [
            f"{speed:.0e}",
            name,
            held.get("memory", 0) / held["disk"],
            usd,
            *np.percentile(counted, (50, 90)),
        ]


def _with_disk_of(speed: float, tier: Tier) -> Any:
    """`tier`, throttled to `speed` bytes a second if it is the disk."""
    return ThrottledTier(tier, speed) if tier.kind == "disk" else tier


def together(bench: Bench) -> Iterator[Row]:
    """Seconds until N fused prompts of 600 tokens that wait together are prefilled, and until one
    is on average: one after another, and in joint passes.
    """
    engine = bench.engine
    most = joint_prefills.JOINT_ROWS

    def both(prompts: list[list[list[int]]], rows: int) -> tuple[float, float]:
        joint_prefills.JOINT_ROWS = rows
        with ThreadPoolExecutor(len(prompts)) as pool:
            with engine.parts.scheduler.computing():
                waiting = [
                    pool.submit(engine.prefill, QUESTION, chunks, ratio=0.15) for chunks in prompts
                ]
                while engine.parts.scheduler.prefills.waiting < len(prompts) and not any(
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


def over_passages(bench: Bench) -> Iterator[Row]:
    """Full recompute over the best k paragraphs of all that BM25 finds: the gold answer's
    log-likelihood a token, and the share of prompts that hold it.
    """
    engine = bench.engine
    reader = Reader(engine)
    asked = bench.questions("xquad", 2 if bench.quick else 20)
    texts = list(dict.fromkeys(text for one in asked for text in one.passages))
    with Index(None, splitter=Splitter(engine.model.count_tokens, 10**6)) as index:
        index.writer.ingest(Document(str(number), text) for number, text in enumerate(texts))
        found = [index.search(one.question, 8, retriever="bm25") for one in asked]
    for count in (1, 2, 4, 8):
        likelihoods = []
        held = []
        for one, hits in zip(asked, found, strict=True):
            passages = [texts[int(hit.passage.document_id)] for hit in hits[:count]]
            prefill = engine.prefill(reader.question(one), passages, reuse="none")
            likelihoods.append(reader.likelihood(prefill, reader.golds(one)))
            held.append(any(gold in text for gold in one.golds for text in passages))
        yield [count, len(asked), statistics.mean(likelihoods), statistics.mean(held)]


def over_ratios(bench: Bench) -> Iterator[Row]:
    """By ratio: KL to full recompute and the gold answer's log-likelihood a token, of the paper's
    HKVD over KV alone and of the default.
    """
    asked = bench.questions("xquad", 2 if bench.quick else 20)
    reader = Reader(bench.engine)
    with bench.engine.with_config(ALONE) as alone:
        ways = ((alone, "hkvd"), (bench.engine, "attention"))
        values: dict[float, list[list[float]]] = {ratio: [] for ratio in RATIOS}
        for one in asked:
            question = reader.question(one)
            golds = reader.golds(one)
            full = alone.prefill(question, one.passages, reuse="none")
            answer = reader.decoded(full, COMPARED_TOKENS)
            wanted = reader.log_probabilities(full, answer)
            chunks = [alone.chunk(text) for text in one.passages]
            for engine, _ in ways:
                engine.entries.encode(chunks)
            for ratio in RATIOS:
                row = [reader.likelihood(full, golds)]
                for engine, selector in ways:
                    prefill = engine.prefill(question, chunks, ratio=ratio, selector=selector)
                    row.append(divergence(wanted, reader.log_probabilities(prefill, answer)))
                    row.append(reader.likelihood(prefill, golds))
                values[ratio].append(row)
            for engine, _ in ways:
                engine.entries.delete(chunks)
    for ratio, rows in values.items():
        yield [ratio, len(rows), *np.array(rows).mean(0).tolist()]


def attention_deviation(bench: Bench) -> Iterator[Row]:
    """By ratio: the distance of the question's attention from that of full recompute, over its
    norm, if the tokens with the highest KV deviation are recomputed, and if random ones are.
    """
    asked = bench.questions("xquad", 1 if bench.quick else 10)
    reader = Reader(bench.engine)
    found: dict[float, list[list[float]]] = {ratio: [] for ratio in RATIOS}
    with bench.engine.with_config(ALONE) as engine:
        for one in asked:
            question = reader.question(one)
            rows = len(engine.token_ids(question))
            chunks = [engine.chunk(text) for text in one.passages]
            full = engine.prefill(question, chunks, reuse="none")
            wanted = attention_of_last(engine, full, rows)
            engine.entries.encode(chunks)
            for ratio in RATIOS:
                row = []
                for selector in ("hkvd", "random"):
                    prefill = engine.prefill(question, chunks, ratio=ratio, selector=selector)
                    own = attention_of_last(engine, prefill, rows)
                    row.append(float((own - wanted).norm() / wanted.norm()))
                found[ratio].append(row)
            engine.entries.delete(chunks)
    for ratio, rows in found.items():
        yield [ratio, len(rows), *np.array(rows).mean(0).tolist()]


def over_counts(bench: Bench) -> Iterator[Row]:
    """First token over the number of chunks of 128 tokens, seconds, medians; times sooner than our
    full recompute.
    """
    for count in (3, 6) if bench.quick else (3, 6, 9, 12):
        yield [count, *_first_tokens(bench, bench.chunks(count))]


def over_lengths(bench: Bench) -> Iterator[Row]:
    """The same over the length of six chunks."""
    for tokens in (64, 128) if bench.quick else (64, 128, 256, 512):
        yield [tokens, *_first_tokens(bench, bench.chunks(6, tokens))]


def _first_tokens(bench: Bench, made: list[list[int]]) -> list[float]:
    """Full recompute, prefix caching, the paper's HKVD over KV alone, the default; how much sooner
    the last is than the first.
    """
    chunks = [Chunk(tuple(ids)) for ids in made]
    times: dict[str, list[float]] = {}
    with bench.engine.with_config(ALONE) as alone:
        alone.entries.encode(chunks)
        for run in range(2 if bench.quick else 4):
            bench.engine.entries.delete([(0,)])  # which also forgets the blocks of earlier prompts
            ask_before(bench.engine, chunks)
            found = {
                "full": bench.engine.prefill(QUESTION, chunks, reuse="none"),
                "prefix": bench.engine.prefill(QUESTION, chunks, reuse="prefix"),
                "hkvd": alone.prefill(QUESTION, chunks, ratio=0.15, selector="hkvd"),
                "attention": bench.engine.prefill(QUESTION, chunks, ratio=0.15),
            }
            for name, prefill in found.items() if run else ():
                times.setdefault(name, []).append(prefill.timing.first_token_s)
    medians = {name: statistics.median(several) for name, several in times.items()}
    return [*medians.values(), medians["full"] / medians["attention"]]


FIGURES = {
    "cacheblend 2": Figure(
        over_passages, "passages n gold_likelihood gold_in_prompt", Kind.MEASURED
    ),
    "cacheblend 3": Figure(answers, "method answer", Kind.MEASURED),
    "cacheblend 4": Figure(
        attention, "layer other_chunks_full other_chunks_reuse distance", Kind.MEASURED
    ),
    "cacheblend 6": Figure(attention_deviation, "ratio n hkvd random", Kind.MEASURED),
    "cacheblend 7": Figure(deviations, "layer P10 P50 P75 P90 P99", Kind.MEASURED),
    "cacheblend 10b": Figure(
        placement, "disk_bytes/s placement in_memory USD P50_s P90_s", Kind.MEASURED
    ),
    "cacheblend 15a": Figure(
        over_counts, "chunks full_s prefix_s hkvd_s attention_s sooner", Kind.MEASURED
    ),
    "cacheblend 15b": Figure(
        over_lengths, "tokens full_s prefix_s hkvd_s attention_s sooner", Kind.MEASURED
    ),
    "cacheblend 15c": Figure(
        together,
        "prompts one_by_one_s together_s gain mean_one_by_one_s mean_together_s",
        Kind.MEASURED,
    ),
    "cacheblend 16": Figure(
        over_ratios,
        "ratio n full_gold hkvd_KL hkvd_gold attention_KL attention_gold",
        Kind.MEASURED,
        "no loss from 5 to 18 % with HKVD on Yi-34B",
    ),
}
