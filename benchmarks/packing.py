"""Prefills and decoding steps with packed weights and without (`packed_bytes`), alternately.

    python -m benchmarks.packing [--quick] [--threads 2]

One model of a real shape with random weights, and two engines over it, with and without packed weights. Every method
runs on both alternately; the table has medians. A step decodes one token of one prompt; a prefill ends with the last
row's logits.
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks import report
from benchmarks.ttft_world import OUR_FULL, Method, World, model_of
from ragkv import EngineConfig
from ragkv.model.decode.batching import DecodeRow, decode_rows

METHODS = (
    Method("none", 0.0), Method("sensitivity", 0.05), Method("sensitivity", 0.15), Method("hkvd", 0.05),
    Method("hkvd", 0.15), Method(OUR_FULL, 1.0),
)  # fmt: skip
VARIANTS = {"plain": 0, "packed": EngineConfig().packed_bytes}
STEPS = 8


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    model = model_of(options.shape, "cpu", options.chunks * options.tokens + 256)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        worlds = {
            name: stack.enter_context(World(model, options.chunks, options.tokens, "memory", folder, packed))
            for name, packed in VARIANTS.items()
        }
        actions: dict[tuple[str, Any], Callable[[], Any]] = {
            (name, method): world.action(method) for method in METHODS for name, world in worlds.items()
        }
        for name, world in worlds.items():
            actions[name, "steps"] = steps_action(world)
        medians = report.alternate(actions, options.runs)
    rows = []
    for what in (*METHODS, "steps"):
        plain, packed = (medians[name, what] for name in VARIANTS)
        label = f"{STEPS} steps of one row" if what == "steps" else f"{what.name} {what.ratio}"
        rows.append((label, f"{1000 * plain:.0f}", f"{1000 * packed:.0f}", f"{plain / packed:.2f}x"))
    print(f"{options.shape}, random weights, {options.chunks} x {options.tokens} tokens, {options.threads} threads")
    report.table(("what", "plain ms", "packed ms", "gain"), rows)
    print("written:", report.save(f"packing-{options.shape}-{options.threads}", [list(row) for row in rows]))


def steps_action(world: World) -> Callable[[], Any]:
    """Decode `STEPS` tokens behind a prompt of one chunk; the first one belongs to the prefill and is not timed."""
    adapter, chunk = world.engine.parts.adapter, world.chunks[0]
    fused = world.engine.prefill(world.question, [chunk], ratio=0.0, selector="none").fused
    kv, start = fused.kv, fused.kv.length
    kv.reserve(start + STEPS)

    def run() -> None:
        for step in range(STEPS):
            decode_rows(adapter, [DecodeRow(kv, token=5 + step)])
        kv.length = start

    return run


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="two chunks, three runs", threads=2, runs=5)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    if options.quick:
        options.chunks, options.runs = 2, 3
    return options


if __name__ == "__main__":
    main()
