"""The example corpus: one world as small readable documents, and questions that the shipped reader
answers right.

    python -m training.make_examples --reader ragkv/model/reader

Writes `tests/world/corpus/*.md`, one document for each chunk, and `tests/world/questions.jsonl`. A
question lists its documents in the order of the world, so that references keep their meaning: those
that support it, and some others. The files there were made with earlier templates, and one question
(desc-2) by hand: this would make another world.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from training.batches import Encoder, collate
from training.evaluate import right
from training.model import Reader, bias, load
from training.questions import Question
from training.tokenizer import build
from training.worlds import World, level, world

DOCUMENTS = 10
PER_QUESTION = 6
PER_TYPE = 2


def example(seed: int) -> World:
    """The world of the examples: ten chunks, many relations, a little less filler than in
    training.
    """
    spec = level(3)
    narration = replace(
        spec.narration, chunks=(DOCUMENTS, DOCUMENTS), sentences=(5, 8), fillers=0.1
    )
    return world(seed, replace(spec, narration=narration, relations=(7, 7), questions=400))


def file_name(made: World, number: int) -> str:
    """A document's name: its number and the subject of its first statement."""
    first = next((statement for statement in made.statements if statement.chunk == number), None)
    return f"{number + 1:02d}-{(first.fact.subject if first else 'notes').lower()}.md"


def documents(made: World, question: Question, random: Random) -> list[int]:
    """The supporting chunks and some others, in the order of the world."""
    others = [number for number in range(len(made.chunks)) if number not in question.support]
    random.shuffle(others)
    return sorted([*question.support, *others[: max(0, PER_QUESTION - len(question.support))]])


def answers(
    reader: Reader, encoder: Encoder, made: World, chosen: list[int], question: Question
) -> bool:
    """Whether the reader answers this question right from these documents, by a full prefill."""
    chunks = tuple(made.chunks[number] for number in chosen)
    row = encoder.row(
        replace(made, chunks=chunks, statements=(), questions=(question,)),
        Random(0),
        None,
        extras=False,
    )
    batch = collate([row], len(row.ids))
    return right(reader, batch, bias(batch.branch, torch.float32), (question,), torch.float32)[0]


def choose(
    made: World, reader: Reader | None, seed: int, per_type: int = PER_TYPE
) -> list[dict[str, object]]:
    """Up to `per_type` questions of every type that the reader answers right; without a reader, of
    all questions.
    """
    random = Random(seed)
    encoder = Encoder(build())
    records: list[dict[str, object]] = []
    taken: dict[str, int] = defaultdict(int)
    for question in made.questions:
        if taken[question.type] == per_type or (
            question.answer in (other["answer"] for other in records)
        ):
            continue
        chosen = documents(made, question, random)
        if reader is not None and not answers(reader, encoder, made, chosen, question):
            continue
        taken[question.type] += 1
        record: dict[str, object] = {
            "id": f"{question.type}-{taken[question.type]}",
            "type": question.type,
            "question": question.question,
            "answer": question.answer,
            "documents": [file_name(made, number) for number in chosen],
        }
        if question.history:
            record["history"] = [list(turn) for turn in question.history]
        records.append(record)
    return sorted(records, key=lambda record: str(record["id"]))


def main() -> None:
    """Write the example corpus and its questions."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--reader", type=Path, help="keep questions this reader answers right")
    parser.add_argument(
        "--per-type", type=int, default=PER_TYPE, help="questions of each type at most"
    )
    parser.add_argument("--out", type=Path, default=Path("tests/world"))
    options = parser.parse_args()
    made = example(options.seed)
    corpus = options.out / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for old in corpus.glob("*.md"):
        old.unlink()
    for number, text in enumerate(made.chunks):
        (corpus / file_name(made, number)).write_text(text + "\n")
    chosen = choose(
        made, load(options.reader) if options.reader else None, options.seed, options.per_type
    )
    (options.out / "questions.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in chosen)
    )


if __name__ == "__main__":
    main()
