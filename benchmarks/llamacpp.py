"""ragkv and llama.cpp on the processor: full prefills, warm first tokens and decoding, with the same weights.

    python -m benchmarks.llamacpp [--quick] [--avx2] [--layers 8] [--threads 1 2] [--dtypes auto float32 bfloat16]

Needs llama-cpp-python and gguf in the same environment (`pip install llama-cpp-python gguf`; the first is compiled for
this processor, which takes a while). Random weights at the shape of Qwen2.5-0.5B are written once as a checkpoint of
transformers and once for each kind of GGUF file; a short prompt's logits prove that both sides compute the same model.
Both sides prefill 6 x 512 + 32 tokens up to the last logits. A warm first token of ragkv fuses six stored chunks;
llama.cpp has nothing of this kind, so it is compared with llama.cpp's full prefill. Decoding is greedy, behind one
chunk and behind all. Each side runs in a process of its own; all run alternately, and the tables have medians.

`--avx2` holds for ragkv alone; llama.cpp's instructions are chosen when it is compiled: `CMAKE_ARGS="-DGGML_NATIVE=OFF
-DGGML_AVX512=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON" pip install llama-cpp-python`.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import avx2, gguf_file, report
from benchmarks.llamacpp_sides import STEPS, LlamaCpp, Ours, Remote
from benchmarks.ttft_world import QUESTION_TOKENS, model_of
from ragkv.model.cpu.product_speed import multiplies_bfloat16

RATIOS = (0.15, 0.05)
CHECKED = 64  # tokens of the prompt whose logits are compared
Action = tuple[str, str]  # the side's name, and what it does


def main() -> None:
    options = _options()
    avx2.play(options)
    if missing := [name for name in ("llama_cpp", "gguf") if importlib.util.find_spec(name) is None]:
        sys.exit(
            f"This benchmark needs {' and '.join(missing)}: `{sys.executable} -m pip install llama-cpp-python gguf`. "
            "llama-cpp-python is compiled from source, which needs a C++ compiler and up to half an hour."
        )
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        sides = _sides(Path(folder), options, stack)
        agreement = compare(sides, options.layers)
        found: dict[str, Any] = {"agreement": agreement}
        for threads in options.threads:
            for side in sides.values():
                side.call("threads", threads)
            clock = (lambda: sum(side.used_s for side in sides.values())) if options.cpu_time else time.perf_counter
            medians = report.alternate(_actions(sides, options), options.runs, clock)
            print(f"\n{_title(options)}, {threads} thread{'s' if threads > 1 else ''}, medians of {options.runs}")
            head, rows = rows_of(medians)
            report.table(head, rows)
            found[f"{threads} threads"] = [dict(zip(head, row, strict=True)) for row in rows]
    print("written:", report.save(f"llamacpp-{options.layers}-layers", found))


def _sides(folder: Path, options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Write the weights, and start every side: by its name."""
    length = options.chunks * options.tokens + QUESTION_TOKENS
    print(f"writing {options.layers} layers of {options.shape} ...", flush=True)
    model = model_of(options.shape, "cpu", length + STEPS, torch.bfloat16, options.layers)
    model.save_pretrained(folder / "checkpoint")
    for kind in gguf_file.KINDS:
        gguf_file.write(model, folder / f"{kind}.gguf", kind)
    vocabulary = model.config.vocab_size
    del model
    wanted: list[tuple[Any, ...]] = [
        (Ours, folder / "checkpoint", dtype, weights, options.chunks, options.tokens)
        for dtype, weights in (*((dtype, "plain") for dtype in options.dtypes), ("auto", "int8"))
    ]
    for kind in gguf_file.KINDS:
        wanted.append((LlamaCpp, folder / f"{kind}.gguf", options.chunks, options.tokens, QUESTION_TOKENS, vocabulary))
    sides = {}
    for arguments in wanted:
        print(f"starting {arguments[0].__name__} with {arguments[1].name}, {arguments[2:4]} ...", flush=True)
        side = stack.enter_context(Remote(*arguments))
        sides[side.name] = side  # "auto" may be one of the other dtypes: it is measured once
    return sides


def compare(sides: dict[str, Any], layers: int) -> dict[str, float]:
    """The relative distance of every side's logits from the first one's, for one short prompt; printed."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 1000, (CHECKED,), generator=generator).tolist()
    logits = {name: torch.tensor(side.call("logits", ids)) for name, side in sides.items()}
    first, *others = logits
    distances = {name: float((logits[name] - logits[first]).norm() / logits[first].norm()) for name in others}
    shown = ", ".join(f"{name} {distance:.4f}" for name, distance in distances.items())
    print(f"relative distance of the next token's logits from those of {first} ({layers} layers): {shown}")
    return distances


def _actions(sides: dict[str, Any], options: argparse.Namespace) -> dict[Any, Callable[[], Any]]:
    def bound(side: Any, *call: Any) -> Callable[[], Any]:
        return lambda: side.call(*call)

    actions: dict[Any, Callable[[], Any]] = {}
    for name, side in sides.items():
        if "prefill" in options.parts:
            actions[name, "full prefill"] = bound(side, "full")
            if name.startswith("ragkv"):
                actions |= {(name, f"warm at {ratio:.2f}"): bound(side, "warm", ratio) for ratio in RATIOS}
        if "decode" in options.parts:
            for chunks in sorted({1, options.chunks}):
                behind = chunks * options.tokens + QUESTION_TOKENS
                actions[name, f"tokens/s behind {behind}"] = bound(side, "decode", chunks)
    return actions


def rows_of(medians: dict[Action, float]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows of the table: for each action its time (or rate) and the ratio to each GGUF file's.

    A ratio above 1 means that ragkv is faster. A warm first token is compared with llama.cpp's full prefill.
    """
    theirs = sorted({name for name, _ in medians if name.startswith("llama.cpp")})
    head = ("side", "what", "ms or tokens/s", *(f"against {name}" for name in theirs))
    rows = []
    for (name, what), seconds in medians.items():
        base = "full prefill" if what.startswith("warm") else what
        gains = [f"{medians[other, base] / seconds:.2f}x" for other in theirs]
        shown = f"{STEPS / seconds:.1f}" if what.startswith("tokens/s") else f"{1000 * seconds:.0f}"
        rows.append((name, what, shown, *gains))
    return head, sorted(rows, key=lambda row: [what for _, what in medians].index(row[1]))


def _title(options: argparse.Namespace) -> str:
    kind = "fast in bfloat16" if multiplies_bfloat16() else "slow in bfloat16"
    kind += ", processor time" if options.cpu_time else ""
    sizes = f"{options.chunks} x {options.tokens} + {QUESTION_TOKENS} tokens"
    return f"{options.shape}, {options.layers} layers, random weights, {sizes}, {report.machine()['cpu']} ({kind})"


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="two layers, two chunks of 256 tokens", runs=3)
    avx2.add_option(parser)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="of the qwen2 family")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["auto"], help="of ragkv's plain weights")
    parser.add_argument("--parts", nargs="+", default=["prefill", "decode"], choices=["prefill", "decode"])
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--cpu-time", action="store_true", help="processor time of one thread; implies --threads 1")
    options = parser.parse_args()
    if options.cpu_time:
        options.threads = [1]
    if options.quick:
        options.layers, options.chunks, options.tokens = 2, 2, 256
    return options


if __name__ == "__main__":
    main()
