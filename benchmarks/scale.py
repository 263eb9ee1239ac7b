"""From one replica to a thousand, on paper: the load on shared services, the first that saturates, and the cost.

    python -m benchmarks.scale [--quick] [--traces DIR]

Arithmetic, not measurement. The source of every input figure is stated: measured here, published by a vendor, or
assumed. The load is RAGPulse's mean request. Hit shares come from the simulation of `benchmarks.routing` (repeated here
if the trace is available), up to 64 replicas; beyond, they are extrapolated by their change over the last factor of
four. Printed and written as JSON; `docs/scale.md` quotes it.
"""

from dataclasses import asdict, dataclass, replace
from math import ceil, log
from pathlib import Path
from typing import Any

from benchmarks.report import parser, save, table
from benchmarks.routing import CPU, GPU, SHARED_WAIT, TRACES, rag
from ragkv.config import PricesConfig
from ragkv.lab.simulate import Profile, Shape, serve_replicas
from ragkv.scheduling.replica_routing import RouterSettings

COUNTS = (1, 10, 100, 1_000)
BUSY = 0.7  # of the time a replica is used
GB, HOURS = 1e9, 730.0


@dataclass(frozen=True)
class Machine:
    """A replica."""

    name: str
    profile: Profile  # of prefill
    token_bytes: int  # KV
    decode_ms: float  # an answer's share of decoding, which prefills wait for
    usd_per_hour: float  # assumed
    nic_gb_s: float  # of the machine, and of the server they share
    group_bytes: int  # of a value on Redis


MACHINES = (
    # docs/speed.md (prefill; a decoding step of 16 rows, 214 ms, on 1.9 of two cores); price and network assumed
    Machine("0.5B, two cores", CPU, 12_288, 283 * 214 / 16 / 1.9, 0.10, 10 / 8, 512 * 1024),
    # the T-LRU paper's .1 ms a token, 15 % of it for what is found, 8B's 128 KiB a token; 1 ms of decoding for each of
    # 283 tokens: assumed
    Machine("8B, a GPU", replace(GPU, found_token_ms=0.015), 131_072, 283 * 1.0, 2.50, 25 / 8, 2 * 1024 * 1024),
)


@dataclass(frozen=True)
class Request:
    """RAGPulse's mean request (`benchmarks.routing`, 7,106 of them)."""

    tokens: float = 2_934.0
    part_tokens: float = 342.0  # of one stored part: .907 of the prompt in 7.8 parts
    corpus_tokens: float = 4_158_372.0  # in stored parts, in a week
    returning_tokens: float = 718_454.0  # of these in parts that were read more than once


@dataclass(frozen=True)
class Shares:
    """Shares of all prompt tokens: found on the replica, found in the shared tier, and written to it."""

    local: float
    remote: float
    written: float


# benchmarks.routing's simulation: each replica holds a tenth of all stored parts, gdsf-memory, chunk-aware, an
# unbounded shared tier that takes a chunk when it is computed for the second / first time
SIMULATED = {
    2: {
        1: Shares(0.676, 0.009, 0.023),
        4: Shares(0.645, 0.031, 0.031),
        16: Shares(0.616, 0.054, 0.031),
        64: Shares(0.568, 0.092, 0.033),
    },
    1: {
        1: Shares(0.676, 0.031, 0.199),
        4: Shares(0.645, 0.059, 0.199),
        16: Shares(0.619, 0.079, 0.199),
        64: Shares(0.570, 0.119, 0.199),
    },
}


@dataclass(frozen=True)
class Limits:
    """The capacity of one instance of each shared service."""

    redis_read_gb_s: float = 2.0  # measured on two cores over loopback: values of 2 MiB
    redis_calls: float = 100_000.0  # assumed: small commands a second of one server
    s3_gets: float = 5_500.0  # published: a second and prefix
    s3_puts: float = 3_500.0  # published
    s3_usd_per_million_gets: float = 0.4  # published
    s3_usd_per_million_puts: float = 5.0  # published
    front: float = 300.0  # assumed: requests a second of one front and Ray's proxy


# benchmarks.routing --part speed: decisions a second of one chunk-aware router
DECISIONS = {1: 21_663.0, 10: 12_540.0, 100: 2_479.0, 1_000: 387.0}


def shares_at(replicas: int, simulated: dict[int, Shares]) -> Shares:
    """Interpolated over the logarithm of the number of replicas; beyond the last, extrapolated."""
    known = sorted(simulated)
    upper = next((n for n in known[1:] if n >= replicas), known[-1])
    lower = known[known.index(upper) - 1]
    at = (log(replicas) - log(lower)) / (log(upper) - log(lower))
    one, other = asdict(simulated[lower]), asdict(simulated[upper])
    return Shares(**{name: one[name] + at * (other[name] - one[name]) for name in one})


def simulate(folder: Path, quick: bool) -> dict[int, dict[int, Shares]]:
    """The shares, simulated again; the constants if there is no trace or `quick` is set."""
    load = None if quick else rag(folder, False)
    if load is None:
        return SIMULATED
    found: dict[int, dict[int, Shares]] = {}
    for after in (2, 1):
        for replicas in SIMULATED[after]:
            shape = Shape(
                replicas, int(0.1 * load.stored_tokens), remote_tokens=None, remote_from=after, policy="gdsf-memory",
                routing=RouterSettings(wait_share=SHARED_WAIT), profile=CPU,
                speedup=load.speedup_for(0.9, replicas, CPU),
            )  # fmt: skip
            done = serve_replicas(load, shape)
            found.setdefault(after, {})[replicas] = Shares(done.local, done.remote, done.written)
    return found


def plan(machine: Machine, replicas: int, shares: Shares, request: Request, limits: Limits) -> dict[str, Any]:
    """The load of so many replicas on the services they share, over the capacity of each."""
    profile, tokens = machine.profile, request.tokens
    local, remote = shares.local * tokens, shares.remote * tokens
    computed = tokens - local - remote
    prefill_ms = (
        profile.fixed_ms + profile.token_ms * computed + profile.found_token_ms * (local + remote)
        + profile.remote_token_ms * remote
    )  # fmt: skip
    rate = replicas * BUSY * 1000 / (prefill_ms + machine.decode_ms)
    read, written = rate * remote * machine.token_bytes, rate * shares.written * tokens * machine.token_bytes
    values = ceil(request.part_tokens * machine.token_bytes / machine.group_bytes)
    missed, put = rate * (tokens - local) / request.part_tokens, rate * shares.written * tokens / request.part_tokens
    gets, puts = rate * remote / request.part_tokens * values, put * values
    decisions = DECISIONS[min(DECISIONS, key=lambda n: abs(log(n) - log(replicas)))]
    use = {
        "network": max(read, written) / (machine.nic_gb_s * GB),
        "Redis, bytes": (read + written) / (limits.redis_read_gb_s * GB),
        "Redis, commands": (missed + gets + puts + 2 * put + 2 * rate) / limits.redis_calls,
        "S3, GETs": gets / limits.s3_gets,
        "S3, PUTs": puts / limits.s3_puts,
        "router": rate / decisions,
        "front": rate / limits.front,
    }
    priced = gets * limits.s3_usd_per_million_gets + puts * limits.s3_usd_per_million_puts
    return {
        "machine": machine.name, "replicas": replicas, "prefill_ms": prefill_ms, "requests_per_s": rate,
        "read_gb_s": read / GB, "written_gb_s": written / GB, "use": use, "first": max(use, key=lambda name: use[name]),
        "s3_requests_usd": HOURS * 3600 / 1e6 * priced,
    }  # fmt: skip


def costs(machine: Machine, replicas: int, row: dict[str, Any], request: Request, twice: bool) -> dict[str, Any]:
    """USD a month, for a corpus as large as RAGPulse's week at any number of replicas."""
    prices = PricesConfig()
    local_gb = 0.1 * request.corpus_tokens * machine.token_bytes / GB
    shared_gb = (request.returning_tokens if twice else request.corpus_tokens) * machine.token_bytes / GB
    per_million = 1e6 / (row["requests_per_s"] * HOURS * 3600)
    machines = replicas * machine.usd_per_hour * HOURS
    spent = {
        "machines": machines,
        "memory": replicas * local_gb * prices.memory_usd_per_gb_month,
        "Redis": shared_gb * prices.redis_usd_per_gb_month,
        "or S3": shared_gb * prices.s3_usd_per_gb_month + row["s3_requests_usd"],
    }
    least = spent["machines"] + spent["memory"] + min(spent["Redis"], spent["or S3"])
    return spent | {"shared_gb": shared_gb, "usd_per_million": least * per_million}


def main() -> None:
    """Print the tables, and write the JSON."""
    options_parser = parser(__doc__, quick="use the shares of an earlier simulation")
    options_parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the published traces")
    options = options_parser.parse_args()
    request, limits, simulated = Request(), Limits(), simulate(options.traces, options.quick)
    rows: list[dict[str, Any]] = []
    for machine in MACHINES:
        for after in (1, 2):
            for replicas in COUNTS:
                row = plan(machine, replicas, shares_at(replicas, simulated[after]), request, limits)
                rows.append(row | {"written_from": after} | costs(machine, replicas, row, request, after == 2))
    print("Shares of prompt tokens, by replicas: found locally, in the shared tier, written to it")
    lines = [
        [after, n, *(f"{v:.1%}" for v in asdict(shares_at(n, simulated[after])).values())]
        for after in (1, 2)
        for n in COUNTS
    ]
    table(["written when made the", "replicas", "local", "shared", "written"], lines)
    print("\nUse of one instance of each shared service: at 100 % a second one is needed")
    uses = list(rows[0]["use"])
    head = ["machine", "written", "replicas", "prefill ms", "requests/s", "read GB/s", "written GB/s", *uses]
    lines = [
        [r["machine"], f"{r['written_from']}.", r["replicas"], round(r["prefill_ms"]), f"{r['requests_per_s']:.4g}",
         f"{r['read_gb_s']:.3g}", f"{r['written_gb_s']:.3g}", *(f"{r['use'][name]:.1%}" for name in uses)]
        for r in rows
    ]  # fmt: skip
    table(head, lines)
    print("\nUSD a month, a corpus of RAGPulse's week; and USD a million requests with the cheaper shared tier")
    kinds = ["machines", "memory", "Redis", "or S3"]
    lines = [
        [r["machine"], f"{r['written_from']}.", r["replicas"], f"{r['shared_gb']:.0f}",
         *(f"{r[name]:,.0f}" for name in kinds), f"{r['usd_per_million']:,.0f}"]
        for r in rows
    ]  # fmt: skip
    table(["machine", "written", "replicas", "shared GB", *kinds, "a million"], lines)
    save("scale", {"request": asdict(request), "limits": asdict(limits), "decisions": DECISIONS, "rows": rows})


if __name__ == "__main__":
    main()
