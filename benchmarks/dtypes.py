"""Prefill, fused prefill and decoding in float32, bfloat16 and with int8 weights, and which dtype "auto" chooses.

    python -m benchmarks.dtypes [--quick] [--avx2] [--parts decode] [--threads 2] [--shape qwen2.5-0.5b] [--layers 8]

One model for each, with the same random weights, in one process; every action runs on all alternately, and the table
has medians. "plain" is without copies of weights (`packed_bytes` 0), as torch itself multiplies. The model with int8
weights has the dtype that "auto" chooses for the rest. Decoding steps are measured most exactly alone (`--parts
decode`).
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks import avx2, report
from benchmarks.packing import STEPS, steps_action
from benchmarks.ttft_world import OUR_FULL, Method, World, auto_dtype, model_of
from ragkv.model.cpu.product_speed import multiplies_bfloat16
from ragkv.model.int8 import round_weights
from ragkv.model.shapes import shape_config

METHODS = (Method(OUR_FULL), Method("sensitivity", 0.15), Method("sensitivity", 0.05))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PLAIN = {f"plain {name}": name for name in DTYPES}


def main() -> None:
    options = _options()
    avx2.play(options)
    torch.set_num_threads(options.threads)
    longest = options.chunks * options.tokens + 256
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        actions: dict[tuple[str, Any], Callable[[], Any]] = {}
        choice = auto_dtype(shape_config(options.shape, options.layers))
        models = {
            name: model_of(options.shape, "cpu", longest, dtype, options.layers)
            for name, dtype in {**DTYPES, "int8": DTYPES[choice.name]}.items()
        }
        round_weights(models["int8"])
        for name in (*PLAIN, *models):
            model, packed = models[PLAIN.get(name, name)], 0 if name in PLAIN else None
            world = stack.enter_context(World(model, options.chunks, options.tokens, "memory", folder, packed))
            if "prefill" in options.parts:
                actions |= {(name, method): world.action(method) for method in METHODS}
            if "decode" in options.parts:
                actions[name, "steps"] = steps_action(world)
        medians = report.alternate(actions, options.runs)
    rows = []
    for what in dict.fromkeys(what for _, what in actions):
        label = f"{STEPS} steps of one row" if what == "steps" else f"{what.name} {what.ratio}"
        times = {name: medians[name, what] for name in (*PLAIN, *DTYPES)}
        int8_s, auto_s = medians["int8", what], times[choice.name]
        gains = [auto_s / min(times.values()), *(seconds / int8_s for seconds in times.values())]
        shown = [f"{1000 * seconds:.0f}" for seconds in (*times.values(), int8_s)]
        rows.append((label, *shown, *(f"{gain:.2f}x" for gain in gains)))
    kind = "fast in bfloat16" if multiplies_bfloat16() else "slow in bfloat16"
    print(
        f"{options.shape}, {options.layers} layers, random weights, {options.chunks} x {options.tokens} tokens, ",
        end="",
    )
    print(f"{options.threads} threads, {torch.backends.cpu.get_cpu_capability()}, {kind}")
    print(f"auto: {choice.why}")
    names = (*PLAIN, *DTYPES)
    headings = ("what", *names, "int8", "auto / fastest", *(f"{name} / int8" for name in names))
    report.table(headings, rows)
    isa = "avx2" if options.avx2 else "native"
    print("written:", report.save(f"dtypes-{options.shape}-{isa}-{options.threads}", [list(row) for row in rows]))


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="two chunks of 256 tokens, three runs", threads=2, runs=5)
    avx2.add_option(parser)
    parser.add_argument("--parts", nargs="+", default=["prefill", "decode"], choices=["prefill", "decode"])
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, default=8, help="fewer than the real model's take less time")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    if options.quick:
        options.chunks, options.tokens, options.runs = 2, 256, 3
    return options


if __name__ == "__main__":
    main()
