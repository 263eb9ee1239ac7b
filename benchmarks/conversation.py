"""The cost of a conversation's next turn: stored history against recomputing it (CachedAttention
figures 6, 18 to 20).

    python -m benchmarks.conversation [--quick] [--parts ttft overlap saving kept]

Claims, on a real architecture with random weights (weights do not change time), bf16, CPU: ttft: 12
turns of 64 new and 192 answer tokens; the TTFT of turn 12 is at least 8x below recomputing history
(RE). overlap: with a throttled disk, reading ahead hides at least 80 % of what it can: the bound is
max(load, compute). saving: decoding with saving is within 5 % of decoding without; no token waits
for a disk of 20 MB/s. kept: of turns of 3,000 tokens at Llama-3-8B's bytes of KV and window, with
default settings, no token is lost. Answers of past turns are given, not decoded: `Engine.append`
computes and stores them like decoded answers. Compared variants alternate within one run; medians.
Not shown: a GPU's copy stream, and other sizes.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import inf
from typing import Any
from unittest import mock

import torch

from benchmarks import report
from benchmarks.random_model import SHAPES, random_model
from ragkv import Engine, EngineConfig, FusionConfig, Session, StoreConfig
from ragkv.config import ControllerConfig
from ragkv.fusion.pipeline import layers_ahead
from ragkv.sessions.turn import BlockMaker
from ragkv.types import Answer
from tests.store.fakes import ThrottledTier, store_of

# tokens of a turn
NEW = 64
ANSWERED = 192
PARTS = ("ttft", "overlap", "saving", "kept")


def _disk_of(engine: Engine) -> ThrottledTier:
    (disk,) = (tier for tier in engine.parts.store.tiers if tier.kind == "disk")
    assert isinstance(disk, ThrottledTier)
    return disk


@contextmanager
def _nothing_saved() -> Iterator[None]:
    """Meanwhile a turn makes no blocks, so it saves none."""
    nothing = mock.Mock(return_value=())
    with mock.patch.multiple(BlockMaker, past=nothing, complete=nothing, rest=nothing):
        yield


class Bench:
    """One model and conversations with it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = random_model(options.shape)
        self._generator = torch.Generator().manual_seed(0)
        self.turns = [(self.ids(NEW), self.ids(ANSWERED)) for _ in range(options.turns)]

    def ids(self, count: int) -> list[int]:
        """Random token ids."""
        return torch.randint(
            3, self.model.config.vocab_size, (count,), generator=self._generator
        ).tolist()

    @contextmanager
    def engine(self, disk: bool, read_ahead_layers: int | None = 2) -> Iterator[Engine]:
        """An engine that keeps KV only in memory, or only on disk, at first at full speed."""
        with tempfile.TemporaryDirectory(dir=self.options.directory) as directory:
            store = StoreConfig(
                directory=directory if disk else None, memory_bytes=0 if disk else 8 << 30
            )
            fusion = FusionConfig(selector="first-k", read_ahead_layers=read_ahead_layers)
            with Engine(
                self.model,
                config=EngineConfig(
                    store=store, fusion=fusion, controller=ControllerConfig(measure=False)
                ),
                store=store_of(store, ThrottledTier),
            ) as engine:
                yield engine

    def talked(self, engine: Engine, turns: int) -> Session:
        """A session of that many turns, all stored."""
        session = engine.session("s")
        for question, answer in self.turns[session.turns : turns]:
            engine.append(session, question, answer)
        engine.flush()
        return session

    def ttft(self) -> list[list[Any]]:
        """TTFT by turn: recomputed, from memory, from disk."""
        rows = []
        with self.engine(disk=False) as fast, self.engine(disk=True) as slow:
            for turn in range(1, self.options.turns + 1):
                sessions = {
                    "memory": (fast, self.talked(fast, turn - 1)),
                    "disk": (slow, self.talked(slow, turn - 1)),
                }
                if turn not in self.options.measured and turn != self.options.turns:
                    continue
                question = self.turns[turn - 1][0]
                actions = {
                    name: lambda e=engine, s=session, q=question: e.prefill(q, session=s)
                    for name, (engine, session) in sessions.items()
                }
                actions["RE"] = lambda s=sessions["memory"][1], q=question: fast.prefill(
                    q, session=s, reuse="none"
                )
                medians = report.alternate(actions, self.options.runs)
                reuse = actions["disk"]().reuse
                rows.append(
                    [
                        turn,
                        reuse.tokens,
                        reuse.exact,
                        reuse.computed,
                        *(medians[name] for name in ("RE", "memory", "disk")),
                        medians["RE"] / medians["memory"],
                        medians["RE"] / medians["disk"],
                    ]
                )
        return rows

    def overlap(self) -> list[list[Any]]:
        """The last turn with a throttled disk, with and without reading ahead."""
        rows = []
        with self.engine(disk=True) as engine:
            session = self.talked(engine, self.options.turns - 1)
            question = self.turns[-1][0]
            layers = self._layers(engine)
            guess, size = self._compute(engine, session, question)
            disk = _disk_of(engine)
            for ratio in (0.5, 1.0, 2.0):
                load_s = ratio * guess
                wanted = layers_ahead(load_s, guess, layers)
                depths = {"none": 0, "1": 1, "2": 2, "S_buf": wanted, "measured": None}
                times: dict[str, list[float]] = {name: [] for name in (*depths, "compute")}
                # the first run gives the measurements that later ones use
                for _ in range(self.options.runs + 1):
                    for name, depth in depths.items():
                        disk.bandwidth_bytes_per_s = size / load_s
                        times[name].append(
                            self._prefill(engine, session, question, depth).timing.first_token_s
                        )
                    disk.bandwidth_bytes_per_s = inf
                    times["compute"].append(self._computed(engine, session, question))
                medians = {name: statistics.median(values[1:]) for name, values in times.items()}
                compute_s = medians.pop("compute")
                bound = max(load_s, compute_s)
                for name, seconds in medians.items():
                    hidden = (medians["none"] - seconds) / (medians["none"] - bound)
                    depth = depths[name] if name != "measured" else "-"
                    rows.append(
                        [ratio, load_s, compute_s, bound, name, depth, seconds, f"{hidden:.0%}"]
                    )
        return rows

    def saving(self) -> list[list[Any]]:
        """Decoding with and without saving, and the longest wait for a token."""
        rows = []
        for what, bandwidth in (("disk", None), ("disk of 20 MB/s", 20e6)):
            with self.engine(disk=True) as engine:
                if bandwidth is not None:
                    disk = _disk_of(engine)
                    disk.bandwidth_bytes_per_s = bandwidth
                    disk.writes = True
                decoded: dict[bool, list[float]] = {True: [], False: []}
                longest: dict[bool, list[float]] = {True: [], False: []}
                written = 0
                for number in range(self.options.runs + 1):
                    # a new prompt: equal conversations would share their blocks
                    prompt = self.ids(self.options.prompt)
                    for on in (True, False):
                        with nullcontext() if on else _nothing_saved():
                            answer, gap = self._decode(engine, f"{on}-{number}", prompt)
                        if number:
                            decoded[on].append(answer.timing.decode_s)
                            longest[on].append(gap)
                _disk_of(engine).writes = False
                engine.flush()
                written = engine.stats().store.tiers[0].written_bytes
                for on in (False, True):
                    seconds = statistics.median(decoded[on])
                    rows.append(
                        [
                            what,
                            "on" if on else "off",
                            seconds,
                            f"{seconds / statistics.median(decoded[False]) - 1:+.1%}",
                            1e3 * statistics.median(longest[on]),
                            written / 2**20 if on else 0.0,
                        ]
                    )
        return rows

    def kept(self) -> list[list[Any]]:
        """Two long turns right after each other and a short one: what each found of its history,
        and its end's wait.
        """
        rows = list[list[Any]]()
        model = random_model("llama-3-8b-kv")
        turn = 300 if self.options.quick else 3000
        for what, bandwidth in (
            ("llama-3-8b-kv, disk", None),
            ("llama-3-8b-kv, disk of 10 MB/s", 10e6),
        ):
            with (
                tempfile.TemporaryDirectory(dir=self.options.directory) as directory,
                Engine(
                    model,
                    config=EngineConfig(StoreConfig(directory)),
                    store=store_of(StoreConfig(directory), ThrottledTier),
                ) as engine,
            ):
                if bandwidth is not None:
                    disk = _disk_of(engine)
                    disk.bandwidth_bytes_per_s = bandwidth
                    disk.writes = True
                session = engine.session("s")
                for tokens in (turn, turn, NEW):
                    history = len(session.token_ids)
                    began = time.perf_counter()
                    ids = self.ids(tokens)
                    found = engine.append(session, ids[: tokens // 2], ids[tokens // 2 :])
                    end_s = time.perf_counter() - began - found.timing.prefill_s
                    rows.append(
                        [
                            what,
                            history,
                            tokens,
                            found.reuse.exact,
                            found.reuse.computed - tokens,
                            end_s,
                        ]
                    )
                _disk_of(engine).writes = False
                engine.flush()
                for row in rows[-3:]:
                    row.append(engine.stats().store.dropped_writes)
        return rows

    def _compute(self, engine: Engine, session: Session, question: list[int]) -> tuple[float, int]:
        """Seconds of the turn's prefill without loading, and the bytes of its history."""
        size = (
            sum(len(block) for block in session.state.history.blocks)
            * engine.stats().kv_bytes_per_token
        )
        self._computed(engine, session, question)
        return statistics.median(
            self._computed(engine, session, question) for _ in range(self.options.runs)
        ), size

    def _computed(self, engine: Engine, session: Session, question: list[int]) -> float:
        timing = self._prefill(engine, session, question, self._layers(engine)).timing
        return timing.first_token_s - timing.load_s

    @staticmethod
    def _layers(engine: Engine) -> int:
        return engine.stats().layers

    @staticmethod
    def _prefill(engine: Engine, session: Session, question: list[int], depth: int | None) -> Any:
        engine.parts.fusor.read_ahead_layers = depth
        return engine.prefill(question, session=session)

    @staticmethod
    def _decode(engine: Engine, name: str, prompt: list[int]) -> tuple[Answer, float]:
        """An answer, and its longest wait between two tokens."""
        session = engine.session(name)
        gap = 0.0
        last = 0.0
        answer = None
        for event in engine.stream(
            prompt, session=session, max_new_tokens=ANSWERED // 3, min_new_tokens=ANSWERED // 3
        ):
            now = time.perf_counter()
            if isinstance(event, Answer):
                answer = event
            else:
                gap = max(gap, now - last) if last else 0.0
                last = now
        assert answer is not None
        return answer, gap


HEADINGS: dict[str, Sequence[str]] = {
    "ttft": (
        "turn",
        "tokens",
        "exact",
        "computed",
        "RE s",
        "memory s",
        "disk s",
        "RE/memory",
        "RE/disk",
    ),
    "overlap": (
        "load/compute",
        "load s",
        "compute s",
        "bound s",
        "read ahead",
        "layers",
        "prefill s",
        "hidden",
    ),
    "kept": ("store", "history", "new", "loaded", "computed again", "end s", "lost blocks"),
    "saving": ("store", "saving", "decode s", "against off", "longest wait ms", "written MiB"),
}


def main() -> None:
    """Measure, print and write the results."""
    options = _options()
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    results = {}
    sizes = f"{options.turns} turns of {NEW} new and {ANSWERED} answer tokens"
    print(f"{options.shape} (random weights), bf16, cpu, {options.threads} threads, {sizes}")
    for part in options.parts:
        print(f"\n{part}")
        results[part] = getattr(bench, part)()
        report.table(HEADINGS[part], results[part])
    print(
        "written:",
        report.save(f"conversation-{options.shape}", {"options": vars(options), **results}),
    )


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="three turns, one run", threads=2, runs=3)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument(
        "--measured",
        type=int,
        nargs="+",
        default=list(range(1, 13)),
        help="turns whose TTFT is taken",
    )
    parser.add_argument(
        "--prompt",
        type=int,
        default=1024,
        help="tokens of the prompt whose answer's saving is timed",
    )
    parser.add_argument(
        "--directory", help="on the disk to measure; the system's temporary one if not given"
    )
    options = parser.parse_args()
    if options.quick:
        options.turns = 3
        options.runs = 1
        options.prompt = 256
        options.threads = 1
    return options


if __name__ == "__main__":
    main()
