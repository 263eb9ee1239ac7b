"""What the loading controller chooses on storages of different speeds, against the best fixed
setting (CacheBlend 5.1).

    python -m benchmarks.storages [--quick] [--shape smollm2 qwen2.5-0.5b] [--selector hkvd attention]

The profile is measured once, on the unthrottled storage, as an engine does by itself; a storage
that is slower then is found by the outcomes of requests. Weights of `smollm2` are real, others and
all entries are random, which changes no time. "best" is the quickest of the fixed ratios from r* on
and of a full prefill, in the same alternating runs.
"""

import itertools
import tempfile
from functools import partial
from typing import Any

import torch

from benchmarks import report
from benchmarks.random_model import random_model
from benchmarks.ttft_world import World
from ragkv.config import R_STAR
from ragkv.control.controller import OUTCOMES
from ragkv.model.loading import load
from tests.store.fakes import ThrottledTier

STORAGES = {
    "memory": None,
    "disk": None,
    **{f"disk {n} MB/s": n * 1e6 for n in (200, 50, 8)},
    "redis": None,
}
RATIOS = (R_STAR, 0.3, 0.5, 1.0)


def measure(model: Any, storage: str, selector: str, options: Any) -> dict[str, Any]:
    """One row: what was chosen, and first tokens."""
    tier = storage.split()[0]
    bandwidth = STORAGES[storage]
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as directory,
        World(model, options.chunks, options.tokens, tier, directory, wrap=ThrottledTier) as world,
    ):
        engine = world.engine
        control = world.engine.controller
        control._speeds = engine.store.speeds
        engine.profiler.measure(quick=True)
        if bandwidth is not None:
            engine.store.tiers[0].bandwidth_bytes_per_s = bandwidth
        ask = partial(engine.prefill, world.question, world.chunks, selector=selector)
        for _ in range(OUTCOMES):
            ask(ratio=R_STAR)
        found = ask(ratio=None).reuse
        actions = {f"{ratio:g}": partial(ask, ratio=ratio) for ratio in RATIOS}
        actions |= {"full": partial(ask, reuse="none"), "controller": partial(ask, ratio=None)}
        times = report.alternate(actions, options.runs)
        chosen = times.pop("controller")
        best = min(times, key=times.__getitem__)
        full = found.computed > len(world.question) and not found.fused + found.recomputed
        return {
            "storage": storage,
            "selector": selector,
            "chosen": "full prefill" if full else f"{found.ratio:g}",
            "computed": found.computed,
            "first token s": chosen,
            "best": best,
            "its s": times[best],
            "over": f"{chosen / times[best] - 1:+.1%}",
            **{f"at {name}": took for name, took in times.items()},
            "why": found.decision,
        }


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = report.parser(__doc__, quick="the tiny shape, short prompts", threads=1, runs=3)
    parser.add_argument("--shape", nargs="+", default=["smollm2", "qwen2.5-0.5b"])
    parser.add_argument("--storage", nargs="+", default=list(STORAGES), choices=list(STORAGES))
    parser.add_argument("--selector", nargs="+", default=["hkvd", "attention"])
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--directory", help="on the measured disk; default: the system's temporary directory"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for shape in ["tiny"] if options.quick else options.shape:
        model = load(shape, "cpu", "bfloat16")[0] if shape == "smollm2" else random_model(shape)
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
