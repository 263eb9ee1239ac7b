"""Trains learned scores: the reader's on training worlds, those of another model on prompts of real
text.

    python -m training.scores --seed 6 --out runs/scores
    python -m training.scores --reader MODEL --prompts FILE ... --steps 60 --out FOLDER

OUT is a file, or a folder that is there, such as the model's, in which the engine finds the scores.

The question types of a world are drawn evenly. The target is the model's own output under a full
prefill. This takes an hour of one core. Chunks are stored as they are by default: the reader's
alone, another model's as expected KV.

A line of FILE is `{"passages": [...], "question": "...", "answer": "..."}`, as `python -m
benchmarks.real --export` writes its sets. A step of SmolLM2-135M with four passages takes one busy
core about ten seconds.

The shipped file was made in several steps by earlier versions of this command; this one trains a
file of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from ragkv import Engine, EngineConfig, FusionConfig
from ragkv.errors import InputError, RagKVError
from ragkv.fusion.learned import FILE_NAME
from training.batches import Encoder
from training.questions import Question
from training.score_training import Continuation, TrainingExample, train
from training.tokenizer import USER, build
from training.worlds import level, world

FIRST_WORLD = 50_000_000_000  # FIRST_WORLD is far from the seeds of training and of evaluation.
LEVELS = (2, 3, 3, 3, 4)
QUESTIONS = 12
# Of a prompt of real text so many passages are kept, and so much of each: time is short.
PASSAGES = 4
CHARACTERS = 600
# of its question the end, of its answer the beginning
QUESTION_CHARACTERS = 800
ANSWER_TOKENS = 16


def tail(question: Question, encoder: Encoder) -> Continuation:
    """A question with its earlier turns, and its answer, as the ids that follow the chunks."""
    ids: list[int] = []
    known = 0
    for asked, answer in (*question.history, (question.question, question.answer)):
        question_ids, answer_ids = encoder.turn(asked, answer)
        ids += [USER, *question_ids] if ids else question_ids
        known = len(ids)
        ids += answer_ids
    return Continuation(tuple(ids), known)


def training_examples(engine: Engine, count: int, seed: int) -> list[TrainingExample]:
    """`count` worlds of levels drawn from `LEVELS`, as training examples."""
    encoder = Encoder(build())
    random = Random(seed)
    made = []
    for number in range(count):
        spec = replace(level(random.choice(LEVELS)), questions=QUESTIONS, even=True)
        made_world = world(FIRST_WORLD + seed * 1_000_000 + number, spec)
        tails = tuple(tail(question, encoder) for question in made_world.questions)
        made.append(TrainingExample(tuple(engine.chunk(text) for text in made_world.chunks), tails))
    return made


def prompt_examples(
    engine: Engine, lines: Sequence[str], count: int, seed: int
) -> list[TrainingExample]:
    """At most `count` lines of files, drawn at random, as training examples. Raises
    `InputError`.
    """
    made = list[TrainingExample]()
    random = Random(seed)
    for line in random.sample(lines, min(count, len(lines))):
        try:
            asked = json.loads(line)
            passages = list(asked["passages"])
            question = str(asked["question"])
            answer = str(asked["answer"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"Not a line with passages, question and answer: {line:.80}"
            ) from error
        told = [text for text in passages if answer in text][:PASSAGES]
        others = [text for text in passages if text not in told]
        kept = told + random.sample(others, min(len(others), PASSAGES - len(told)))
        random.shuffle(kept)
        known = (
            engine.intake.encode(question[-QUESTION_CHARACTERS:])
            + engine.intake.runs.after_question
        )
        tail = Continuation(known + engine.intake.encode(answer)[:ANSWER_TOKENS], len(known))
        made.append(
            TrainingExample(tuple(engine.chunk(around(text, answer)) for text in kept), (tail,))
        )
    return made


def around(text: str, answer: str) -> str:
    """`CHARACTERS` of a text, with the answer in them if the text has it."""
    start = max(0, text.find(answer) - CHARACTERS // 2)
    return text[start : start + CHARACTERS].strip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the scores, and write the file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--reader", default="reader")
    parser.add_argument(
        "--prompts", nargs="+", type=Path, help="files of prompts, in place of worlds"
    )
    parser.add_argument(
        "--worlds", type=int, default=1500, help="at most so many worlds, or prompts"
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    out = options.out / FILE_NAME
    # what cannot be written is known before the training
    options.out.mkdir(parents=True, exist_ok=True)
    lines = [
        line for file in options.prompts or () for line in file.read_text("utf-8").splitlines()
    ]
    began = time.monotonic()
    losses = []

    def show(done: int, steps: int, loss: float) -> None:
        losses.append(loss)
        shown = max(1, steps // 100)
        if done % shown == 0 or done == steps:
            mean = sum(losses[-shown:]) / len(losses[-shown:])
            print(
                f"step {done} of {steps}  {mean:.3f} nats  {time.monotonic() - began:.0f} s",
                flush=True,
            )

    config = EngineConfig(dtype="float32", fusion=FusionConfig(learned_scores=False))
    with Engine.from_pretrained(options.reader, config) as engine:
        if options.prompts:
            made = prompt_examples(engine, lines, options.worlds, options.seed)
        else:
            made = training_examples(engine, options.worlds, options.seed)
        network = train(engine, made, options.steps, options.seed, show)
    out.write_bytes(network.to_bytes())
    print(f"{out}: {out.stat().st_size} bytes, digest {network.digest}")


if __name__ == "__main__":
    try:
        main()
    except (RagKVError, OSError) as error:
        sys.exit(str(error))
