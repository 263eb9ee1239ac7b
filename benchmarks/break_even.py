"""Whether fusing pays, as the controller predicts it from a profile and as it is measured, at six prompt lengths.

    python -m benchmarks.break_even [--quick] [--avx2] [--threads 2]

Two models with random weights, one of a real size and a tiny one, each in the dtype that "auto" chooses. A profile is
measured first, then full recompute and `sensitivity` at 15 % run alternately at each length, with entries in memory. A
choice counts as right if it is the faster one, or if both differ by less than a tenth.
"""

import argparse
import tempfile
from contextlib import ExitStack

import torch

from benchmarks import avx2, report
from benchmarks.ttft_world import OUR_FULL, QUESTION_TOKENS, Method, World, auto_dtype, model_of
from ragkv.fusion.break_even import pays, recompute_ttft_s
from ragkv.fusion.estimators import Load, Shape, ttft_s
from ragkv.lab.profiling import measure
from ragkv.model.loading import float_dtype
from ragkv.model.shapes import shape_config

MODELS = (("qwen2.5-0.5b", 4), ("tiny", 4))  # shape and layers
CHUNKS = ((2, 16), (2, 48), (4, 64), (4, 128), (4, 256), (4, 512))  # number and tokens of each
RATIO = 0.15
CLEAR = 1.1  # a difference that matters


def main() -> None:
    options = _options()
    avx2.play(options)
    torch.set_num_threads(options.threads)
    rows, wrong = [], 0
    dtypes = {name: auto_dtype(shape_config(name, layers)).name for name, layers in MODELS}
    for shape_name, layers in MODELS:
        model = model_of(shape_name, "cpu", 4096, float_dtype(dtypes[shape_name]), layers)
        profile = None
        for count, tokens in CHUNKS:
            with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
                world = stack.enter_context(World(model, count, tokens, "memory", folder))
                profile = profile or measure(world.engine, quick=options.quick)
                methods = {"fused": Method("sensitivity", RATIO), "full": Method(OUR_FULL)}
                found = report.alternate({name: world.action(method) for name, method in methods.items()}, options.runs)
            loads = [Load("memory", tokens)] * count
            shape = Shape(count * tokens, QUESTION_TOKENS, world.length)
            expected = {"fused": ttft_s(profile, shape, RATIO, loads), "full": recompute_ttft_s(profile, shape, loads)}
            choice = "fused" if pays(expected["fused"], expected["full"]) else "full"
            off = found[choice] / min(found.values())
            wrong += off > CLEAR
            times = [f"{seconds * 1e3:.1f}" for values in (expected, found) for seconds in values.values()]
            judged = "right" if off == 1.0 else f"{off:.2f}x" + (", wrong" if off > CLEAR else "")
            rows.append((shape_name, world.length, *times, choice, judged))
    print(f"random weights, {' and '.join(dtypes.values())}, {options.threads} threads, entries in memory; times in ms")
    headings = ("model", "tokens", "fused, predicted", "full, predicted", "fused", "full", "choice", "is")
    report.table(headings, rows)
    print(f"{len(rows) - wrong} of {len(rows)} choices are right wherever the difference exceeds 10 %")
    print("written:", report.save(f"break-even-{options.threads}", [list(row) for row in rows]))


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="a quick profile", threads=2, runs=7)
    avx2.add_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
