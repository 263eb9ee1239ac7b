"""Whole answers of a real model with and without drafts, by kind of answer: time, accepted drafts,
the same tokens?

    python -m benchmarks.answers --data FOLDER --passages 12 --tokens 100  # full and fused
    python -m benchmarks.answers --data FOLDER --passages 1 --tokens 28 --ways fused \\
        --questions 125 --half test

FOLDER has XQuAD as published. The ways and drafts of a question alternate. Times are of the
processor, in the thread that computes, unless `--wall`; a token's time leaves the first one out.
Rows are appended to `--out`, and the same command goes on where a killed run stopped. `--prompts
FILE` writes the prompts' texts, and of each an earlier prompt with the same beginning, which
`llama_cpp.mjs` asks llama.cpp. Instructions are limited by
the environment: ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report, sets
from benchmarks.real import NO_DATA
from benchmarks.real_judge import located
from benchmarks.real_sets import Asked, questions
from benchmarks.rows import Row, Rows
from examples.earlier_prompts import EARLIER_QUESTION, ask_before
from ragkv import Answer, Engine, EngineConfig
from ragkv.config import ControllerConfig

KINDS = {
    "quote": "Quote the sentence that answers this question: {question}",
    "answer": "{question}",
    "summary": "Summarise the passages in your own words.",
    "list": "List the facts of the passages as bullet points.",
}
WAYS = {
    "full": {"reuse": "none"},
    "prefix": {"reuse": "prefix"},
    "fused": {"selector": "attention", "ratio": 0.15},
}


def main() -> None:
    options = _options()
    if options.data is None:
        report.skip(NO_DATA)
    torch.set_num_threads(options.threads)
    part, parts = options.part
    asked = [
        one.__class__(one.key, _passages(one, options.passages), one.question, one.golds)
        for one in questions("xquad", options.data, options.half, options.questions)[
            part - 1 :: parts
        ]
    ]
    config = EngineConfig(
        dtype=options.dtype,
        weights=options.weights,
        drafts=0,
        controller=ControllerConfig(measure=False),
    )
    label = {
        name: getattr(options, name)
        for name in ("model", "dtype", "weights", "threads", "passages", "tokens")
    }
    label["half"], label["cpu"] = options.half, torch.backends.cpu.get_cpu_capability()
    rows = Rows(options.out)
    with Engine.from_pretrained(located(options.model), config) as plain:
        if options.prompts:
            options.prompts.write_text(
                json.dumps([_texts(plain, one, kind) for one in asked for kind in options.kinds])
            )
        with plain.with_config(EngineConfig(controller=config.controller)) as drafting:
            for at, one in enumerate(asked):
                known = {
                    row["kind"]
                    for row in rows.all
                    if row["question"] == one.key and label.items() <= row.items()
                }
                if missing := [kind for kind in options.kinds if kind not in known]:
                    rows.add(
                        [
                            {**label, **row}
                            for row in _ask((plain, drafting), one, missing, options, at)
                        ]
                    )
    keys = {one.key for one in asked}
    _show(
        [row for row in rows.all if label.items() <= row.items() and row["question"] in keys],
        options,
    )


def _passages(asked: Asked, count: int) -> tuple[str, ...]:
    """At most `count` passages, one with a gold answer among them."""
    right = next(text for text in asked.passages if any(gold in text for gold in asked.golds))
    others = [text for text in asked.passages if text != right]
    return (*others[: count - 1], right)


def _texts(engine: Engine, asked: Asked, kind: str) -> dict[str, str]:
    """The prompt, and an earlier one that begins with the same passage, as `ask_before` asks it."""
    first, *others = asked.passages
    return {
        "before": _text(engine, EARLIER_QUESTION, [first, *reversed(others)]),
        "prompt": _text(engine, KINDS[kind].format(question=asked.question), asked.passages),
    }


def _text(engine: Engine, question: str, passages: Sequence[str]) -> str:
    assert engine.tokenizer is not None
    ids = engine.prefill(question, passages, reuse="none").token_ids
    return str(engine.tokenizer.decode(ids))


def _ask(
    engines: Sequence[Engine],
    asked: Asked,
    kinds: Sequence[str],
    options: argparse.Namespace,
    at: int,
) -> Iterator[Row]:
    chunks = [engines[0].chunk(text) for text in asked.passages]
    if "fused" in options.ways:
        for engine in engines:
            engine.entries.encode(chunks)
    for number, kind in enumerate(kinds):
        question = KINDS[kind].format(question=asked.question)
        for way in options.ways:
            for engine in engines if way == "prefix" else ():
                engine.entries.delete(["nothing"])  # which also forgets earlier prompts
                ask_before(engine, chunks)
            order = engines if (at + number) % 2 else engines[::-1]
            found = {id(engine): _timed(engine, question, chunks, options, way) for engine in order}
            (plain, first_s, plain_s), (drafted, drafted_first_s, drafted_s) = (
                found[id(one)] for one in engines
            )
            yield {
                "question": asked.key,
                "kind": kind,
                "way": way,
                "prompt": plain.reuse.tokens,
                "answer": len(plain.token_ids),
                "first_s": min(first_s, drafted_first_s),
                "token_s": [plain_s, drafted_s],
                "drafted": drafted.timing.drafted,
                "accepted": drafted.timing.accepted,
                "same": plain.token_ids == drafted.token_ids,
                "texts": [plain.text]
                if plain.token_ids == drafted.token_ids
                else [plain.text, drafted.text],
            }
    engines[0].entries.delete(chunks)
    engines[1].entries.delete(chunks)


def _timed(
    engine: Engine, question: str, chunks: Sequence[Any], options: argparse.Namespace, way: str
) -> tuple[Answer, float, float]:
    """The answer, the seconds to its first token, and those of each token behind it (0 if there is
    none).
    """
    clock = time.perf_counter if options.wall else time.process_time
    began = clock()
    first = 0.0
    for event in engine.stream(question, chunks, max_new_tokens=options.tokens, **WAYS[way]):
        if isinstance(event, Answer):
            answer = event
            took_s = clock() - first
        else:
            first = first or clock()
    engine.flush()
    count = len(answer.token_ids)
    return answer, first - began, took_s / (count - 1) if count > 4 else 0.0


def _show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    found = []
    for way in options.ways:
        for kind in (*options.kinds, "all"):
            own = [row for row in rows if row["way"] == way and kind in (row["kind"], "all")]
            timed = [row for row in own if all(row["token_s"])]
            if not timed:
                continue
            plain, drafted = (
                statistics.median(row["token_s"][which] for row in timed) for which in (0, 1)
            )
            gains = sorted(row["token_s"][0] / row["token_s"][1] for row in timed)
            first = statistics.median(row["first_s"] for row in own)
            proposed, accepted = (sum(row[name] for row in own) for name in ("drafted", "accepted"))
            whole = [first + (options.tokens - 1) * token_s for token_s in (plain, drafted)]
            cells = (
                f"{1e3 * plain:.1f}",
                f"{1e3 * drafted:.1f}",
                f"{statistics.median(gains):.2f}",
            )
            least = f"{gains[len(gains) // 20]:.2f}"
            share = f"{accepted / max(1, proposed):.2f}"
            same = f"{sum(row['same'] for row in own)} of {len(own)}"
            found.append(
                (
                    way,
                    kind,
                    f"{first:.2f}",
                    *cells,
                    least,
                    share,
                    same,
                    *(f"{one:.1f}" for one in whole),
                )
            )
    heads = (
        "way",
        "kind",
        "first, s",
        "ms/token",
        "with drafts",
        "times",
        "5th %",
        "accepted",
        "same",
    )
    report.table((*heads, f"{options.tokens} tokens, s", "with drafts"), found)


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, "two questions", threads=1)
    parser.add_argument(
        "--data", type=Path, default=sets.questions(), help="the folder with xquad.en.json"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weights", default="plain", choices=["plain", "int8"])
    parser.add_argument("--half", choices=["dev", "test"], default="dev")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument(
        "--part", type=_part, default=(1, 1), help="2/14: the second of 14 shares of the questions"
    )
    parser.add_argument("--passages", type=int, default=8, help="of a prompt, at most")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    parser.add_argument(
        "--wall", action="store_true", help="times of the clock: only on a quiet machine"
    )
    parser.add_argument("--prompts", type=Path, help="write the prompts' texts here, as JSON")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "answers.jsonl")
    options = parser.parse_args()
    if options.quick:
        options.questions = 2
    return options


def _part(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return part, parts


if __name__ == "__main__":
    main()
