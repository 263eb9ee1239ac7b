"""Worlds as rows of token ids: one context, many questions side by side, and what the throwaway heads should see.

A row is `<bos><user>` chunks, then one branch a question; every branch sees the context and itself and starts where
the context ends, as if it were the only one. Knows the layout and the labels; knows nothing of the model.

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

from training.discourse import Fact, How, Mention
from training.questions import UNKNOWN, Question
from training.templates import SYSTEM
from training.tokenizer import ASSISTANT, BOS, END, PAD, USER, build
from training.worlds import World, level, world

IGNORE = -100
BUCKETS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536)
HEADS = ("previous", "reference", "subject", "object", "bridge", "asked", "described")
# A reference at its name, a question at its first and at its last statement, a description at what introduced it,
# a comparison at the older name.
LOOKS = ("reference", "first", "last", "described", "older")


_INTRODUCES = {"alias": How.ALIAS, "job": How.DESC, "product": How.DESC}


@dataclass(frozen=True)
class Row:
    """One context with its branches; lists of equal length S but for `marks`."""

    ids: list[int]
    positions: list[int]
    branch: list[int]  # 0 context, then 1, 2, ... a branch each
    targets: list[int]  # the next id where an answer is learned, else IGNORE
    marks: list[tuple[int, int, int, int]]  # head, position in the row, first and last piece of the name to tell
    looks: list[tuple[int, int, int, int]]  # what for, position in the row, two positions it should look at


@dataclass(frozen=True)
class Batch:
    """Rows of one length."""

    ids: Tensor  # (B, S)
    positions: Tensor  # (B, S)
    branch: Tensor  # (B, S), -1 padding
    targets: Tensor  # (B, S)
    marks: Tensor  # (M, 5): head, row, position, first piece, last piece
    looks: Tensor  # (N, 5): what for, row, position, two positions to look at
    worlds: int  # worlds drawn so far, those of the rows still waiting included


@dataclass(frozen=True)
class _Places:
    """Where in a row things stand."""

    named: dict[str, int]  # an entity's last mention by name
    statements: dict[int, tuple[int, int]]  # a statement's later mention, and its end
    introduced: dict[
        tuple[str, How], tuple[int, int]
    ]  # the same, of what introduced an entity's code name or description
    facts: dict[int, Fact]  # what each of the statements told


class Encoder:
    """Turns worlds into rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._pieces: dict[str, tuple[int, int]] = {}

    def ids(self, text: str) -> list[int]:
        """The ids of a run of text, nothing added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def row(self, made: World, random: Random, length: int | None, extras: bool) -> Row:
        """The world as a row; `extras` now and then adds a system text, a turn in the middle, or takes chunks away."""
        made, kept = _some_chunks(made, random) if extras else (made, tuple(range(len(made.chunks))))
        row, places = Row([BOS], [], [], [IGNORE], [], []), _Places({}, {}, {}, {})
        if extras and random.random() < 0.1:
            self._put(row, self.ids(random.choice(SYSTEM)))
        self._put(row, [USER])
        turn = _middle_turn(made, random) if extras and len(kept) == len(made.chunks) else None
        for number in kept:
            if turn and turn[0] == number:
                self._answer(row, turn[1].question, turn[1].answer)
                self._put(row, [USER])
            self._chunk(row, made, number, set(kept), places)
        context = len(row.ids)
        row.positions.extend(range(context))
        row.branch.extend([0] * context)
        for number, question in enumerate(made.questions, start=1):
            if not self._branch(row, question, number, length, places):
                break
        return row

    def _chunk(self, row: Row, made: World, number: int, kept: set[int], places: _Places) -> None:
        encoding = self._tokenizer.encode(made.chunks[number], add_special_tokens=False)
        base = len(row.ids)
        last = {end: base + index for index, (_, end) in enumerate(encoding.offsets)}
        self._put(row, encoding.ids)
        for index, told in enumerate(made.statements):
            if told.chunk != number or not told.support <= kept:
                continue
            for mention in (told.subject, told.object):
                self._mention(row, mention, last[mention.end], places)
            places.statements[index] = (last[max(told.subject.end, told.object.end)], last[told.end])
            places.facts[index] = told.fact
            if told.subject.how is How.NAME and told.fact.relation in _INTRODUCES:
                places.introduced[told.fact.subject, _INTRODUCES[told.fact.relation]] = places.statements[index]
            for position in places.statements[index]:
                row.marks.append((2, position, *self._name(told.fact.subject)))
                row.marks.append((3, position, *self._name(told.fact.object)))

    def _mention(self, row: Row, mention: Mention, position: int, places: _Places) -> None:
        if mention.how is How.NAME:
            places.named[mention.entity] = position
            row.marks.append((0, position, row.ids[position - 1], row.ids[position - 1]))
        elif mention.how in (How.ALIAS, How.DESC):
            row.marks.append((6, position, *self._name(mention.entity)))
            if (mention.entity, mention.how) in places.introduced:
                row.looks.append((3, position, *places.introduced[mention.entity, mention.how]))
        elif mention.how is not How.WORD:
            row.marks.append((1, position, *self._name(mention.entity)))
            if mention.entity in places.named:
                row.looks.append((0, position, places.named[mention.entity], places.named[mention.entity]))

    def _branch(self, row: Row, question: Question, number: int, length: int | None, places: _Places) -> bool:
        start, context = len(row.ids), row.branch.count(0)
        for asked, answer in (*question.history, (question.question, question.answer)):
            if len(row.ids) > start:
                self._put(row, [USER])
            self._answer(row, asked, answer)
        if length is not None and len(row.ids) > length:
            del row.ids[start:], row.targets[start:]
            return False
        asked_at = max(index for index in range(start, len(row.ids)) if row.ids[index] == ASSISTANT)
        for head, name in ((4, question.bridge), (5, question.asked)):
            if name:
                row.marks.append((head, asked_at, *self._name(name)))
        if question.told and all(told in places.statements for told in question.told):
            if question.type == "comparison":
                self._compared(row, question, start, asked_at, places)
            else:
                for what, told in ((1, question.told[0]), (2, question.told[-1])):
                    row.looks.append((what, asked_at, *places.statements[told]))
        row.positions.extend(range(context, context + len(row.ids) - start))
        row.branch.extend([number] * (len(row.ids) - start))
        return True

    def _compared(self, row: Row, question: Question, start: int, asked_at: int, places: _Places) -> None:
        """Each name in the question looks up its own year."""
        for told in question.told:
            name = self.ids(places.facts[told].subject)
            end = next(i for i in range(start + len(name), len(row.ids)) if row.ids[i - len(name) + 1 : i + 1] == name)
            row.marks.append((4, end, *self._name(places.facts[told].object)))
            row.looks.append((1, end, *places.statements[told]))
            if places.facts[told].subject == question.answer:
                row.looks.append((4, asked_at, end, end))

    def _answer(self, row: Row, question: str, answer: str) -> None:
        """A question and its answer, learned from `<assistant>` on."""
        self._put(row, [*self.ids(question), ASSISTANT])
        answer_ids = [*self.ids(answer), END]
        row.targets[-1] = answer_ids[0]
        row.ids.extend(answer_ids)
        row.targets.extend([*answer_ids[1:], IGNORE])

    def _put(self, row: Row, ids: list[int]) -> None:
        row.ids.extend(ids)
        row.targets.extend([IGNORE] * len(ids))

    def _name(self, name: str) -> tuple[int, int]:
        if name not in self._pieces:
            ids = self.ids(name)
            self._pieces[name] = (ids[0], ids[-1])
        return self._pieces[name]


def _some_chunks(made: World, random: Random) -> tuple[World, tuple[int, ...]]:
    """Now and then only the first chunks, or one alone: what they do not tell is unknown."""
    draw, count = random.random(), len(made.chunks)
    if draw < 0.06:
        kept: tuple[int, ...] = tuple(range(random.randint(1, count)))
    elif draw < 0.09:
        kept = (random.randrange(count),)
    else:
        return made, tuple(range(count))
    questions = tuple(
        question if set(question.support) <= set(kept) else replace(question, answer=UNKNOWN, bridge="")
        for question in made.questions
        if not question.history
    )
    return replace(made, questions=questions), kept


def _middle_turn(made: World, random: Random) -> tuple[int, Question] | None:
    """Now and then a question between two chunks, answered by those before it."""
    if random.random() > 0.12 or len(made.chunks) < 2:
        return None
    number = random.randrange(1, len(made.chunks))
    fitting = [q for q in made.questions if q.support and max(q.support) < number and not q.history]
    return (number, random.choice(fitting)) if fitting else None


class Stream(torch.utils.data.IterableDataset[Batch]):
    """Batches without end, the same for the same seed, mix and start."""

    def __init__(self, seed: int, mix: dict[int, float], tokens: int, start: int = 0, stride: int = 1) -> None:
        self._seed, self._mix, self._tokens, self._start, self._stride = seed, mix, tokens, start, stride

    def __iter__(self) -> Iterator[Batch]:
        encoder = Encoder(build())
        waiting: dict[int, list[Row]] = {}
        number = self._start
        while True:
            random = Random(self._seed * 1_000_003 + number)
            spec = replace(level(random.choices(list(self._mix), list(self._mix.values()))[0]), questions=24)
            made = world(self._seed * 1_000_000_000 + number, spec)
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
    """Rows padded to one length."""

    def padded(values: list[list[int]], fill: int) -> Tensor:
        out = np.full((len(values), length), fill, dtype=np.int64)
        for index, value in enumerate(values):
            out[index, : len(value)] = value
        return torch.from_numpy(out)

    marks = [(mark[0], index, *mark[1:]) for index, row in enumerate(rows) for mark in row.marks]
    looks = [(look[0], index, *look[1:]) for index, row in enumerate(rows) for look in row.looks]
    return Batch(
        padded([row.ids for row in rows], PAD),
        padded([row.positions for row in rows], 0),
        padded([row.branch for row in rows], -1),
        padded([row.targets for row in rows], IGNORE),
        torch.tensor(marks, dtype=torch.int64).view(-1, 5),
        torch.tensor(looks, dtype=torch.int64).view(-1, 5),
        worlds,
    )
