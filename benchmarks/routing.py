"""Replicas behind a router, simulated: hits by tier, TTFT, and the hits that no routing can exceed.

    python -m benchmarks.routing [--quick] [--traces DIR] [--part ragpulse|arrivals|mooncake|routers|speed ...]

Simulated on published traces, which this repository does not contain (docs/policies.md); the routers are the objects
that the Ray application runs. RAGPulse takes times measured for the Qwen2.5-0.5B shape on two cores (docs/speed.md):
8,574 ms for 3,104 tokens in full, 1,509 ms where 3,072 of them are found and 15 % of these recomputed; 75 ms of
both are fixed; 12,288 bytes a token, read at 2.5 GB/s from disk and over 10 Gbit/s from the shared tier. Mooncake,
whose prompts have 12,000 tokens, takes the T-LRU paper's .1 ms a token, 131,072 bytes a token and 25 Gbit/s.

`busy` is the share of time the replicas would be busy without any hit; at 1 or more they need hits to keep up.
Arrivals are a Poisson process in the trace's order, unless the part says that they are the trace's own.
`closed` is the gained share of the gap between random's local hits and the bound. The bound is one store of all
replicas' capacity that knows the future (Belady).

Claims: (1) chunk-aware finds more tokens on the replica than random, at every size, and its P95 is below that of every
other router that considers content or conversations. (2) Load is balanced: no replica gets more than 1.4 times its
share of requests. (3) The gain comes from knowledge: routers that know nothing of each other lose most of it.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.report import parser, save, table
from ragkv.lab.simulate import Profile, RagLoad, Shape, TurnLoad, load_trace, poisson, read_rag_requests, serve_replicas
from ragkv.scheduling.replica_routing import ReplicaLoad, RouterSettings, make_router

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
CPU = Profile(token_ms=2.762, fixed_ms=75.0, found_token_ms=0.438, load_token_ms=0.005, remote_token_ms=0.0098)
GPU = Profile(token_ms=0.1, remote_token_ms=0.042)
SHARED_WAIT = 1.0  # with a shared tier, misses are loaded, not computed, so waiting weighs more
ORDER = ("random", "round-robin", "least-loaded", "session-sticky", "chunk-aware")
HEADINGS = (
    "replicas", "each", "shared", "busy", "router", "local", "found", "closed", "P50 ms", "P95 ms", "most", "imbalance",
)  # fmt: skip
Cell = dict[str, Any]


def rag(folder: Path, quick: bool, own_times: bool = False) -> RagLoad | None:
    """RAGPulse, if it is available."""
    if not (folder / "ragpulse").is_dir():
        return None
    requests = read_rag_requests(folder / "ragpulse")[: 1_500 if quick else None]
    times = None if own_times else poisson(len(requests), requests[-1].at - requests[0].at)
    return RagLoad(requests, "RAGPulse", times=times)


def cells(
    load: RagLoad | TurnLoad, shape: Shape, each: float, busy: float, names: tuple[str, ...] = ORDER
) -> list[Cell]:
    """Every router over one shape."""
    shape = replace(shape, speedup=load.speedup_for(busy, shape.replicas, shape.profile))
    if shape.remote_tokens is None:
        shape = replace(shape, routing=RouterSettings(wait_share=SHARED_WAIT))
    bounds, rows = load.bounds(replace(shape, remote_tokens=0)), list[Cell]()
    for name in names:
        done = serve_replicas(load, replace(shape, router=name))
        known: Cell = {"load": load.name, "each": each, "shared": shape.remote_tokens is None, "asked_busy": busy}
        rows.append(known | asdict(done) | {"local": done.local, "found": done.found} | asdict(bounds))
    start = rows[0]["local"]
    for row in rows:
        row["closed"] = (row["local"] - start) / (bounds.belady - start) if bounds.belady > start else 0.0
    return rows


def show(rows: list[Cell]) -> None:
    """Print rows as a table, with the bounds in separate rows."""
    lines: list[list[Any]] = []
    for row in rows:
        where = [row["replicas"], row["each"], "yes" if row["shared"] else "-", row["asked_busy"]]
        shares = [f"{row[name]:.1%}" for name in ("local", "found")]
        times = [round(row["median_ms"]), round(row["p95_ms"])]
        uneven = [f"{row['most_requests']:.2f}", f"{row['imbalance']:.2f}"]
        lines.append([*where, row["router"], *shares, f"{row['closed']:+.0%}", *times, *uneven])
        if row["router"] == ORDER[-1]:
            found = [f"{row['belady']:.1%}", f"{row['unbounded']:.1%}"]
            lines.append([*where, "bounds: Belady, unbounded", *found, "", "", "", "", ""])
    table(HEADINGS, lines)


def ragpulse(folder: Path, quick: bool) -> list[Cell]:
    """RAGPulse: replicas, capacity of each as a share of all stored parts, with and without a shared tier."""
    load = rag(folder, quick)
    if load is None:
        return []
    rows = []
    for replicas in (4, 16) if quick else (2, 4, 16, 64):
        for each in (0.05,) if quick else (0.02, 0.1):
            for remote in (0, None):
                shape = Shape(
                    replicas, int(each * load.stored_tokens), remote_tokens=remote, policy="gdsf-memory", profile=CPU
                )
                for busy in (0.9,) if quick else (0.9, 1.5):
                    rows += cells(load, shape, each, busy)
    print(f"\n{load.name}: {len(load.times)} requests, {load.stored_tokens} tokens in stored parts, gdsf-memory")
    show(rows)
    return rows


def arrivals(folder: Path, quick: bool) -> list[Cell]:
    """RAGPulse at its own times, a week compressed: nights, days and bursts."""
    load = rag(folder, quick, own_times=True)
    if load is None:
        return []
    rows = []
    for replicas in (4, 16):
        shape = Shape(replicas, int(0.1 * load.stored_tokens), policy="gdsf-memory", profile=CPU)
        rows += cells(load, shape, 0.1, 0.3)
    print(f"\n{load.name} at the trace's own times")
    show(rows)
    return rows


def mooncake(folder: Path, quick: bool) -> list[Cell]:
    """Mooncake's conversations: capacity of each replica as a share of peak live over the replicas."""
    path = folder / "mooncake/conversation_trace.jsonl"
    if not path.is_file():
        return []
    trace = load_trace(str(path), 16)
    load, rows = TurnLoad(trace.first(2_000) if quick else trace), list[Cell]()
    for replicas in (4,) if quick else (4, 16):
        for each in (1.0,) if quick else (0.3, 1.0):
            tokens = int(each * load.trace.peak_live * 16 / replicas)
            for remote in (0, None):
                shape = Shape(replicas, tokens, remote_tokens=remote, profile=GPU)
                rows += cells(load, shape, each, 0.9)
    print(f"\n{load.name}: {len(load.times)} requests, LRU; capacity of each as a share of peak live over the replicas")
    show(rows)
    return rows


def routers(folder: Path, quick: bool) -> list[Cell]:
    """Several chunk-aware routers that know nothing of each other, RAGPulse, 16 replicas."""
    load = rag(folder, quick)
    if load is None:
        return []
    rows = []
    for count in (1, 2, 4, 16):
        shape = Shape(16, int(0.1 * load.stored_tokens), policy="gdsf-memory", routers=count, profile=CPU)
        *_, row = cells(load, shape, 0.1, 0.9, ("random", "chunk-aware"))
        rows.append(row | {"routers": count})
    print("\nRAGPulse, 16 replicas: several chunk-aware routers that know nothing of each other")
    lines = [[r["routers"], f"{r['local']:.1%}", f"{r['closed']:+.0%}", round(r["p95_ms"])] for r in rows]
    table(["routers", "local", "closed", "P95 ms"], lines)
    return rows


def speed(folder: Path, quick: bool) -> list[Cell]:
    """Decisions a second of one router on one core, requests of RAGPulse, after 2,000 of them."""
    load = rag(folder, False)
    if load is None:
        return []
    rows = []
    for replicas in (1, 10, 100, 1_000):
        for name in ORDER:
            router, views = make_router(name), [ReplicaLoad(f"r{n}", n % 3) for n in range(replicas)]
            known, count = load.routing_requests[:2_000], 20 if quick else 200
            for number, request in enumerate(known):
                router.sent(request, f"r{number % replicas}")
            began = time.perf_counter()
            for request in load.routing_requests[2_000 : 2_000 + count]:
                router.sent(request, router.rank(request, views)[0])
            rows.append({"replicas": replicas, "router": name, "per_s": count / (time.perf_counter() - began)})
    print("\nDecisions a second of one router, one core")
    by = {(row["replicas"], row["router"]): row["per_s"] for row in rows}
    table(["replicas", *ORDER], [[n, *(round(by[n, name]) for name in ORDER)] for n in (1, 10, 100, 1_000)])
    return rows


PARTS: dict[str, Callable[[Path, bool], list[Cell]]] = {
    "ragpulse": ragpulse, "arrivals": arrivals, "mooncake": mooncake, "routers": routers, "speed": speed,
}  # fmt: skip


def main() -> None:
    """Simulate, print, and write the JSON."""
    options_parser = parser(__doc__, quick="1,500 and 2,000 requests, few cells")
    options_parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the published traces")
    options_parser.add_argument("--part", choices=list(PARTS), action="append", help="only this part; repeat for more")
    options = options_parser.parse_args()
    results = {name: PARTS[name](options.traces, options.quick) for name in options.part or PARTS}
    if not any(results.values()):
        print(f"There are no traces under {options.traces}: see docs/policies.md for where they are published.")
        return
    save("routing" if not options.part else f"routing-{'-'.join(options.part)}", results)


if __name__ == "__main__":
    main()
