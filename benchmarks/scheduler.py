"""The share of hits that a scheduler-aware store serves from memory: the live queue and store, real conversations.

    python -m benchmarks.scheduler [--quick] [--traces DIR] [--turns N] [--scale X] [--loads .5 .9 1.5]

Claim (CachedAttention sections 3.3 and 4.3.3): with memory for 10 % of all sessions and disk for all, look-ahead (with
prefetch) serves above 95 % of hits from memory under overload, and never less than LRU.

The conversations (kv-cache-tester: tokens of prompts and answers, pauses), the `Scheduler`, the `Store`, its
tiers, policies, threads and files are real. The model is a stand-in (a pass sleeps .03 ms for each uncached token and
350 ms for a turn's share of decoding, as in the simulator), and so is the KV (16 bytes a token; disk reads are
throttled to 500,000 tokens a second, like the 28 KiB a token of Qwen2.5-7B in int8 from two NVMe drives at 7 GB/s).
Time runs `--scale` times faster than real time; the store's own work does not, so the true load is a little above the
target.

Arrivals: conversations arrive as a Poisson process at the rate at which their mean work gives the target load (all
uncached tokens computed, none recomputed). A turn arrives once the turn before is answered and its pause, at most 60 s,
is over. Histories only grow: tokens that agents remove from theirs stay. Counted are turns that have a history and
arrive while conversations still arrive, the empty start included. A hit is from memory if all of its blocks were. The
table has the simulator's figures for the same arrivals too; its fetches take no time, and it holds every token, whereas
the live store holds whole blocks.
"""

import random
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.report import parser, save, table
from ragkv.config import SchedulerConfig
from ragkv.lab.simulate import Trace, load_trace
from ragkv.lab.simulate.queueing import Server, serve
from ragkv.lab.simulate.workloads import Session
from ragkv.lab.testing import ThrottledTier
from ragkv.scheduling import ModelTurns, Scheduler
from ragkv.store import (
    DiskTier,
    Entry,
    EntryInfo,
    HintedEntry,
    Identity,
    MemoryTier,
    PrefetchHint,
    Store,
    TierKind,
    make_policy,
)
from ragkv.store.policies import PolicySettings

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
TRACE = "kv-cache-tester/sample_120.jsonl.gz"
POLICIES = ("lookahead", "lru", "fifo")
PAUSE_S = 60.0  # longer pauses are shortened, so that a run ends
BLOCK = 16_384  # tokens of a block of history
FOLD = 256  # tokens that one stored id stands for, so that hashing ids does not dominate
TOKEN_BYTES = 16  # (K, V) x 1 layer x 1 head x 4 dims x float16
DISK_TOKENS_PER_S = 500_000
TOKEN_MS, TURN_MS = 0.03, 350.0  # of a pass: for each uncached token, and for a turn's share of decoding
RESERVE = 1 / 16  # of memory, kept free
IDENTITY = Identity("w", "a", "r", "float16", "", "t", "c")


@dataclass(frozen=True)
class Hits:
    """One run: turns that have a history, by the place of the history."""

    load: float
    policy: str
    busy: float | None  # share of the arrival period in which the model computed; None: simulated
    turns: int
    from_memory: int
    from_disk: int
    missed: int
    mean_queue: float

    @property
    def memory_share(self) -> float:
        """The share of hits that were in memory."""
        return self.from_memory / max(1, self.from_memory + self.from_disk)


def conversations(trace: Trace, turns: int, most: int, load: float, seed: int = 0) -> list[Session]:
    """At most `most` conversations of the trace, their first `turns` turns, arriving at the rate that gives `load`."""
    by_group: dict[str, list[tuple[int, int, float]]] = {}
    pauses: dict[str, list[float]] = {}
    for turn in trace.turns:
        spans = by_group.setdefault(turn.group, [])
        if len(spans) < turns:
            new = max(1, turn.prompt - turn.shared) * trace.block_tokens
            spans.append((new, max(0, turn.length - turn.prompt) * trace.block_tokens, 0.0))
            pauses.setdefault(turn.group, []).append(0.0 if turn.since is None else min(PAUSE_S, turn.since))
    draw, at, sessions = random.Random(seed), 0.0, []
    groups = sorted(by_group)
    draw.shuffle(groups)
    groups = groups[:most]
    work = sum(service_s(new) for group in groups for new, _, _ in by_group[group]) / len(groups)
    for group in groups:
        at += draw.expovariate(load / work)
        thinks = [*pauses[group][1:], 0.0]
        sessions.append(
            Session(at, tuple((new, out, t) for (new, out, _), t in zip(by_group[group], thinks, strict=True)))
        )
    return sessions


def service_s(uncached: int) -> float:
    """Seconds of a pass with `uncached` tokens."""
    return (TOKEN_MS * uncached + TURN_MS) / 1000


def length(session: Session) -> int:
    """Tokens of a session's history at its end."""
    return sum(new + out for new, out, _ in session.turns)


class Live:
    """The live objects, and one thread for each conversation."""

    def __init__(self, policy: str, server: Server, scale: float, directory: str) -> None:
        memory_bytes, disk_bytes = server.memory_tokens * TOKEN_BYTES, server.disk_tokens * TOKEN_BYTES
        settings = PolicySettings(window_bytes=memory_bytes + disk_bytes)
        disk = DiskTier(directory, 2 * disk_bytes, make_policy(policy, settings))  # twice, for headers and padding
        self.store = Store(
            [
                MemoryTier(memory_bytes, make_policy(policy, settings)),
                ThrottledTier(disk, DISK_TOKENS_PER_S * TOKEN_BYTES * scale),
            ],
            write_buffer_bytes=2 * disk_bytes,
            prefetch=policy == "lookahead",
            memory_reserve_bytes=int(RESERVE * memory_bytes),
        )
        turns = ModelTurns(cast(Any, None))  # nothing decodes here, so there is no model
        self.scheduler = Scheduler(turns, SchedulerConfig(workers=2, queue_limit=1_000_000), self.store)
        self._scale = scale
        self._model = threading.Lock()
        self._counting = threading.Lock()
        self._hits = dict.fromkeys(("memory", "disk", "missed"), 0)
        self._queues: list[int] = []
        self._busy_s = 0.0
        self._began = self._until = time.monotonic()  # arrival of the first conversation, and of the last

    def run(self, sessions: Sequence[Session], load: float, policy: str) -> Hits:
        """Run all conversations, each on its own thread."""
        self._began = time.monotonic()
        self._until = self._began + sessions[-1].at / self._scale
        with ThreadPoolExecutor(len(sessions)) as pool:
            list(pool.map(self._converse, range(len(sessions)), sessions))
        busy = self._busy_s / (self._until - self._began)
        turns = sum(self._hits.values())
        queue = sum(self._queues) / len(self._queues)
        return Hits(load, policy, busy, turns, self._hits["memory"], self._hits["disk"], self._hits["missed"], queue)

    def _converse(self, number: int, session: Session) -> None:
        time.sleep(max(0.0, self._began + session.at / self._scale - time.monotonic()))
        history, entries = 0, list[Entry]()
        for new, out, think in session.turns:
            if time.monotonic() > self._until:
                return
            self._pass(number, entries, history, new)
            history += new + out
            for index in range(len(entries), history // BLOCK):
                entries.append(entry_of(number, index))
                self.store.put(entries[-1])
            time.sleep(think / self._scale)

    def _pass(self, number: int, entries: Sequence[Entry], history: int, new: int) -> None:
        """One turn: wait in the queue, look the history up and read it, compute."""
        group = str(number)
        hint = PrefetchHint(tuple(HintedEntry(IDENTITY, e.info.token_ids, e.size_bytes, group) for e in entries))
        with self.scheduler.admitted(hint, self.scheduler.ticket()), ExitStack() as held:
            queue = self.scheduler.stats().waiting
            found = [self.store.lease(IDENTITY, entry.info.token_ids) for entry in entries]
            leases = [held.enter_context(lease) for lease in found if lease is not None]
            for lease in leases:
                assert int(lease.read_layer(0)[0, 0, 0, 0]) == number % 2048, "another session's bytes"
            with self._model:
                began = time.monotonic()
                uncached = new + (len(entries) - len(leases)) * BLOCK
                time.sleep(service_s(uncached) / self._scale)
                ended = time.monotonic()
        memory = all(lease.kind is TierKind.MEMORY for lease in leases)
        where = "missed" if len(leases) < len(entries) else "memory" if memory else "disk"
        with self._counting:
            self._busy_s += max(0.0, min(ended, self._until) - began)
            self._queues.append(queue)
            self._hits[where] += bool(entries)


def entry_of(session: int, index: int) -> Entry:
    """Block `index` of a session: the bytes of BLOCK tokens, which identify the session."""
    ids = tuple(range((session * 10_000 + index) * BLOCK, (session * 10_000 + index + 1) * BLOCK, FOLD))
    info = EntryInfo(IDENTITY.key(ids), IDENTITY, ids, "f", 1, 1, 4 * FOLD, str(session), index)
    return Entry(info, torch.full((1, 2, 1, len(ids), 4 * FOLD), session % 2048, dtype=torch.float16))


def live(sessions: Sequence[Session], policy: str, load: float, server: Server, scale: float) -> Hits:
    """A run of the live store and queue. Files are in /dev/shm if there is one: the throttle simulates the disk."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as directory:
        bench = Live(policy, server, scale, directory)
        with bench.store:
            return bench.run(sessions, load, policy)


def simulated(sessions: Sequence[Session], policy: str, load: float, server: Server) -> Hits:
    """The same in the simulator."""
    done = serve(sessions, policy, server, until_s=sessions[-1].at)
    missed = done.turns - done.from_memory - done.from_disk
    return Hits(load, policy, None, done.turns, done.from_memory, done.from_disk, missed, done.mean_queue)


def main() -> None:
    """Run, print, and write the JSON."""
    options_parser = parser(__doc__, quick="5 turns of 45 conversations, faster")
    options_parser.add_argument("--traces", type=Path, default=TRACES)
    options_parser.add_argument("--turns", type=int, help="first turns of each conversation")
    options_parser.add_argument("--conversations", type=int, help="number of conversations")
    options_parser.add_argument("--scale", type=float, help="seconds of the load in one real second")
    options_parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.9, 1.5])
    options_parser.add_argument("--policies", nargs="+", default=POLICIES)
    options = options_parser.parse_args()
    turns = options.turns or (5 if options.quick else 10)
    most = options.conversations or (45 if options.quick else 1_000)
    scale = options.scale or (60.0 if options.quick else 40.0)
    torch.set_num_threads(1)
    trace = load_trace(str(options.traces / TRACE), 16)
    rows: list[tuple[str, Hits]] = []
    for load in options.loads:
        sessions = conversations(trace, turns, most, load)
        total = sum(map(length, sessions))
        server = Server(total // 10, total, TOKEN_MS, TURN_MS, context_tokens=1 << 60)
        print(f"load {load}: {len(sessions)} conversations, {total} tokens at their end, {total // 10} fit into memory")
        for policy in options.policies:
            rows.append(("live", live(sessions, policy, load, server, scale)))
            rows.append(("simulated", simulated(sessions, policy, load, server)))
            for how, hits in rows[-2:]:
                print(f"  {how:9} {policy:9} {hits.memory_share:.1%} of hits from memory, {hits}", flush=True)
    print(f"\nshare of hits served from memory; time runs {scale:g} times faster than real time\n")
    table(
        ("load", "policy", "", "busy", "mean queue", "turns", "from memory", "from disk", "missed", "share"),
        [
            (
                h.load,
                h.policy,
                how,
                "" if h.busy is None else f"{h.busy:.0%}",
                round(h.mean_queue, 1),
                h.turns,
                h.from_memory,
                h.from_disk,
                h.missed,
                f"{h.memory_share:.1%}",
            )
            for how, h in rows
        ],
    )
    results = [{"how": how, **asdict(hits), "memory_share": hits.memory_share} for how, hits in rows]
    save("scheduler", {"turns": turns, "scale": scale, "rows": results})


if __name__ == "__main__":
    main()
