"""Turns worlds into rows of token ids: one context, many questions next to each other, and labels
for auxiliary losses.

A row is `<bos><user>` chunks, then one branch for each question. Every branch sees the context and
itself, and starts at the position where the context ends, as if it were the only one. This file
knows the layout and the labels, and nothing of the model.

Invariant: a branch's ids and positions equal those of the same question asked alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from training.discourse import Fact, Mention, MentionType
from training.questions import UNKNOWN, Question
from training.templates import SYSTEM
from training.tokenizer import ASSISTANT, BOS, END, PAD, USER, build
from training.worlds import World, level, world

IGNORE = -100
BUCKETS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072)
# AUXILIARY_HEADS name what each head predicts the name of. A label holds the index into this tuple.
AUXILIARY_HEADS = ("previous", "reference", "subject", "object", "bridge", "asked", "described")
# ATTENTION_TARGETS say where attention is trained to go: a reference to the name it means, a
# question to its first and its last statement, a description to the statement that introduced it, a
# comparison to the older name.
ATTENTION_TARGETS = ("reference", "first", "last", "described", "older")

_INTRODUCES = {
    "alias": MentionType.ALIAS,
    "job": MentionType.DESCRIPTION,
    "product": MentionType.DESCRIPTION,
}


@dataclass(frozen=True)
class Row:
    """One context with its branches. The first four lists have equal length S."""

    ids: list[int]
    positions: list[int]
    branch: list[int]  # 0 context, then 1, 2, ... for each branch
    targets: list[int]  # the next id where an answer is learned, else IGNORE
    # auxiliary head, index in the row, first and last token of the name
    labels: list[tuple[int, int, int, int]]
    # kind of target, index in the row, two indices to attend to
    attention_targets: list[tuple[int, int, int, int]]


@dataclass(frozen=True)
class Batch:
    """Rows padded to one length."""

    ids: Tensor  # (B, S)
    positions: Tensor  # (B, S)
    branch: Tensor  # (B, S), -1 padding
    targets: Tensor  # (B, S)
    labels: Tensor  # (M, 5): auxiliary head, row, index, first token, last token
    attention_targets: Tensor  # (N, 5): kind of target, row, index, two indices to attend to
    worlds: int  # worlds drawn so far, those of the rows still waiting included


@dataclass(frozen=True)
class _Places:
    """Where in a row names and statements stand."""

    named: dict[str, int]  # entity -> its last mention by name
    statements: dict[int, tuple[int, int]]  # statement -> its later mention, and its end
    # (entity, ALIAS or DESCRIPTION) -> the same, of the statement that introduced this code name or
    # description
    introduced: dict[tuple[str, MentionType], tuple[int, int]]
    facts: dict[int, Fact]  # statement -> its fact


class Encoder:
    """Turns worlds into rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._name_tokens: dict[str, tuple[int, int]] = {}

    def ids(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def turn(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """The ids of a question up to `<assistant>`, and those of its answer up to `<end>`."""
        return [*self.ids(question), ASSISTANT], [*self.ids(answer), END]

    def row(self, made: World, random: Random, length: int | None, extras: bool) -> Row:
        """The world as a row. With `extras`, sometimes a system text, a turn in the middle, or
        fewer chunks.
        """
        made, kept = (
            _some_chunks(made, random) if extras else (made, tuple(range(len(made.chunks))))
        )
        row = Row([BOS], [], [], [IGNORE], [], [])
        places = _Places({}, {}, {}, {})
        if extras and random.random() < 0.1:
            self._append(row, self.ids(random.choice(SYSTEM)))
        self._append(row, [USER])
        turn = _middle_turn(made, random) if extras and len(kept) == len(made.chunks) else None
        for number in kept:
            if turn and turn[0] == number:
                self._append_turn(row, turn[1].question, turn[1].answer)
                self._append(row, [USER])
            self._append_chunk(row, made, number, set(kept), places)
        context = len(row.ids)
        row.positions.extend(range(context))
        row.branch.extend([0] * context)
        for number, question in enumerate(made.questions, start=1):
            if not self._append_branch(row, question, number, length, places):
                break
        return row

    def _append_chunk(
        self, row: Row, made: World, number: int, kept: set[int], places: _Places
    ) -> None:
        encoding = self._tokenizer.encode(made.chunks[number], add_special_tokens=False)
        base = len(row.ids)
        last = {end: base + index for index, (_, end) in enumerate(encoding.offsets)}
        self._append(row, encoding.ids)
        for index, statement in enumerate(made.statements):
            if statement.chunk != number or not statement.support <= kept:
                continue
            fact = statement.fact
            subject = statement.subject
            for mention in (subject, statement.object):
                self._label_mention(row, mention, last[mention.end], places)
            places.statements[index] = (
                last[max(subject.end, statement.object.end)],
                last[statement.end],
            )
            places.facts[index] = fact
            if subject.type is MentionType.NAME and fact.relation in _INTRODUCES:
                places.introduced[fact.subject, _INTRODUCES[fact.relation]] = places.statements[
                    index
                ]
            for position in places.statements[index]:
                row.labels.append((2, position, *self._name(fact.subject)))
                row.labels.append((3, position, *self._name(fact.object)))

    def _label_mention(self, row: Row, mention: Mention, position: int, places: _Places) -> None:
        if mention.type is MentionType.NAME:
            places.named[mention.entity] = position
            row.labels.append((0, position, row.ids[position - 1], row.ids[position - 1]))
        elif mention.type in (MentionType.ALIAS, MentionType.DESCRIPTION):
            row.labels.append((6, position, *self._name(mention.entity)))
            if (mention.entity, mention.type) in places.introduced:
                row.attention_targets.append(
                    (3, position, *places.introduced[mention.entity, mention.type])
                )
        elif mention.type is not MentionType.WORD:
            row.labels.append((1, position, *self._name(mention.entity)))
            if mention.entity in places.named:
                row.attention_targets.append(
                    (0, position, places.named[mention.entity], places.named[mention.entity])
                )

    def _append_branch(
        self, row: Row, question: Question, number: int, length: int | None, places: _Places
    ) -> bool:
        """Whether the branch fitted into `length`."""
        start = len(row.ids)
        context = row.branch.count(0)
        for asked, answer in (*question.history, (question.question, question.answer)):
            if len(row.ids) > start:
                self._append(row, [USER])
            self._append_turn(row, asked, answer)
        if length is not None and len(row.ids) > length:
            del row.ids[start:], row.targets[start:]
            return False
        asked_at = max(index for index in range(start, len(row.ids)) if row.ids[index] == ASSISTANT)
        for head, name in ((4, question.bridge), (5, question.subject)):
            if name:
                row.labels.append((head, asked_at, *self._name(name)))
        if question.statements and all(index in places.statements for index in question.statements):
            if question.type == "comparison":
                self._label_comparison(row, question, start, asked_at, places)
            else:
                for target, index in ((1, question.statements[0]), (2, question.statements[-1])):
                    row.attention_targets.append((target, asked_at, *places.statements[index]))
        row.positions.extend(range(context, context + len(row.ids) - start))
        row.branch.extend([number] * (len(row.ids) - start))
        return True

    def _label_comparison(
        self, row: Row, question: Question, start: int, asked_at: int, places: _Places
    ) -> None:
        """Each name in the question attends to its own year; the answer attends to the
        older name.
        """
        for index in question.statements:
            fact = places.facts[index]
            name = self.ids(fact.subject)
            end = next(
                i
                for i in range(start + len(name), len(row.ids))
                if row.ids[i - len(name) + 1 : i + 1] == name
            )
            row.labels.append((4, end, *self._name(fact.object)))
            row.attention_targets.append((1, end, *places.statements[index]))
            if fact.subject == question.answer:
                row.attention_targets.append((4, asked_at, end, end))

    def _append_turn(self, row: Row, question: str, answer: str) -> None:
        """A question and its answer, which is learned from `<assistant>` on."""
        question_ids, answer_ids = self.turn(question, answer)
        self._append(row, question_ids)
        row.targets[-1] = answer_ids[0]
        row.ids.extend(answer_ids)
        row.targets.extend([*answer_ids[1:], IGNORE])

    def _append(self, row: Row, ids: list[int]) -> None:
        row.ids.extend(ids)
        row.targets.extend([IGNORE] * len(ids))

    def _name(self, name: str) -> tuple[int, int]:
        """The first and the last token of a name."""
        if name not in self._name_tokens:
            ids = self.ids(name)
            self._name_tokens[name] = (ids[0], ids[-1])
        return self._name_tokens[name]


def _some_chunks(made: World, random: Random) -> tuple[World, tuple[int, ...]]:
    """Sometimes only the first chunks, or one alone. Questions that need other chunks get the
    answer "unknown".
    """
    draw = random.random()
    count = len(made.chunks)
    if draw < 0.06:
        kept: tuple[int, ...] = tuple(range(random.randint(1, count)))
    elif draw < 0.09:
        kept = (random.randrange(count),)
    else:
        return made, tuple(range(count))
    questions = tuple(
        question
        if set(question.support) <= set(kept)
        else replace(question, answer=UNKNOWN, bridge="")
        for question in made.questions
        if not question.history
    )
    return replace(made, questions=questions), kept


def _middle_turn(made: World, random: Random) -> tuple[int, Question] | None:
    """Sometimes a question between two chunks that the chunks before it answer, with the number of
    the chunk after.
    """
    if random.random() > 0.12 or len(made.chunks) < 2:
        return None
    number = random.randrange(1, len(made.chunks))
    fitting = [q for q in made.questions if q.support and max(q.support) < number and not q.history]
    return (number, random.choice(fitting)) if fitting else None


class Stream(torch.utils.data.IterableDataset[Batch]):
    """An endless stream of batches, the same for the same seed, mix of levels and start."""

    def __init__(
        self, seed: int, mix: dict[int, float], tokens: int, start: int = 0, stride: int = 1
    ) -> None:
        self._seed = seed
        self._mix = mix
        self._tokens = tokens
        self._start = start
        self._stride = stride

    def __iter__(self) -> Iterator[Batch]:
        encoder = Encoder(build())
        waiting: dict[int, list[Row]] = {}
        number = self._start
        while True:
            random = Random(self._seed * 1_000_003 + number)
            drawn = random.choices(list(self._mix), list(self._mix.values()))[0]
            seed = self._seed * 1_000_000_000 + number
            made = world(seed, replace(level(drawn), questions=24))
            number += self._stride
            context = sum(len(encoder.ids(chunk)) for chunk in made.chunks)
            wanted = context + 60 + context // 4
            bucket = next((size for size in BUCKETS if size >= wanted), None)
            if bucket is None:
                continue
            row = encoder.row(made, random, bucket, extras=True)
            if len(row.ids) > bucket:
                continue
            rows = waiting.setdefault(bucket, [])
            rows.append(row)
            if len(rows) * bucket >= self._tokens:
                yield collate(rows, bucket, number)
                rows.clear()


def collate(rows: list[Row], length: int, worlds: int = 0) -> Batch:
    """The rows as one batch, padded to `length`."""

    def padded(values: list[list[int]], fill: int) -> Tensor:
        out = np.full((len(values), length), fill, dtype=np.int64)
        for index, value in enumerate(values):
            out[index, : len(value)] = value
        return torch.from_numpy(out)

    def with_row(lists: list[list[tuple[int, int, int, int]]]) -> Tensor:
        values = [
            (each[0], index, *each[1:]) for index, several in enumerate(lists) for each in several
        ]
        return torch.tensor(values, dtype=torch.int64).view(-1, 5)

    return Batch(
        padded([row.ids for row in rows], PAD),
        padded([row.positions for row in rows], 0),
        padded([row.branch for row in rows], -1),
        padded([row.targets for row in rows], IGNORE),
        with_row([row.labels for row in rows]),
        with_row([row.attention_targets for row in rows]),
        worlds,
    )
