"""The floor of recomputed tokens, `fusion.floor_tokens`: answers and first tokens of prompts of short chunks.

    python -m benchmarks.floor [--quick]                     the bundled reader: answers, then times
    python -m benchmarks.floor --shape qwen2.5-0.5b --worlds 0   times of a real shape with random weights

Answers: sentences of held-out worlds, a chunk each, in their order; a prompt has 2 to 12 of them and ends with the
sentence that holds the answer. Counted are questions that a full recompute answers rightly and full reuse wrongly. The
ratio is .15, and the floor is the only difference. Times: the same floors, a full recompute and nothing recomputed,
alternating, medians, for 2 to 12 chunks of 10 tokens and for 6 chunks of 98, as the demo's. `--cpu-time` takes the
processor time of one thread, which other work on the machine changes less.
"""

import argparse
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import report
from benchmarks.quality_data import Context, Question, worlds
from benchmarks.ttft_world import QUESTION_TOKENS, World, model_of
from ragkv import Engine
from ragkv.fusion import with_floor
from ragkv.lab.metrics import best, exact_match

RATIO = 0.15
FLOORS = (0, 4, 8, 16, 32, 64)
COUNTS = (2, 3, 4, 6, 12)  # chunks of a prompt
SHORT, DEMO_CHUNKS, DEMO_TOKENS = 10, 6, 98  # tokens of a short chunk; the demo's prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question over short chunks."""

    chunks: tuple[str, ...]
    question: Question


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    if options.worlds:
        results["answers"] = _answers(options)
    results["times"] = _reader_times(options) if options.shape is None else _shape_times(options)
    name = f"floor-{options.shape or 'reader'}{'-quick' if options.quick else ''}"
    print("written:", report.save(name, results))


def _prompts(context: Context) -> Iterator[Prompt]:
    """Prompts of each length for each question whose answer stands in a sentence of the world."""
    sentences = [one for chunk in context.chunks for one in re.findall(r"[^.]+\.", chunk)]
    for question in context.questions:
        pattern = re.compile("|".join(rf"\b{re.escape(gold)}\b" for gold in question.golds))
        end = max((i for i, one in enumerate(sentences, 1) if pattern.search(one)), default=0)
        for count in COUNTS:
            if count <= end and not question.history:
                yield Prompt(tuple(sentences[end - count : end]), question)


def _answers(options: argparse.Namespace) -> dict[str, Any]:
    """The share of right answers by floor and number of chunks, of questions that need recomputed tokens."""
    right: dict[tuple[int, int], list[float]] = defaultdict(list)
    fused, recomputed = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    with Engine.from_pretrained("reader") as engine:
        for context in worlds(options.worlds, seed=1, level=options.level):
            for prompt in _prompts(context):
                chunks = [engine.chunk(text) for text in prompt.chunks]
                if not _is_right(engine, prompt, chunks, ratio=1.0)[0]:
                    continue
                engine.warm(chunks)
                if _is_right(engine, prompt, chunks, ratio=0.0)[0]:
                    continue
                candidates = engine.prefill(prompt.question.text, chunks, ratio=0.0).reuse.fused
                fused[len(chunks)].append(candidates)
                for floor in FLOORS:
                    is_right, count = _is_right(engine, prompt, chunks, with_floor(RATIO, candidates, floor))
                    right[floor, len(chunks)].append(is_right)
                    recomputed[floor].append(count)
    asked = {count: len(fused[count]) for count in COUNTS}
    tokens = {count: round(statistics.mean(fused[count] or [0])) for count in COUNTS}
    rows = []
    for floor in FLOORS:
        shares = [_share(right, floor, (count,)) for count in COUNTS]
        rows.append(
            [f"floor {floor}", *shares, _share(right, floor, COUNTS), statistics.mean(recomputed[floor] or [0])]
        )
    print(f"right answers of {sum(asked.values())} questions; questions by chunks: {asked}, fused tokens: {tokens}")
    report.table(("ratio .15", *(f"{count} chunks" for count in COUNTS), "all", "tokens recomputed"), rows)
    return {"questions": asked, "fused_tokens": tokens, "right": rows}


def _share(right: dict[tuple[int, int], list[float]], floor: int, counts: Sequence[int]) -> float:
    values = [one for count in counts for one in right[floor, count]]
    return statistics.mean(values) if values else float("nan")


def _is_right(engine: Engine, prompt: Prompt, chunks: list[Any], ratio: float) -> tuple[float, int]:
    """Whether the answer is right (1.0 or 0.0), and how many tokens were recomputed."""
    answer = engine.answer(prompt.question.text, chunks, ratio=ratio, max_new_tokens=12)
    return best(exact_match, answer.text, prompt.question.golds), answer.reuse.recomputed


def _actions(prefill: Callable[..., Any], fused_tokens: int) -> dict[str, Callable[[], Any]]:
    """A prefill for each floor; floors that recompute equally many tokens are measured once."""
    found: dict[str, Callable[[], Any]] = {"full": lambda: prefill(reuse="none"), "nothing": lambda: prefill(ratio=0.0)}
    for floor in FLOORS:
        ratio = with_floor(RATIO, fused_tokens, floor)
        found[f"floor {floor}"] = lambda ratio=ratio: prefill(ratio=ratio)  # type: ignore[misc]
    return found


def _timed(rows: list[list[Any]], what: str, prefill: Callable[..., Any], options: argparse.Namespace) -> None:
    actions = _actions(prefill, prefill(ratio=0.0).reuse.fused)
    clock = time.process_time if options.cpu_time else time.perf_counter
    spent: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(options.runs + 1):
        for name, action in actions.items():
            began = clock()
            action()
            spent[name].append(clock() - began)
    rows.append([what, *(statistics.median(values[1:]) * 1e3 for values in spent.values())])  # the first is a warm-up


def _print_times(rows: list[list[Any]], of: str) -> dict[str, Any]:
    headings = ("prompt", "full", "nothing", *(f"floor {floor}" for floor in FLOORS))
    print(f"first token in ms, {of}; ratio .15 in the columns with a floor")
    report.table(headings, rows)
    return {"of": of, "headings": headings, "rows": rows}


def _reader_times(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[list[Any]] = []
    with Engine.from_pretrained("reader") as engine:
        context = worlds(1, seed=2, level=options.level)[0]
        text = " ".join(context.chunks)
        ids = engine.chunk(text * (1 + 700 // engine.count_tokens(text))).token_ids
        question = context.questions[0].text
        for count, tokens in [*((count, SHORT) for count in COUNTS), (DEMO_CHUNKS, DEMO_TOKENS)]:
            chunks = [engine.chunk(ids[n * tokens : (n + 1) * tokens]) for n in range(count)]
            engine.warm(chunks)
            _timed(rows, f"{count} x {tokens}", lambda c=chunks, **how: engine.prefill(question, c, **how), options)
    return _print_times(rows, "the bundled reader")


def _shape_times(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[list[Any]] = []
    model = model_of(options.shape, "cpu", DEMO_CHUNKS * DEMO_TOKENS + QUESTION_TOKENS)
    for count, tokens in [*((count, SHORT) for count in COUNTS), (DEMO_CHUNKS, DEMO_TOKENS)]:
        with World(model, count, tokens, "memory", "") as world:
            question = world.question[: options.question_tokens]
            prefill = lambda w=world, q=question, **how: w.engine.prefill(q, w.chunks, **how)  # noqa: E731
            _timed(rows, f"{count} x {tokens}", prefill, options)
    return _print_times(rows, f"{options.shape}, random weights, a question of {options.question_tokens} tokens")


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, "fewer worlds and runs", threads=2, runs=15)
    parser.add_argument("--worlds", type=int, default=60)
    parser.add_argument("--level", type=int, default=3, help="of the worlds: longer ones have a higher level")
    parser.add_argument("--shape", help="time this shape, with random weights, instead of the reader")
    parser.add_argument("--cpu-time", action="store_true", help="processor time of one thread; implies --threads 1")
    parser.add_argument("--question-tokens", type=int, default=16)
    options = parser.parse_args()
    if options.cpu_time:
        options.threads = 1
    if options.quick:
        options.worlds, options.runs = min(options.worlds, 4), min(options.runs, 3)
    return options


if __name__ == "__main__":
    main()
