"""The figures of CachedAttention and of Tail-Optimized LRU that no other command shows."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.figure_bench import Bench, Figure, Kind, Row
from benchmarks.kcache import random_kv
from benchmarks.queueing import Hits, QueueServer, serve
from benchmarks.simulate import ReplaySetting, ShareGPTLike, simulate
from ragkv.model import full_pass


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
    """By turn: history and new tokens, seconds to prefill all of it, and seconds of the new tokens
    behind a loaded history; prompt tokens a second of both. Turns of prompts that are more than
    twice as long as those of the profile are left out.
    """
    by_turn = defaultdict(list)
    for turn in bench.trace.turns:
        by_turn[min(turn.number, 20)].append((16 * turn.shared, 16 * (turn.prompt - turn.shared)))
    for number, seen in sorted(by_turn.items()):
        known = [pair for pair in seen if sum(pair) <= 2 * bench.profiled_tokens]
        if not known:
            continue
        history, new = (statistics.mean(column) for column in zip(*known, strict=True))
        all_s = statistics.mean(bench.profile.prefill.at(sum(pair)) for pair in known)
        new_s = statistics.mean(_behind_s(bench, *pair) for pair in known)
        tokens = history + new
        left_out = len(seen) - len(known)
        yield [number, left_out, history, new, all_s, new_s, tokens / all_s, tokens / new_s]


def _behind_s(bench: Bench, history: int, new: int) -> float:
    """Seconds to compute new tokens behind a history that is loaded from disk meanwhile: they
    attend to it, and loading a layer takes what is not hidden.
    """
    prefill = bench.profile.prefill
    computing_s = prefill.fixed_s + prefill.at(history + new) - prefill.at(history)
    disk = bench.profile.tiers.get("disk") or bench.profile.tiers["memory"]
    layers = bench.profile.layers
    layer_s = disk.slice_s(history * bench.profile.stored_bytes_per_token / layers)
    return max(computing_s, layers * layer_s) + layer_s


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


@dataclass(frozen=True)
class Served:
    """One of the paper's models, as it was served there."""

    name: str
    weights: float
    layers: int
    width: int
    kv_mb_per_token: float
    gpus: int

    def server(self, scale: float = 1.0, **changes: Any) -> QueueServer:
        """Its queue with 128 GB of memory and 10 TB of disk, which takes no time; `scale` is the
        share of the paper's sessions.
        """
        token_mb = self.kv_mb_per_token
        values = {
            "memory_tokens": int(scale * 128e3 / token_mb),
            "disk_tokens": int(scale * 10e6 / token_mb),
            "token_ms": 1e3 * 2 * self.weights / (self.gpus * A100_FLOPS),
            "turn_ms": TURN_MS * (self.weights / self.gpus) / (13e9 / 2),
            "key_share": 4 * self.layers * self.width / (2 * self.weights),
            "memory_tokens_per_s": self.gpus * PCIE_MB_PER_S / token_mb,
        }
        return QueueServer(**(values | changes))

    def usd(self, gpu_hours: float, hours: float, with_store: bool) -> float:
        """Dollars of the paper's section 4.2."""
        stored = hours * (128 * 0.0088 + 10_240 * 0.000082) if with_store else 0.0
        return 5.0 * self.gpus * gpu_hours + stored


# Half of an A100's peak; its PCIe 4; the most that the paper grants a disk; a turn's share of a
# batch's decoding.
A100_FLOPS = 156e12
PCIE_MB_PER_S = 26e3
DISK_MB_PER_S = 5e3
TURN_MS = 350.0
MODELS = (
    Served("LLaMA-13B", 13e9, 40, 5120, 0.78, 2),
    Served("LLaMA-65B", 65e9, 80, 8192, 2.5, 4),
    Served("LLaMA-70B", 70e9, 80, 8192, 0.31, 4),
    Served("Falcon-40B", 40e9, 60, 8192, 0.12, 4),
)
SESSIONS = 9_000


def _served(bench: Bench, model: Served, arrivals_per_s: float = 1.0, **changes: Any) -> Hits:
    """The paper's workload, or a sixth of it with a sixth of the storage."""
    sessions = 1_500 if bench.quick else SESSIONS
    load = ShareGPTLike(sessions=sessions, arrivals_per_s=arrivals_per_s).draw()
    server = model.server(sessions / SESSIONS, **changes)
    return serve(load, "lookahead", server, warm_up_turns=sessions * 10 // 9)


def end_to_end(bench: Bench) -> Iterator[Row]:
    """Hit rate with first turns counted and without, seconds from a turn's start to its first
    token, thousands of prompt tokens a second, hours of the GPUs and dollars, by recomputing / by
    CachedAttention; and its hit rate and first token in a store like ours, in which disk has what
    memory has, and takes its time.
    """
    for model in MODELS:
        hits = _served(bench, model)
        disk = DISK_MB_PER_S / model.kv_mb_per_token
        ours = _served(bench, model, inclusive=True, disk_tokens_per_s=disk)
        thousands = hits.prompt_tokens / 1e3
        hours = (hits.recompute_busy_s / 3600, hits.busy_s / 3600)
        usd = (model.usd(hours[0], hits.hours, False), model.usd(hours[1], hits.hours, True))
        yield [
            model.name,
            hits.hit_rate_with_first_turns,
            hits.hit_rate,
            f"{hits.recompute_ttft_s:.3f} / {hits.ttft_s:.3f}",
            f"{thousands / hits.recompute_s:.0f} / {thousands / hits.prefill_s:.0f}",
            "{:.1f} / {:.1f}".format(*hours),
            "{:.0f} / {:.0f}".format(*usd),
            ours.hit_rate,
            ours.ttft_s,
        ]


def over_arrivals(bench: Bench) -> Iterator[Row]:
    """LLaMA-13B over sessions a second: hit rate, seconds to the first token, thousands of prompt
    tokens a second, hours of the GPUs.
    """
    for rate in (0.5, 1.0, 1.5, 2.0):
        hits = _served(bench, MODELS[0], rate)
        thousands = hits.prompt_tokens / 1e3 / hits.prefill_s
        yield [rate, hits.hit_rate, hits.ttft_s, thousands, hits.busy_s / 3600]


END_TO_END = (
    "model hits_all_turns hits TTFT_s Ktokens/s GPU_hours USD hits_inclusive TTFT_inclusive"
)
BY_TURN = "turn left_out history new all_s new_s tokens/s_RE tokens/s_CA"
SPREAD = "what n mean P50 P75 P90 P99"
_PHASES = Figure(recomputation, BY_TURN, Kind.FITTED, "throughput at most 7.8 times that of RE")
_LENGTHS = Figure(lengths, SPREAD, Kind.SIMULATED)
_ARRIVALS = Figure(
    over_arrivals,
    "sessions/s hits TTFT_s Ktokens/s GPU_hours",
    Kind.SIMULATED,
    "from .5 to 2 sessions a second: hits 82 to 77 %, .122 to .154 s, 858 to 681 thousand tokens a "
    "second, 6.25 to 7.01 hours",
)


def _end_to_end(paper: str) -> Figure:
    return Figure(end_to_end, END_TO_END, Kind.SIMULATED, paper)


_ORDER = "LLaMA-13B, 65B, 70B, Falcon-40B"
FIGURES = {
    "cachedattention 1": Figure(phases, "tokens prefill_s decode_step_s", Kind.MEASURED),
    "cachedattention 2": _LENGTHS,
    "cachedattention 4": _PHASES,
    "cachedattention 13": _end_to_end(f"hits 86, 71, 89, 90 % ({_ORDER})"),
    "cachedattention 14": _end_to_end(f"the first token comes 85, 61, 87, 86 % sooner ({_ORDER})"),
    "cachedattention 15": _end_to_end(f"throughput 6.8, 2.6, 7.8, 7.2 times RE's ({_ORDER})"),
    "cachedattention 16": _end_to_end(f"GPU time 4.0, 1.9, 3.3, 3.4 times less ({_ORDER})"),
    "cachedattention 17": _end_to_end(f"costs 70, 43, 66, 68 % less ({_ORDER})"),
    "cachedattention 22": Figure(overflow, "window dropped kept", Kind.SIMULATED),
    "cachedattention 24": Figure(capacities, "capacity hits median_ms P99_ms", Kind.SIMULATED),
    "cachedattention 25": _ARRIVALS,
    "cachedattention table 2": Figure(after_overflow, "article CA TT NKVT", Kind.MEASURED),
    "tlru 3": Figure(uncached, "cached 16_new 128_new 256_new 512_new", Kind.MEASURED),
    "tlru 4": _LENGTHS,
    "tlru 6": _LENGTHS,
}
