"""Eviction policies on generated loads and given traces: where policies for the tail gain, and
where they lose.

    python -m benchmarks.policies [--quick] [--traces FILE ...] [--part tail|queue|live ...]

Everything here is simulated: blocks of 16 tokens, TTFT = .1 ms a computed token (alpha of the T-LRU
paper), cold start, first turns included, optional caching, Q^ the trace's mean. Capacities are
shares of peak live, the most blocks of conversations that will return.

Claims: (1) T-LRU lowers TEL against LRU where capacity is tight, and can be worse than LRU where it
is not; guarded T-LRU is never worse. (2) Look-ahead needs a queue. (3) A live memory tier, which
learns Q^, does what is simulated.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import sets
from benchmarks.queueing import QueueServer, serve
from benchmarks.report import parser, save, table
from benchmarks.simulate import (
    ReplaySetting,
    Report,
    ShareGPTLike,
    Trace,
    load_trace,
    simulate,
    xi_blocks,
)
from benchmarks.simulate.live import simulate_live

BLOCK = 16
SHARES = (0.1, 0.3, 0.6, 1.0, 1.5, 3.0)
XIS_MS = (100.0, 200.0, 300.0)
SLO_MS = 200.0
STEADY = ("lru", "threshold-lru")  # policies that do not know xi
ONLINE = ("t-lru", "t-lru-guarded", "et-lru")
OFFLINE = ("end-aware", "length-aware", "tail-belady")
# PAPER has the T-LRU paper's claims against LRU: WildChat (tables 1 and 3), ShareGPT (tables 4 and
# 6).
PAPER = {
    "P90": "up to -27.5 % / -10 %",
    "P95": "up to -23.9 % / -7 %",
    "over SLO": "-8.8 to -40.7 % / -2 to -8 %",
}
# These are the tokens of a live store's block, and its target.
LIVE_BLOCK = 256
LIVE_TARGET_MS = 1000.0
# Of LLaMA-13B: 40 layers of 5,120, a disk of 2.5 GB/s, and two links of 26 GB/s.
KEY_SHARE = 4 * 40 * 5120 / (2 * 13e9)
DISK_TOKENS_PER_S = 2_500 / 0.78
MEMORY_TOKENS_PER_S = 2 * 26_000 / 0.78
# CachedAttention's figure 21a, by setting and policy.
PAPER_HITS = {
    ("128G/2T overload", "fifo"): "9.5 %",
    ("128G/2T overload", "lru"): "12.9 %",
    ("128G/2T overload", "lookahead"): "about 40 %",
    ("128G/10T overload", "fifo"): "48 %",
    ("128G/10T overload", "lru"): "58 %",
    ("128G/10T overload", "lookahead"): "86 %",
}
GIB_TOKENS = 1024 / 0.78  # tokens of LLaMA-13B in a GiB (CachedAttention section 4.2)


def traces(files: Sequence[Path], quick: bool) -> Iterator[Trace]:
    """The given traces and both generated loads; only their first 2,000 requests if quick."""
    for where in ("birth-death", "sharegpt-like", *map(str, files)):
        trace = load_trace(where, BLOCK)
        yield trace.first(2_000) if quick else trace


def cell(trace: Trace, share: float, xi_ms: float, names: tuple[str, ...]) -> dict[str, Report]:
    """Reports of policies at one capacity and threshold."""
    setting = ReplaySetting(int(share * trace.peak_live), xi_blocks(xi_ms, BLOCK), xi_ms, SLO_MS)
    return {report.policy: report for report in simulate(trace, names, setting)}


def change(new: float, old: float) -> float:
    """The change in per cent, negative for a decrease."""
    return 100 * (new - old) / old if old else 0.0


def tail(files: Sequence[Path], quick: bool) -> list[dict[str, Any]]:
    """The T-LRU paper's tables 1 to 6 and figures 5 and 7 over capacities: TEL, P90, P95, SLO
    misses against LRU.
    """
    rows: list[dict[str, Any]] = []
    for trace in traces(files, quick):
        print(f"\n{trace.name}: {len(trace.turns)} requests, peak live {trace.peak_live} blocks")
        shown = []
        for share in (0.3, 1.0) if quick else SHARES:
            for xi_ms in (200.0,) if quick else XIS_MS:
                reports = cell(trace, share, xi_ms, STEADY + ONLINE + OFFLINE)
                rows += [
                    {"trace": trace.name, "share": share, "xi_ms": xi_ms, **asdict(report)}
                    for report in reports.values()
                ]
                lru = reports["lru"]
                tel = [
                    f"{change(reports[n].tel_blocks, lru.tel_blocks):+.1f}"
                    for n in (STEADY + ONLINE + OFFLINE)[1:]
                ]
                costs = [
                    f"{change(getattr(reports['t-lru'], key), getattr(lru, key)):+.1f}"
                    for key in ("median_ms", "p90_ms")
                ]
                shown.append([share, int(xi_ms), lru.tel_blocks, *tel, *costs])
        print("TEL against LRU, per cent (negative is better), and what T-LRU costs")
        names = (STEADY + ONLINE + OFFLINE)[1:]
        headings = ["capacity", "xi ms", "LRU blocks", *names, "T-LRU's median", "T-LRU's P90"]
        table(headings, shown)
    for policy in ("t-lru-guarded", "et-lru"):
        compare_with_plain(rows, policy)
    latencies(rows)
    return rows


def compare_with_plain(rows: list[dict[str, Any]], policy: str) -> None:
    """Whether a policy is ever worse than LRU, and how much of plain T-LRU's gain it keeps where
    there is one.
    """
    cells: dict[tuple[Any, ...], dict[str, int]] = {}
    for row in rows:
        cells.setdefault((row["trace"], row["share"], row["xi_ms"]), {})[row["policy"]] = row[
            "tel_blocks"
        ]
    worst = max((change(tel[policy], tel["lru"]), where) for where, tel in cells.items())
    kept = sorted(
        ((tel["lru"] - tel[policy]) / (tel["lru"] - tel["t-lru"]), where)
        for where, tel in cells.items()
        if tel["lru"] - tel["t-lru"] > 0.001 * tel["lru"]
    )
    plain = sum(tel["t-lru"] > 1.001 * tel["lru"] for tel in cells.values())
    print(
        f"\n{policy}, {len(cells)} cells: TEL at worst {worst[0]:+.2f} % of LRU's, at {worst[1]}."
    )
    print(f"Plain T-LRU is worse than LRU in {plain}, better in {len(kept)}.", end=" ")
    if kept:
        enough = sum(share >= 0.8 for share, _ in kept)
        middle = statistics.median(share for share, _ in kept)
        print(
            f"Of that gain it has {middle:.0%} (median), {kept[0][0]:.0%} (least, at "
            f"{kept[0][1]}); 80 % in {enough}."
        )


def latencies(rows: list[dict[str, Any]]) -> None:
    """P90, P95 and SLO misses against LRU and Threshold-LRU, with the paper's claims: tables 1 to
    6.
    """
    by_cell: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_cell.setdefault((row["trace"], row["share"], row["xi_ms"]), {})[row["policy"]] = row
    print(f"\nPer cent against LRU / Threshold-LRU at xi 200 ms. The paper, T-LRU: {PAPER}")
    shown = []
    for (trace, share, xi_ms), found in by_cell.items():
        if xi_ms == 200.0:
            for policy in ("t-lru", "t-lru-guarded", "tail-belady"):
                pairs = [
                    "/".join(
                        f"{change(found[policy][key], found[base][key]):+.1f}" for base in STEADY
                    )
                    for key in ("median_ms", "p90_ms", "p95_ms", "p99_ms", "slo_misses")
                ]
                shown.append([trace, share, policy, *pairs])
    table(["trace", "capacity", "policy", "median", "P90", "P95", "P99", "over SLO"], shown)


def shipped_as(server: QueueServer) -> QueueServer:
    """The same with a store like ours: disk has what memory has, and takes its time."""
    return replace(
        server,
        inclusive=True,
        disk_tokens_per_s=DISK_TOKENS_PER_S,
        memory_tokens_per_s=MEMORY_TOKENS_PER_S,
    )


def queue(_files: Sequence[Path], quick: bool) -> list[dict[str, Any]]:
    """CachedAttention's figures 21, 23 and 25: hit rates by memory/disk, by capacity over CCpUT, by
    arrival rate.
    """
    sessions = 1_500 if quick else 9_000
    rows: list[dict[str, Any]] = []

    def run(
        what: str,
        load: ShareGPTLike,
        server: QueueServer,
        names: tuple[str, ...] = ("fifo", "lru", "lookahead"),
    ) -> None:
        drawn = load.draw()
        for name in names:
            hits = serve(drawn, name, server, warm_up_turns=sessions * 10 // 9)
            rate = hits.hit_rate
            with_first = hits.hit_rate_with_first_turns
            row: dict[str, Any] = {
                "setting": what,
                "policy": name,
                "hits": rate,
                "with first turns": with_first,
            }
            row |= {"of hits in memory": hits.memory_share, "mean queue": round(hits.mean_queue)}
            row |= {"wait s": round(hits.mean_wait_s), "first token s": hits.ttft_s}
            shipped = serve(drawn, name, shipped_as(server), warm_up_turns=sessions * 10 // 9)
            row |= {"hits, shipped": shipped.hit_rate, "first token s, shipped": shipped.ttft_s}
            rows.append(row | {"the paper": PAPER_HITS.get((what, name), "")})

    load = ShareGPTLike(sessions=sessions)
    scale = sessions / 9_000
    for turn_ms, name in ((350.0, "overload"), (100.0, "no overload")):
        for disk_gib in (1024, 2048, 4096, 10240):
            server = QueueServer(
                int(128 * GIB_TOKENS * scale),
                int(disk_gib * GIB_TOKENS * scale),
                turn_ms=turn_ms,
                key_share=KEY_SHARE,
            )
            run(f"128G/{disk_gib // 1024}T {name}", load, server)
    per_hour = 3_600 * 4_096 * scale  # CCpUT: distinct sessions an hour times the context
    for share in (0.05, 0.1, 0.25, 0.5, 1.0):
        memory = int(min(128 * GIB_TOKENS * scale, share * per_hour / 2))
        server = QueueServer(memory, int(share * per_hour) - memory, turn_ms=100.0, ttl_s=3_600.0)
        run(f"RCC/CCpUT {share}", load, server, ("lru", "lookahead"))
    for rate in (0.5, 1.0, 1.5, 2.0):
        server = QueueServer(int(128 * GIB_TOKENS * scale), int(2048 * GIB_TOKENS * scale))
        run(
            f"{rate:g} sessions/s, 128G/2T",
            ShareGPTLike(sessions=sessions, arrivals_per_s=rate),
            server,
            ("lru", "lookahead"),
        )
    print(
        "\nSessions in a queue (simulated: LLaMA-13B, ShareGPT-like). The paper's store is exclusive, "
        "and its disk takes no time; in the shipped one disk has what memory has, and is read at "
        f"{DISK_TOKENS_PER_S:.0f} tokens/s."
    )
    table(list(rows[0]), [list(row.values()) for row in rows])
    return rows


def live(files: Sequence[Path], quick: bool) -> list[dict[str, Any]]:
    """T-LRU at a target of a second: a live memory tier, which learns Q^, beside the simulator,
    which knows it.
    """
    rows: list[dict[str, Any]] = []
    for trace in traces(files, quick):
        trace = trace.in_blocks_of(LIVE_BLOCK)
        for share, name in product(
            (0.3,) if quick else (0.3, 0.6), ("lru", "t-lru", "t-lru-guarded")
        ):
            xi = xi_blocks(LIVE_TARGET_MS, LIVE_BLOCK)
            setting = ReplaySetting(int(share * trace.peak_live), xi, LIVE_TARGET_MS)
            (simulated,), served = (
                simulate(trace, [name], setting),
                simulate_live(trace, name, setting),
            )
            row: dict[str, Any] = {"trace": trace.name, "capacity": share, "policy": name}
            for key in ("tel_blocks", "uncached_blocks", "p99_ms"):
                row |= {
                    f"{key} simulated": getattr(simulated, key),
                    f"{key} live": getattr(served, key),
                }
            rows.append(row)
            print(*row.values(), flush=True)
    table(list(rows[0]), [list(row.values()) for row in rows])
    return rows


PARTS: dict[str, Callable[[Sequence[Path], bool], list[dict[str, Any]]]] = {
    "tail": tail,
    "queue": queue,
    "live": live,
}


def main() -> None:
    """Measure, print, and write the JSON."""
    options_parser = parser(__doc__, quick="2,000 requests a trace, few cells")
    options_parser.add_argument(
        "--traces",
        type=Path,
        nargs="*",
        default=sets.traces(),
        help="further traces, CSV or as published: docs/research/policies.md",
    )
    options_parser.add_argument(
        "--part", choices=list(PARTS), action="append", help="only this part; repeat for more"
    )
    options = options_parser.parse_args()
    results = {name: PARTS[name](options.traces, options.quick) for name in options.part or PARTS}
    save("policies" if not options.part else f"policies-{'-'.join(options.part)}", results)


if __name__ == "__main__":
    main()
