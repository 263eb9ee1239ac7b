"""Rows of results in a file that an interrupted run goes on from, and what is said of them:
intervals and a table.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

RESAMPLES = 2_000  # of the questions, for an interval
Row = dict[str, Any]


class Rows:
    """JSON lines. A kill loses what was not added yet, and a line that it tore is dropped when the
    file is opened.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = b"" if fresh or not path.exists() else path.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]
        self.path = path
        self.all = [json.loads(line) for line in whole.splitlines()]
        path.touch()
        os.truncate(path, len(whole))

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows, in one write."""
        self.all += rows
        with self.path.open("ab") as file:
            file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))


def draws(count: int) -> np.ndarray:
    """How often each of `count` questions is in each resample, over their number: (resamples,
    count).
    """
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    found: np.ndarray = drawn / count
    return found


def interval(resampled: Any) -> list[float]:
    """The middle 95 % of resampled values."""
    return [round(float(value), 4) for value in np.nanpercentile(resampled, (2.5, 97.5))]


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    first, *lines = (f"| {' | '.join(row)} |" for row in (headings, *rows))
    return "\n".join((first, f"|{'---|' * len(headings)}", *lines))
