"""TTFT of a fused prefill against full prefills: ratio x chunks x length x tier, baselines in the
same run.

    # 6 x 512 tokens, all methods
    python -m benchmarks.ttft [--quick] [--peak]
    # how the gain grows with length
    python -m benchmarks.ttft --lengths 3 6 12 24 --tokens 128 512 1024
    # entries that replicas share
    python -m benchmarks.ttft --tiers memory disk redis s3
    # int8 entries against bfloat16 entries
    python -m benchmarks.ttft --codecs raw int8
    # Llama-3-8B's shape, page-locked memory and disk
    python -m benchmarks.ttft --device cuda

SmolLM2, or real architectures with random weights, and random entries (neither changes time); one
question of 32 tokens, batch 1. Baselines are our own full recompute, our own prefix caching, which
knows the first chunk from an earlier prompt, and transformers' full prefill (SDPA) and reuse of an
exact prefix, all with logits of the last row only. Every chunk is fused, also the first, which in
practice is mostly exact and free. Methods run alternately and the table has medians. `--peak` adds
the reached share of the speedup limit, which follows from the computed rows: full / (1/L + r (1 -
1/L) + question share), without the 1/L if no check layer is needed.
"""

import argparse
import itertools
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import report
from benchmarks.ttft_world import (
    MODELS,
    OUR_FULL,
    OUR_PREFIX,
    QUESTION_TOKENS,
    REAL,
    TIERS,
    TRANSFORMERS_FULL,
    TRANSFORMERS_PREFIX,
    Method,
    World,
    model_of,
)
from ragkv.registry import CODECS

SELECTORS = ("hkvd", "hkvd-gradual", "attention", "first-k")
LONG = 4096  # from so many tokens on there are fewer runs, because a full prefill takes long
VERY_LONG = 10_000


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    shape: str
    chunks: int
    tokens: int
    tier: str
    codec: str
    method: str
    ratio: float
    seconds: float  # median
    speedup: float  # over our own full recompute in the same run
    over_transformers: float  # over transformers' full prefill in the same run
    limit: float | None  # of the speedup, by rows computed; None for a baseline

    @property
    def share(self) -> float | None:
        """The reached share of the limit."""
        return None if self.limit is None else self.speedup / self.limit


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    longest = max(options.lengths) * max(options.tokens) + QUESTION_TOKENS
    for shape in options.shapes:
        model = model_of(shape, options.device, longest)
        rows = [row for case in _cases(options) for row in _measure(model, shape, *case, options)]
        where = (
            torch.cuda.get_device_name()
            if options.device == "cuda"
            else f"cpu, {options.threads} threads"
        )
        print(
            f"\n{shape}, {'' if shape == REAL else 'random weights and '}random entries, + "
            f"{QUESTION_TOKENS} question tokens, bf16, "
            f"{where}"
        )
        _table(rows, options.peak)
        name = f"ttft-{shape}-{options.device}{'-' + options.tag if options.tag else ''}"
        print(
            "written:",
            report.save(name, [{**asdict(row), "share_of_limit": row.share} for row in rows]),
        )


def _cases(options: argparse.Namespace) -> list[tuple[int, int, str, str]]:
    return list(itertools.product(options.lengths, options.tokens, options.tiers, options.codecs))


def _methods(options: argparse.Namespace, long: bool) -> list[Method]:
    baselines = [Method(TRANSFORMERS_FULL), Method(OUR_FULL)]
    if not long:
        baselines += [Method(TRANSFORMERS_PREFIX), Method(OUR_PREFIX)]
    fused = [Method(selector, ratio) for selector in options.selectors for ratio in options.ratios]
    return [*baselines, Method("first-k", 0.0), *fused]


def _measure(
    model: Any,
    shape: str,
    chunks: int,
    tokens: int,
    tier: str,
    codec: str,
    options: argparse.Namespace,
) -> list[Row]:
    with (
        tempfile.TemporaryDirectory() as directory,
        World(model, chunks, tokens, tier, directory, codec=codec) as world,
    ):
        methods = _methods(options, world.length > VERY_LONG)
        runs = (
            options.runs
            if world.length < LONG
            else max(1, min(options.runs, 3 if world.length < VERY_LONG else 1))
        )
        medians = report.alternate({method: world.action(method) for method in methods}, runs)
    transformers_s = medians[Method(TRANSFORMERS_FULL)]
    own_s = medians[Method(OUR_FULL)]
    return [
        Row(
            shape,
            chunks,
            tokens,
            tier,
            codec,
            m.name,
            m.ratio,
            s,
            own_s / s,
            transformers_s / s,
            m.limit(world.layers, world.length),
        )
        for m, s in medians.items()
    ]


def _table(rows: list[Row], peak: bool) -> None:
    limits = ("limit", "share of limit") * peak
    headings = [
        "chunks",
        "tier",
        "codec",
        "method",
        "ratio",
        "TTFT ms",
        "of our full",
        "of transformers",
        *limits,
    ]
    report.table(
        headings,
        [
            [
                f"{row.chunks} x {row.tokens}",
                row.tier,
                row.codec,
                row.method,
                f"{row.ratio:.2f}",
                f"{row.seconds * 1e3:.0f}",
                f"{row.speedup:.2f}x",
                f"{row.over_transformers:.2f}x",
                *(("", "") if row.share is None else (f"{row.limit:.2f}x", f"{row.share:.0%}"))[
                    : 2 * peak
                ],
            ]
            for row in rows
        ],
    )


def _options() -> argparse.Namespace:
    parser = report.parser(
        __doc__, quick="a tiny shape and few runs, for a minute on a laptop", threads=2
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=MODELS,
        help="default: qwen2.5-0.5b; CUDA: llama-3-8b",
    )
    parser.add_argument(
        "--lengths", nargs="+", type=int, help="chunks per prompt; default 6; CUDA: 6 and 32"
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[512], help="per chunk")
    parser.add_argument("--tiers", nargs="+", default=["memory", "disk"], choices=TIERS)
    parser.add_argument("--codecs", nargs="+", default=["raw"], choices=sorted(CODECS))
    parser.add_argument("--selectors", nargs="+", default=list(SELECTORS), choices=SELECTORS)
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.05, 0.15])
    parser.add_argument("--runs", type=int, default=5, help="per method; fewer for long prompts")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--peak", action="store_true", help="show the reached share of the compute limit"
    )
    parser.add_argument("--tag", default="", help="added to the results' name")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    options.shapes = options.shapes or ["llama-3-8b" if cuda else "qwen2.5-0.5b"]
    options.lengths = options.lengths or ([6, 32] if cuda else [6])
    if options.quick:
        options.shapes = ["tiny"]
        options.tokens = [256]
        options.runs = 3
        options.tag = "quick"
    return options


if __name__ == "__main__":
    main()
