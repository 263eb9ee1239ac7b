"""What the loading controller chooses on storages of different speeds, against the best fixed
setting (CacheBlend 5.1).

    python -m benchmarks.storages [--quick] [--shape smollm2 qwen2.5-0.5b] \
        [--selector hkvd attention]

The profile is measured once, on the unthrottled storage, as an engine does by itself; a storage
that is slower then is found by the outcomes of requests. Weights of `smollm2` are real, others and
all entries are random, which changes no time. "best" is the quickest of the fixed ratios from r* on
and of a full prefill, in the same alternating runs; "spread" is how far the runs of the decision
and of the best lie apart. "exposed" is the share of loading for which the model waits: the time to
read alone what the decision reads is all of it.
"""

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from benchmarks import report
from benchmarks.ttft_world import MODELS, QUESTION_TOKENS, REAL, World, model_of
from ragkv.config import R_STAR
from ragkv.control.profile_in_use import OUTCOMES
from ragkv.fusion import budget
from ragkv.prompt import PrefilledPrompt
from ragkv.types import Reuse
from tests.store.fakes import ThrottledTier

STORAGES = {
    "memory": None,
    "disk": None,
    **{f"disk {n} MB/s": n * 1e6 for n in (200, 50, 8, 5)},
    "redis": None,
}
RATIOS = (R_STAR, 0.3, 0.5, 1.0)


class Storage:
    """A storage with a prompt's passages, and the engine that reads them."""

    def __init__(self, world: World, bandwidth: float | None) -> None:
        self._world = world
        self.engine = world.engine
        # `World` hides what remote tiers measured
        vars(world.engine.parts.store).pop("speeds", None)
        self.engine.parts.profiler.measure(quick=True)
        if bandwidth is not None:
            (tier,) = self.engine.parts.store.tiers
            assert isinstance(tier, ThrottledTier)
            tier.bandwidth_bytes_per_s = bandwidth

    def ask(self, **options: Any) -> PrefilledPrompt:
        """A prefill of the prompt."""
        return self.engine.prefill(self._world.question, self._world.chunks, **options)

    def loading_s(self) -> tuple[float, int]:
        """Seconds to read the passages alone, as a request's readers do, and their bytes."""
        engine = self.engine
        identity = engine.entries.encoder.identity
        layers = engine.model.adapter.layer_count
        with ExitStack() as held:
            found = [engine.parts.store.lease(identity, chunk) for chunk in self._world.chunks]
            leases = [held.enter_context(lease) for lease in found if lease is not None]
            began = time.perf_counter()
            with engine.parts.fusor.reader(leases, 8) as reader:
                for layer in range(layers):
                    reader.take(layer)
            return time.perf_counter() - began, sum(lease.stored_bytes for lease in leases)


def measure(model: Any, storage: str, selector: str, options: Any) -> dict[str, Any]:
    """One row: what was decided, and first tokens."""
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as directory,
        World(
            model,
            options.chunks,
            options.tokens,
            storage.split()[0],
            directory,
            options.codec,
            wrap=ThrottledTier,
        ) as world,
    ):
        place = Storage(world, STORAGES[storage])
        ask = partial(place.ask, selector=selector)
        for _ in range(OUTCOMES):
            ask(ratio=R_STAR)
        found = ask(ratio=None).reuse
        actions = {f"{ratio:g}": partial(ask, ratio=ratio) for ratio in RATIOS}
        actions |= {"full": partial(ask, reuse="none"), "decided": partial(ask, ratio=None)}
        waits: list[float] = []
        times = runs_of(actions, options.runs, waits)
        reading_s, size = min(place.loading_s() for _ in range(2))
        middle = {name: statistics.median(several) for name, several in times.items()}
        decided = middle.pop("decided")
        best = min(middle, key=middle.__getitem__)
        spread = max(_spread(times[name]) for name in ("decided", best))
        read = sum(found.bytes_by_tier.values()) / size
        return {
            "storage": storage,
            "selector": selector,
            "decision": _decision(found, len(world.question)),
            "first token s": decided,
            "best": best,
            "its s": middle[best],
            "over": f"{decided / middle[best] - 1:+.0%}",
            "spread": f"{spread:.0%}",
            "loading s": reading_s,
            "exposed": f"{statistics.median(waits) / (read * reading_s):.0%}" if read else "-",
            "full s": middle["full"],
            **{f"at {ratio:g}": middle[f"{ratio:g}"] for ratio in RATIOS},
            "why": found.decision,
        }


def runs_of(
    actions: Mapping[str, Callable[[], PrefilledPrompt]], runs: int, waits: list[float]
) -> dict[str, list[float]]:
    """Seconds of each action in each of `runs` rounds, in another order each; and into `waits`
    those for which the decision's passes waited for loading. The first round is not measured.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for round_ in range(runs + 1):
        for name in random.Random(round_).sample(list(actions), len(actions)):
            began = time.perf_counter()
            done = actions[name]()
            if round_:
                times[name].append(time.perf_counter() - began)
                if name == "decided":
                    waits.append(done.timing.load_s)
    return times


def _spread(times: Sequence[float]) -> float:
    return (max(times) - min(times)) / statistics.median(times)


def _decision(found: Reuse, question: int) -> str:
    if not found.fused + found.recomputed:
        return "full prefill"
    parts = [f"{found.ratio:g}"]
    if found.computed > question:
        parts.append(f"{found.computed - question} computed")
    early = found.recomputed - budget(found.ratio, found.fused + found.recomputed)
    if early > 0:
        parts.append(f"{early} early")
    return ", ".join(parts)


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = report.parser(__doc__, quick="the tiny shape, short prompts", threads=1, runs=3)
    parser.add_argument("--shape", nargs="+", choices=MODELS, default=[REAL, "qwen2.5-0.5b"])
    parser.add_argument("--storage", nargs="+", default=list(STORAGES), choices=list(STORAGES))
    parser.add_argument("--selector", nargs="+", default=["attention", "hkvd"])
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--codec", default="int8", help="of entries")
    parser.add_argument(
        "--directory", help="on the measured disk; default: the system's temporary directory"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    longest = options.chunks * options.tokens + QUESTION_TOKENS
    for shape in ["tiny"] if options.quick else options.shape:
        model = model_of(shape, "cpu", longest)
        print(
            f"\n{shape}: {options.chunks} x {options.tokens} + 32 tokens, {options.threads} "
            "thread(s)"
        )
        rows: list[dict[str, Any]] = []
        for storage, selector in itertools.product(options.storage, options.selector):
            rows.append(measure(model, storage, selector, options))
            print("; ".join(rows[-1]["why"]), flush=True)
        report.table(list(rows[0])[:-1], [list(row.values())[:-1] for row in rows])
        print("written:", report.save(f"storages-{shape}", rows))


if __name__ == "__main__":
    main()
