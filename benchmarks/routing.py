"""Replicas behind a router, simulated: hits by tier, TTFT, and the hits that no routing can exceed.

    python -m benchmarks.routing [--quick] [--traces DIR]

Simulated on published traces, which this repository does not contain (docs/policies.md); the routers are the objects
that the Ray application runs. RAGPulse takes times measured for the Qwen2.5-0.5B shape on two cores (docs/speed.md):
8,574 ms for 3,104 tokens in full, 1,509 ms where 3,072 of them are found and 15 % of these recomputed; 75 ms of
both are fixed; 12,288 bytes a token, read at 2.5 GB/s from disk and over 10 Gbit/s from the shared tier.

`busy` is the share of time the replicas would be busy without any hit; at 1 or more they need hits to keep up.
Arrivals are a Poisson process in the trace's order.
`closed` is the gained share of the gap between random's local hits and the bound. The bound is one store of all
replicas' capacity that knows the future (Belady).

Claims: (1) chunk-aware finds more tokens on the replica than random, at every size, and its P95 is below that of every
other router that considers content or conversations; (2) load is balanced: no replica gets more than 1.4 times its
share of requests.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.report import parser, save, table
from ragkv.lab.simulate import RagLoad, ReplicaSetup, TokenTimes, poisson, read_rag_requests, serve_replicas
from ragkv.scheduling.replica_routing import RouterSettings

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
CPU = TokenTimes(token_ms=2.762, fixed_ms=75.0, found_token_ms=0.438, load_token_ms=0.005, remote_token_ms=0.0098)
SHARED_WAIT = 1.0  # with a shared tier, misses are loaded, not computed, so waiting weighs more
ORDER = ("random", "round-robin", "least-loaded", "session-sticky", "chunk-aware")
HEADINGS = (
    "replicas", "each", "shared", "busy", "router", "local", "found", "closed", "P50 ms", "P95 ms", "most", "imbalance",
)  # fmt: skip
Cell = dict[str, Any]


def rag(folder: Path, quick: bool) -> RagLoad | None:
    """RAGPulse, if it is available."""
    if not (folder / "ragpulse").is_dir():
        return None
    requests = read_rag_requests(folder / "ragpulse")[: 1_500 if quick else None]
    return RagLoad(requests, "RAGPulse", times=poisson(len(requests), requests[-1].at - requests[0].at))


def cells(load: RagLoad, shape: ReplicaSetup, each: float, busy: float) -> list[Cell]:
    """Every router over one shape."""
    shape = replace(shape, speedup=load.speedup_for(busy, shape.replicas, shape.profile))
    if shape.remote_tokens is None:
        shape = replace(shape, routing=RouterSettings(wait_share=SHARED_WAIT))
    bounds, rows = load.bounds(replace(shape, remote_tokens=0)), list[Cell]()
    for name in ORDER:
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
                shape = ReplicaSetup(replicas, int(each * load.stored_tokens), remote_tokens=remote, profile=CPU)
                for busy in (0.9,) if quick else (0.9, 1.5):
                    rows += cells(load, shape, each, busy)
    print(f"\n{load.name}: {len(load.times)} requests, {load.stored_tokens} tokens in stored parts, LRU")
    show(rows)
    return rows


def main() -> None:
    """Simulate, print, and write the JSON."""
    options_parser = parser(__doc__, quick="1,500 requests, few cells")
    options_parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the published traces")
    options = options_parser.parse_args()
    results = ragpulse(options.traces, options.quick)
    if not results:
        print(f"There are no traces under {options.traces}: see docs/policies.md for where they are published.")
        return
    save("routing", results)


if __name__ == "__main__":
    main()
