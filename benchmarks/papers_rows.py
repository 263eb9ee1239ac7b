"""The rows of docs/papers.md, and what became of each in a run of all benchmarks.

A row's last column names its commands in backticks: `ttft` or `figures "cacheblend 4"`. A row
without a command says why in the same place, beginning with "none:" or naming its tests.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "papers.md"
REASONS = ("none:", "tests:")
_COMMAND = re.compile(r"`([a-z_]+)(?: \"([^\"]+)\")?`")


class Outcome(Enum):
    """What became of a benchmark."""

    RAN = "ran"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class PaperRow:
    """A row of a table of the page."""

    part: str  # the section or figure of the paper
    commands: tuple[tuple[str, str], ...]  # the benchmark, and the figure if there is one
    reason: str = ""  # why there is no command


@dataclass(frozen=True)
class ToldRow:
    """What became of a row."""

    line: str
    is_told: bool  # it has a result, or a reason why it has none


def rows_of(page: str) -> list[PaperRow]:
    """The rows of all tables whose last column is headed "command"."""
    rows = list[PaperRow]()
    is_inside = False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            is_inside = False
        elif cells[-1] == "command":
            is_inside = True
        elif is_inside and not set(cells[0]) <= set("-: "):
            commands = tuple(_COMMAND.findall(cells[-1]))
            reason = cells[-1] if cells[-1].startswith(REASONS) else ""
            rows.append(PaperRow(cells[0], commands, reason))
    return rows


def told(
    rows: Sequence[PaperRow], outcomes: Mapping[str, tuple[Outcome, str]]
) -> Iterator[ToldRow]:
    """Each row with what became of its commands; `outcomes` are those of benchmarks by name."""
    figures = _figures()
    for row in rows:
        parts = [row.reason] if row.reason else []
        is_told = bool(row.reason or row.commands)
        for name, figure in row.commands:
            said = f"{name} {figure}".strip()
            if name not in outcomes:
                parts.append(f"{said} is no benchmark")
                is_told = False
                continue
            outcome, reason = outcomes[name]
            parts.append(f"{said} {outcome.value}{f' ({reason})' if reason else ''}")
            if outcome is Outcome.RAN and figure:
                if figure not in figures:
                    parts[-1] = f"{said} gave no table"
                    is_told = False
                elif why := figures[figure].get("skipped"):
                    parts[-1] = f"{said} skipped ({why})"
        yield ToldRow(f"{row.part}: {'; '.join(parts) or 'nothing'}", is_told)


def _figures() -> dict[str, Any]:
    """The figures of the last run, by name."""
    path = RESULTS / "figures.json"
    found: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    return found
