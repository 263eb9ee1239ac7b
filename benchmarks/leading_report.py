"""The tables of `benchmarks.leading`: means of each way of serving a passage, and paired
differences.

A row is one question in one way. Only questions that were asked in every way of a table are in it.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.rows import Row, draws, interval, markdown

ALL = "all"  # the questions of all sets of a half
FIELDS = ("kl", "agreement", "gold", "compute", "first_token_s", "first_token_cpu_s")

# By way and field: one value (n,) for each question.
Columns = Mapping[str, Mapping[str, np.ndarray]]


def rows_of(rows: Sequence[Row], label: Mapping[str, Any]) -> list[Row]:
    """Those of `rows` that have every value of `label`."""
    return [row for row in rows if all(row.get(key) == value for key, value in label.items())]


def means(rows: Sequence[Row], ways: Sequence[str]) -> list[Row]:
    """What each of `ways` gives, for each set and half of `rows`."""
    found = list[Row]()
    for place, columns in _places(rows, ways):
        for way in ways:
            own = columns[way]
            found.append(
                {
                    **place,
                    "way": way,
                    "KL": float(own["kl"].mean()),
                    "median KL": median(own["kl"].tolist()),
                    "agreement": float(own["agreement"].mean()),
                    "gold log-likelihood": float(own["gold"].mean()),
                    "compute": float(own["compute"].mean()),
                    "first token, s": median(own["first_token_s"].tolist()),
                    "first token, s of the processor": median(own["first_token_cpu_s"].tolist()),
                }
            )
    return found


def differences(rows: Sequence[Row], pairs: Sequence[tuple[str, str]]) -> list[Row]:
    """How much more the first way of each pair gives than the second, with 95 % intervals.

    The questions are those that were asked in all ways of `pairs`.
    """
    found = list[Row]()
    ways = list(dict.fromkeys(way for pair in pairs for way in pair))
    for place, columns in _places(rows, ways):
        for one, other in pairs:
            seconds = [median(columns[way]["first_token_cpu_s"].tolist()) for way in (one, other)]
            found.append(
                {
                    **place,
                    "difference": f"{one} - {other}",
                    "KL": _more(columns, one, other, "kl"),
                    "gold log-likelihood": _more(columns, one, other, "gold"),
                    "compute": _more(columns, one, other, "compute"),
                    "first token of the processor, ratio": seconds[0] / seconds[1],
                }
            )
    return found


def _more(columns: Columns, one: str, other: str, field: str) -> list[float]:
    """The mean difference, and the ends of its interval."""
    values = columns[one][field] - columns[other][field]
    return [float(values.mean()), *interval(draws(len(values)) @ values)]


def _places(rows: Sequence[Row], ways: Sequence[str]) -> list[tuple[Row, Columns]]:
    """For each half and set with questions that were asked in all of `ways`: its name, and its
    columns.
    """
    found = list[tuple[Row, Columns]]()
    for half in dict.fromkeys(row["half"] for row in rows):
        here = rows_of(rows, {"half": half})
        for name in (*dict.fromkeys(row["set"] for row in here), ALL):
            by = {
                (row["set"], row["question"], row["way"]): row
                for row in here
                if name in (row["set"], ALL)
            }
            keys = [
                key
                for key in dict.fromkeys(key[:2] for key in by)
                if all((*key, way) in by for way in ways)
            ]
            if keys:
                columns = {
                    way: {
                        field: np.array([by[*key, way][field] for key in keys]) for field in FIELDS
                    }
                    for way in ways
                }
                found.append(({"questions": f"{half}, {name}", "n": len(keys)}, columns))
    return found


def written(table: Sequence[Row]) -> str:
    """A table of `means` or `differences` in Markdown."""
    if not table:
        return "No question was asked in all these ways."
    return markdown(list(table[0]), [[*map(_cell, row.values())] for row in table])


def _cell(value: Any) -> str:
    if isinstance(value, list):
        mean, low, high = value
        return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
