"""A trace: requests of conversations in order of time, in blocks, and what is known of it before
any replay.

Definitions (docs/research/policies.md): a request's prompt is `in` blocks, rounded up; `sh` of
them, rounded down, are a prefix of what its conversation stored; after it the conversation is `L`
full blocks long. The CSV format has one row for each request.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ragkv.errors import InputError
from ragkv.store.policies import NEVER, NextRequest, TurnSize

COLUMNS = ("t", "request", "conversation", "in", "sh", "L")


class TraceRow(NamedTuple):
    """One request, as a row of the CSV format."""

    at: float  # seconds
    request: int  # breaks ties of time
    conversation: str
    prompt: int  # in
    shared: int  # sh
    length: int  # L


@dataclass(frozen=True)
class Trace:
    """Turns in order of time, each with its future."""

    name: str
    block_tokens: int  # B
    turns: Sequence[TurnSize]
    # what we chose where the published trace leaves it open
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def of(
        cls,
        rows: Iterable[TraceRow],
        block_tokens: int,
        name: str = "",
        notes: tuple[str, ...] = (),
    ) -> "Trace":
        """Sort rows by time and request number, and give each turn its number, its gap and its next
        request.
        """
        ordered = sorted(rows)
        nexts: dict[str, NextRequest] = {}
        future: list[NextRequest] = []
        for position in range(len(ordered) - 1, -1, -1):
            _, _, group, prompt, shared, _ = ordered[position]
            future.append(nexts.get(group, NEVER))
            nexts[group] = NextRequest(position, prompt, shared)
        last: dict[str, tuple[float, int]] = {}
        turns = []
        for (at, request, group, prompt, shared, length), then in zip(
            ordered, reversed(future), strict=True
        ):
            before, number = last.get(group, (None, 0))
            last[group] = at, number + 1
            since = None if before is None else at - before
            turns.append(
                TurnSize(at, request, group, prompt, shared, length, number + 1, since, then)
            )
        return cls(name, block_tokens, turns, notes)

    @cached_property
    def new_blocks(self) -> list[int]:
        """in - sh of every turn from the second on: a sample of Q."""
        return [turn.prompt - turn.shared for turn in self.turns if turn.number > 1]

    @property
    def expected_new_blocks(self) -> int:
        """Q^: the mean of `new_blocks`, rounded up; 0 where no conversation returns."""
        return -(-sum(self.new_blocks) // len(self.new_blocks)) if self.new_blocks else 0

    @cached_property
    def peak_live(self) -> int:
        """The most blocks, over time, of conversations that will return."""
        live = peak = 0
        stored: dict[str, int] = {}
        for turn in self.turns:
            live -= stored.pop(turn.group, 0)
            if turn.next is not NEVER:
                stored[turn.group] = turn.length
                live += turn.length
                peak = max(peak, live)
        return peak

    @property
    def rates(self) -> tuple[float, float]:
        """lambda and mu of the birth-death model, estimated from observed gaps and the share of
        returns.
        """
        gaps = [turn.since for turn in self.turns if turn.since is not None]
        total = sum(gaps)
        if total <= 0:
            return 1.0, 1.0
        rate = len(gaps) / total
        share = len(gaps) / len(self.turns)
        return rate * share, rate * (1 - share)

    def in_blocks_of(self, tokens: int) -> "Trace":
        """The trace in larger blocks, of a multiple of its blocks' tokens."""
        by = tokens // self.block_tokens
        turns = self.turns
        rows = (
            TraceRow(t.at, t.request, t.group, -(-t.prompt // by), t.shared // by, t.length // by)
            for t in turns
        )
        return Trace.of(rows, tokens, self.name, self.notes)

    def first(self, requests: int) -> "Trace":
        """The first `requests` requests as a trace; no turn's `next` refers to a later request."""
        rows = (
            TraceRow(t.at, t.request, t.group, t.prompt, t.shared, t.length)
            for t in self.turns[:requests]
        )
        return Trace.of(rows, self.block_tokens, f"{self.name}, first {requests}", self.notes)


class TraceBuilder:
    """Makes rows from token counts, with blocks of B tokens.

    in = ceil(prompt / B), sh = floor(shared / B), L = floor((prompt + response) / B).
    """

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._length: dict[str, int] = {}  # L of a conversation's last request
        self._rows: list[TraceRow] = []

    def add(
        self, at: float, group: str, prompt_tokens: int, shared_tokens: int, response_tokens: int
    ) -> None:
        """One request; `shared_tokens` of its prompt are a prefix of what its conversation
        stored.
        """
        shared = min(shared_tokens // self._block, self._length.get(group, 0))
        length = self._length[group] = (prompt_tokens + response_tokens) // self._block
        self._rows.append(
            TraceRow(at, len(self._rows), group, -(-prompt_tokens // self._block), shared, length)
        )

    def trace(self, name: str, *notes: str) -> Trace:
        return Trace.of(self._rows, self._block, name, notes)


def read_rows(path: Path, block_tokens: int) -> Trace:
    """A trace from its CSV format; raises `InputError` naming the line and what is wrong
    with it.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            missing = [name for name in COLUMNS if name not in header]
            if missing:
                raise InputError(
                    f"{path} lacks the column(s) {', '.join(missing)}; its header must be "
                    f"{','.join(COLUMNS)}."
                )
            places = [header.index(name) for name in COLUMNS]
            rows = [_row(path, reader.line_num, cells, places) for cells in reader if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"The trace {path} cannot be read: {error}.") from error
    if not rows:
        raise InputError(f"The trace {path} has no requests.")
    return Trace.of(rows, block_tokens, path.name)


def _row(path: Path, line: int, cells: Sequence[str], places: Sequence[int]) -> TraceRow:
    try:
        at, request, group, prompt, shared, length = (cells[place] for place in places)
        row = TraceRow(
            float(at), int(request), group.strip(), int(prompt), int(shared), int(length)
        )
    except (IndexError, ValueError) as error:
        raise InputError(
            f"{path}, line {line}: {','.join(cells)!r} is no row of {','.join(COLUMNS)} ({error})."
        ) from error
    if min(row.prompt, row.shared, row.length) < 0 or not row.at >= 0:
        raise InputError(f"{path}, line {line}: t, in, sh and L must not be negative.")
    if row.shared > row.prompt:
        raise InputError(
            f"{path}, line {line}: sh is {row.shared}, more than the {row.prompt} blocks of the "
            "prompt."
        )
    return row
