"""Exact match by question type on worlds that training never drew, compared with guessing, no
context and full reuse.

    python -m training.evaluate runs/reader/export --worlds 160

Every question is a branch of its context's row, and one pass scores them all: the argmax at every
position of the answer, its `<end>` included, is right exactly when greedy decoding gives the answer
word for word. Full reuse is the same pass with attention between chunks masked (positions as in the
prompt), which equals stored KV at the right positions.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from training.batches import IGNORE, Batch, Encoder, Row, collate
from training.model import Reader, bias, load
from training.names import NameSplit
from training.questions import TYPES, Question
from training.templates import TemplateSplit
from training.tokenizer import USER, build
from training.worlds import World, level, world

EVALUATION_SEED = 7_000_000_000_000  # EVALUATION_SEED is far from the seeds of training.
# SETS has the names, templates and level of each evaluation set, and how many of `--worlds` worlds
# it gets.
SETS: dict[str, tuple[NameSplit, TemplateSplit, int, float]] = {
    "held-out worlds": ("train", "train", 3, 1.0),
    "unseen names": ("heldout", "train", 3, 0.5),
    "unseen templates of seen words": ("train", "variants", 3, 0.5),
    "unseen names and templates of seen words": ("heldout", "variants", 3, 0.5),
    "unseen templates with unseen words": ("train", "heldout", 3, 0.25),
    "long contexts": ("train", "train", 4, 0.15),
}


@dataclass(frozen=True)
class Score:
    """The results of one question."""

    type: str
    guess: float
    full: bool
    reuse: bool
    blank: bool  # without any context


def made_world(name: str, index: int, questions: int = 30) -> World:
    """One world of an evaluation set, with question types as even as the world allows."""
    names, templates, number, _ = SETS[name]
    spec = level(number)
    narration = replace(spec.narration, templates=templates)
    seed = EVALUATION_SEED + 1_000_000 * list(SETS).index(name) + index
    return world(
        seed, replace(spec, names=names, narration=narration, questions=questions, even=True)
    )


def scores(folder: Path, name: str, indices: range, quick: bool) -> list[Score]:
    """The scores of some worlds of a set, on one thread."""
    torch.set_num_threads(1)
    reader = load(folder)
    encoder = Encoder(build())
    dtype = torch.bfloat16 if quick else torch.float32
    return [
        one for index in indices for one in score(reader, made_world(name, index), encoder, dtype)
    ]


def score(
    reader: Reader, made: World, encoder: Encoder, dtype: torch.dtype = torch.float32
) -> list[Score]:
    """Every question of a world under full prefill, full reuse and no context."""
    row = encoder.row(made, Random(0), None, extras=False)
    empty = encoder.row(replace(made, chunks=(), statements=()), Random(0), None, extras=False)
    batch = collate([row], len(row.ids))
    bare = collate([empty], len(empty.ids))
    mask = bias(batch.branch, torch.float32)
    full = right(reader, batch, mask, made.questions, dtype)
    reuse = right(reader, batch, mask + apart(row, made, encoder), made.questions, dtype)
    blank = right(reader, bare, bias(bare.branch, torch.float32), made.questions, dtype)
    return [
        Score(q.type, q.guess, *flags)
        for q, *flags in zip(made.questions, full, reuse, blank, strict=True)
    ]


def apart(row: Row, made: World, encoder: Encoder) -> Tensor:
    """A bias (S, S), very negative where one chunk would attend to another."""
    chunk = torch.full((len(row.ids),), -1)
    start = row.ids.index(USER) + 1
    for number, text in enumerate(made.chunks):
        length = len(encoder.ids(text))
        chunk[start : start + length] = number
        start += length
    other = (chunk[:, None] != chunk[None, :]) & (chunk[:, None] >= 0) & (chunk[None, :] >= 0)
    return torch.zeros(other.shape).masked_fill(other, -30000.0)


@torch.inference_mode()
def right(
    reader: Reader, batch: Batch, mask: Tensor, questions: tuple[Question, ...], dtype: torch.dtype
) -> list[bool]:
    """Whether each branch's last answer is right word for word."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        hidden, _ = reader(batch.ids, batch.positions, mask, torch.float32)
        targets = batch.targets[0]
        branch = batch.branch[0]
        learned = torch.nonzero(targets != IGNORE)[:, 0]
        hit = torch.full(targets.shape, True)
        hit[learned] = reader.logits(hidden[0, learned]).argmax(-1) == targets[learned]
    results = []
    for number in range(1, len(questions) + 1):
        places = torch.nonzero(branch == number)[:, 0]
        users = places[batch.ids[0, places] == USER]
        begin = users[-1] if len(users) else places[0]
        results.append(bool(hit[places[places >= begin]].all()))
    return results


def table(scores: list[Score]) -> dict[str, dict[str, float]]:
    """The mean results by question type and over all questions."""
    groups: dict[str, list[Score]] = defaultdict(list)
    for one in scores:
        groups[one.type].append(one)
    rows = {kind: groups[kind] for kind in TYPES if kind in groups} | {"all": scores}
    return {kind: _means(group) for kind, group in rows.items()}


def _means(group: list[Score]) -> dict[str, float]:
    def mean(values: list[float]) -> float:
        return round(sum(values) / len(values), 4)

    return {
        "n": len(group),
        "full": mean([one.full for one in group]),
        "reuse": mean([one.reuse for one in group]),
        "no context": mean([one.blank for one in group]),
        "guess": mean([one.guess for one in group]),
    }


def markdown(tables: dict[str, dict[str, dict[str, float]]]) -> str:
    """One table for each set."""
    lines = []
    for name, rows in tables.items():
        lines += [
            f"\n**{name}**\n",
            "| type | n | full prefill | full reuse | no context | guess floor |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        lines += [
            f"| {kind} | {' | '.join(f'{value:g}' for value in row.values())} |"
            for kind, row in rows.items()
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Score a reader and print the model card's tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--worlds", type=int, default=264)
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="bf16 arithmetic")
    options = parser.parse_args()
    tables = {}
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for name in options.sets:
            count = max(1, round(options.worlds * SETS[name][3]))
            parts = [
                range(first, count, 4 * options.workers) for first in range(4 * options.workers)
            ]
            found = pool.map(partial(scores, options.folder, name, quick=options.quick), parts)
            tables[name] = table([one for part in found for one in part])
    print(markdown(tables))


if __name__ == "__main__":
    main()
