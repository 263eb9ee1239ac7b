"""The results file that an interrupted run goes on from, and the report of the paper's figures 12
and 13.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import Row, Rows, draws, interval, markdown
from ragkv.errors import InputError

BASE = "full recompute"
HEADINGS = ("95 %", "minus full recompute, 95 %", "first token, ms", "sooner", "compute", "stored")


class Results:
    """Rows with "set", "number" and "methods", the result of each method by its name: one for each
    question.

    The first line of the file are the settings. A killed run loses the question under way.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], fresh: bool = False) -> None:
        """Opens or begins the file. Raises `InputError` if it was written with other settings."""
        self.path = path
        self._file = Rows(path, fresh=fresh)
        if not self._file.all:
            self._file.add([dict(settings)])
        then = self._file.all[0]
        now = json.loads(json.dumps(settings))
        changed = [name for name in now if then.get(name) != now[name]]
        if changed:
            told = "; ".join(
                f"{name} was {json.dumps(then.get(name))}, is {json.dumps(now[name])}"
                for name in changed
            )
            raise InputError(
                f"{self.path} is from a run with other settings ({told}). Give another --out, or "
                "--fresh."
            )

    @property
    def rows(self) -> list[Row]:
        """The questions' results so far."""
        return self._file.all[1:]

    def add(self, row: Row) -> None:
        """Append a question's results."""
        self._file.add([row])

    def has(self, name: str, number: int) -> bool:
        """Whether the question of a set is there."""
        return any(row["set"] == name and row["number"] == number for row in self.rows)

    def summary(self) -> dict[str, dict[str, Any]]:
        """What `summarized` says of each set, in order."""
        sets = dict.fromkeys(row["set"] for row in self.rows)
        return {name: summarized([row for row in self.rows if row["set"] == name]) for name in sets}


def summarized(rows: Sequence[Row]) -> dict[str, Any]:
    """By method: mean score, its 95 % interval, that of the paired difference to a full recompute,
    medians of times.

    Intervals are bootstraps over questions. Skipped questions are counted apart.
    """
    asked = [row for row in rows if "methods" in row]
    found: dict[str, Any] = {
        "questions": len(asked),
        "skipped": len(rows) - len(asked),
        "methods": {},
    }
    found["cut"] = sum(bool(row["cut"]) for row in asked)
    if not asked:
        return found
    found |= {
        name: statistics.median(row[name] for row in asked) for name in ("chunks", "prompt_tokens")
    }
    names = list(asked[0]["methods"])
    # (questions, methods)
    scores = np.array([[row["methods"][name]["score"] for name in names] for row in asked])
    means = draws(len(asked)) @ scores  # (resamples, methods)
    base_s = statistics.median(row["methods"][BASE]["first_token_s"] for row in asked)
    for place, name in enumerate(names):
        own = [row["methods"][name] for row in asked]
        first_token_s = statistics.median(result["first_token_s"] for result in own)
        computed = [result["compute"] for result in own if result["compute"] is not None]
        difference = means[:, place] - means[:, names.index(BASE)]
        found["methods"][name] = {
            "score": float(scores[:, place].mean()),
            "score_95": interval(means[:, place]),
            "minus_full": float((scores[:, place] - scores[:, names.index(BASE)]).mean()),
            "minus_full_95": interval(difference),
            "first_token_ms": 1e3 * first_token_s,
            "speedup": base_s / first_token_s,
            "compute": statistics.fmean(computed) if computed else None,
            "stored": own[0]["stored"],
            "missed_chunks": sum(result["missed"] for result in own),
        }
    return found


def rendered(
    summary: Mapping[str, Mapping[str, Any]], metrics: Mapping[str, str], planned: Mapping[str, int]
) -> str:
    """The tables in Markdown: quality against first-token time by method, one table for
    each set.
    """
    lines = list[str]()
    for name, found in summary.items():
        done = found["questions"] + found["skipped"]
        lines += [f"## {name}", ""]
        if done < planned[name]:
            lines += [
                f"**Unfinished**: {done} of {planned[name]} questions. The same command goes on.",
                "",
            ]
        if not found["questions"]:
            lines += [
                f"All {done} questions were skipped: not one chunk fits the model's context.",
                "",
            ]
            continue
        cells = []
        for method, row in found["methods"].items():
            low, high = row["score_95"]
            less, more = row["minus_full_95"]
            compute = "" if row["compute"] is None else f"{row['compute']:.3f}"
            score = f"{row['score']:.3f}"
            times = (f"{row['first_token_ms']:.0f}", f"{row['speedup']:.2f}x")
            minus = (
                "" if method == BASE else f"{row['minus_full']:+.3f} ({less:+.3f} to {more:+.3f})"
            )
            cells.append(
                (method, score, f"{low:.3f} to {high:.3f}", minus, *times, compute, row["stored"])
            )
        lines += [_about(found), "", markdown(("method", metrics[name], *HEADINGS), cells), ""]
    return "\n".join(lines)


def _about(found: Mapping[str, Any]) -> str:
    said = [
        f"{found['questions']} questions.",
        f"Medians of a prompt: {found['chunks']:.0f} chunks, {found['prompt_tokens']:.0f} tokens.",
    ]
    if found["cut"]:
        said.append(
            f"In {found['cut']} prompts fewer chunks than asked for fit the model's context."
        )
    if found["skipped"]:
        said.append(
            f"{found['skipped']} questions were skipped: not one chunk fits the model's context."
        )
    if missed := sum(row["missed_chunks"] for row in found["methods"].values()):
        said.append(
            f"**{missed} chunks were not in the store when they were asked for: give more "
            "--memory-gib.**"
        )
    return " ".join(said)
