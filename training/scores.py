"""Trains the reader's learned scores on training worlds: chunks of one prompt, followed by questions and answers.

    python -m training.scores --seed 6 --out runs/scores

The question types of a world are drawn evenly. The target is the reader's own output under a full prefill. This takes
an hour of one core.

The shipped file was made in several steps by earlier versions of this command; this one trains a file of its own.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from ragkv import Engine, EngineConfig, FusionConfig
from training.batches import Encoder
from training.questions import Question
from training.score_training import Continuation, TrainingExample, train
from training.tokenizer import USER, build
from training.worlds import level, world

FIRST_WORLD = 50_000_000_000  # FIRST_WORLD is far from the seeds of training and of evaluation.
LEVELS = (2, 3, 3, 3, 4)
QUESTIONS = 12


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
    encoder, random, made = Encoder(build()), Random(seed), []
    for number in range(count):
        spec = replace(level(random.choice(LEVELS)), questions=QUESTIONS, even=True)
        made_world = world(FIRST_WORLD + seed * 1_000_000 + number, spec)
        tails = tuple(tail(question, encoder) for question in made_world.questions)
        made.append(TrainingExample(tuple(engine.chunk(text) for text in made_world.chunks), tails))
    return made


def main() -> None:
    """Train the scores, and write the file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--reader", default="reader")
    parser.add_argument("--worlds", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    began, losses = time.monotonic(), []

    def show(done: int, steps: int, loss: float) -> None:
        losses.append(loss)
        if done % 50 == 0 or done == steps:
            mean = sum(losses[-50:]) / len(losses[-50:])
            print(f"step {done} of {steps}  {mean:.3f} nats  {time.monotonic() - began:.0f} s", flush=True)

    config = EngineConfig(dtype="float32", fusion=FusionConfig(learned_scores=False))
    with Engine.from_pretrained(options.reader, config) as engine:
        made = training_examples(engine, options.worlds, options.seed)
        network = train(engine, made, options.steps, options.seed, show)
    options.out.write_bytes(network.to_bytes())
    print(f"{options.out}: {options.out.stat().st_size} bytes, digest {network.digest}")


if __name__ == "__main__":
    main()
