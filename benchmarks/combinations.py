"""Passages in new combinations: does reuse last, or does it decay as every question brings other
neighbours?

    python -m benchmarks.combinations [--quick] [--questions 200] [--passages 400] [--data FOLDER]
    python -m benchmarks.combinations --stored --ways fused full --passages 12 --each 8 \
        --questions 12 --window 12

Each question is asked over a set of passages that never came together before, in any order.
Passages are drawn with Zipf's weights, so that some come often, and most of them rarely. The same
questions are asked in two ways on engines of their own with empty stores: `fused`, the default,
which stores what it misses, and `prefix`, exact blocks of earlier prompts. For each window of
questions: the share of the passages' tokens that were reused, the share of a full prefill that was
computed, and seconds to the first token. Misses are stored behind the answer, before the next
question comes. With `--stored` every passage is stored before, and never with others: the first
token of a question is then that of a new combination. The way `full` computes every prompt whole.

Where no FOLDER is given or found, passages are of the articles of `examples/corpus`. They are cut
to `--tokens` tokens, short ones by default, so that a laptop can run it.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report, sets
from benchmarks.real_judge import config_of, located
from benchmarks.real_sets import paragraphs
from ragkv import Chunk, Engine

CORPUS = Path(__file__).parents[1] / "examples" / "corpus"
QUESTION = "What do these passages say?"
WAYS: Mapping[str, Mapping[str, Any]] = {
    "fused": {},
    "prefix": {"reuse": "prefix"},
    "full": {"reuse": "none"},
}
WINDOW = 20  # questions that a row of the table summarizes
SETTINGS = {"store.memory_bytes": str(3 << 30)}


def drawn(questions: int, passages: int, each: int, seed: int = 0) -> list[tuple[int, ...]]:
    """`questions` sets of `each` of `passages`, no two alike, by Zipf's weights; in any order."""
    chance = np.random.default_rng(seed)
    weights = 1 / np.arange(1, passages + 1)
    found: dict[frozenset[int], tuple[int, ...]] = {}
    while len(found) < questions:
        chosen = chance.choice(passages, each, replace=False, p=weights / weights.sum())
        found.setdefault(frozenset(chosen.tolist()), tuple(chosen.tolist()))
    return list(found.values())


def texts(data: Path | None) -> Iterator[str]:
    """Paragraphs of published articles, or of our own."""
    if data is not None:
        yield from paragraphs(data)
        return
    for path in sorted(CORPUS.glob("*.md")):
        yield from (part for part in path.read_text("utf-8").split("\n\n") if len(part) > 80)


def chunks_of(engine: Engine, data: Path | None, count: int, tokens: int) -> list[Chunk]:
    """`count` different passages of `tokens` tokens, out of all texts. They overlap where the texts
    are too short.
    """
    ids = [token for text in texts(data) for token in engine.chunk(text + "\n\n").token_ids]
    starts = [(len(ids) - tokens) * number // count for number in range(count)]
    random.Random(0).shuffle(starts)
    return [Chunk(tuple(ids[at : at + tokens])) for at in starts]


def ask(engine: Engine, chunks: Sequence[Chunk], way: str) -> dict[str, Any]:
    """Ask one question. What it missed is stored when this returns."""
    answer = engine.answer(QUESTION, chunks, max_new_tokens=1, **WAYS[way])
    engine.flush()
    reuse = answer.reuse
    return {
        "way": way,
        "reused": 1 - reuse.computed / reuse.tokens,
        "compute": reuse.compute,
        "tokens": reuse.tokens,
        "first_token_s": answer.timing.first_token_s,
    }


def summarized(rows: Sequence[Mapping[str, Any]], window: int = WINDOW) -> Iterator[list[Any]]:
    """A row for each `window` of questions: reused, compute and first token of each way."""
    last = max(row["question"] for row in rows) + 1
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for start in range(0, last, window):
        cells: list[Any] = [f"{start + 1} to {min(start + window, last)}"]
        for field, middle in (
            ("reused", statistics.fmean),
            ("compute", statistics.fmean),
            ("first_token_s", statistics.median),
        ):
            for way in ways:
                own = [
                    row[field]
                    for row in rows
                    if row["way"] == way and start <= row["question"] < start + window
                ]
                cells.append(middle(own))
        yield cells


def main() -> None:
    """Ask all questions, print the curve, and write the JSON."""
    options = _options()
    torch.set_num_threads(options.threads)
    config = config_of({**SETTINGS, "dtype": options.dtype})
    rows = []
    with Engine.from_pretrained(located(options.model), config) as base:
        chunks = chunks_of(base, options.data, options.passages, options.tokens)
        engines = {way: base.with_config(config) for way in options.ways}
        if options.stored and "fused" in engines:
            engines["fused"].entries.encode(chunks)
        for way, engine in engines.items():  # uncounted: over no passage that is asked about
            ask(engine, chunks_of(base, options.data, 2, options.tokens + 1), way)
        for number, places in enumerate(drawn(options.questions, options.passages, options.each)):
            asked = [chunks[place] for place in places]
            for way, engine in engines.items():
                rows.append({"question": number, **ask(engine, asked, way)})
            if (number + 1) % options.window == 0:
                print(f"{number + 1} of {options.questions}", file=sys.stderr, flush=True)
        for engine in engines.values():
            engine.close()
    print(
        f"\n{options.model}: {options.questions} questions, each over {options.each} of "
        f"{options.passages} passages of {options.tokens} tokens that never came together before"
    )
    columns = ("reused", "compute", "first token s")
    headings = [f"{name}, {way}" for name in columns for way in options.ways]
    report.table(("questions", *headings), list(summarized(rows, options.window)))
    print("written:", report.save("combinations", rows))


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="40 questions over 80 passages", threads=1)
    parser.add_argument("--model", default="smollm2", help="as of benchmarks.real")
    parser.add_argument("--data", type=Path, default=sets.questions(), help="with xquad.en.json")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--passages", type=int, default=400, help="of all questions together")
    parser.add_argument("--each", type=int, default=4, help="passages of a question")
    parser.add_argument("--tokens", type=int, default=64, help="of a passage")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["fused", "prefix"])
    parser.add_argument("--stored", action="store_true", help="store every passage before")
    parser.add_argument("--window", type=int, default=WINDOW, help="questions of a row")
    parser.add_argument("--dtype", default="auto", help="of the model and its KV")
    options = parser.parse_args()
    if options.quick:
        options.questions = 40
        options.passages = 80
    return options


if __name__ == "__main__":
    main()
