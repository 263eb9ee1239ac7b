"""The results file that an interrupted run goes on from, and the report of the paper's figures 12 and 13."""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragkv.errors import InputError

BASE = "full recompute"
RESAMPLES = 2000
Row = dict[str, Any]  # a question's: "set", "number", and "methods": the result of each method by its name


class Results:
    """One JSON line for each question, behind a line with the settings. A killed run loses the question under way."""

    def __init__(self, path: Path, settings: Mapping[str, Any], fresh: bool = False) -> None:
        """Opens or begins the file. Raises `InputError` if it was written with other settings."""
        self.path, self.rows = path, list[Row]()
        written = b"" if fresh or not path.exists() else path.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]  # a kill may have torn the last line
        if not whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(json.dumps(settings).encode() + b"\n")
            return
        first, *lines = whole.splitlines()
        self._check(json.loads(first), json.loads(json.dumps(settings)))
        self.rows = [json.loads(line) for line in lines]
        os.truncate(path, len(whole))

    def _check(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = [name for name in now if then.get(name) != now[name]]
        if changed:
            told = "; ".join(f"{name} was {json.dumps(then.get(name))}, is {json.dumps(now[name])}" for name in changed)
            raise InputError(f"{self.path} is from a run with other settings ({told}). Give another --out, or --fresh.")

    def add(self, row: Row) -> None:
        """Append a question's results."""
        self.rows.append(row)
        with self.path.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")

    def has(self, name: str, number: int) -> bool:
        """Whether the question of a set is there."""
        return any(row["set"] == name and row["number"] == number for row in self.rows)

    def summary(self) -> dict[str, dict[str, Any]]:
        """What `summarized` says of each set, in order."""
        sets = dict.fromkeys(row["set"] for row in self.rows)
        return {name: summarized([row for row in self.rows if row["set"] == name]) for name in sets}


def summarized(rows: Sequence[Row]) -> dict[str, Any]:
    """By method: mean score, its 95 % interval, that of the paired difference to a full recompute, medians of times.

    Intervals are bootstraps over questions. Skipped questions are counted apart.
    """
    asked = [row for row in rows if "methods" in row]
    found: dict[str, Any] = {"questions": len(asked), "skipped": len(rows) - len(asked), "methods": {}}
    found["cut"] = sum(bool(row["cut"]) for row in asked)
    if not asked:
        return found
    found |= {name: statistics.median(row[name] for row in asked) for name in ("chunks", "prompt_tokens")}
    names = list(asked[0]["methods"])
    scores = np.array([[row["methods"][name]["score"] for name in names] for row in asked])  # (questions, methods)
    draws = np.random.default_rng(0).multinomial(len(asked), np.full(len(asked), 1 / len(asked)), RESAMPLES)
    means = draws @ scores / len(asked)  # (resamples, methods)
    base_s = statistics.median(row["methods"][BASE]["first_token_s"] for row in asked)
    for place, name in enumerate(names):
        own = [row["methods"][name] for row in asked]
        first_token_s = statistics.median(result["first_token_s"] for result in own)
        computed = [result["compute"] for result in own if result["compute"] is not None]
        difference = means[:, place] - means[:, names.index(BASE)]
        found["methods"][name] = {
            "score": float(scores[:, place].mean()),
            "score_95": _interval(means[:, place]),
            "minus_full": float((scores[:, place] - scores[:, names.index(BASE)]).mean()),
            "minus_full_95": _interval(difference),
            "first_token_ms": 1e3 * first_token_s,
            "speedup": base_s / first_token_s,
            "compute": statistics.fmean(computed) if computed else None,
            "missed_chunks": sum(result["missed"] for result in own),
        }
    return found


def _interval(values: Any) -> list[float]:
    return [round(float(value), 4) for value in np.percentile(values, (2.5, 97.5))]


def rendered(summary: Mapping[str, Mapping[str, Any]], metrics: Mapping[str, str], planned: Mapping[str, int]) -> str:
    """The tables in Markdown: quality against first-token time by method, one table for each set."""
    lines = list[str]()
    for name, found in summary.items():
        done = found["questions"] + found["skipped"]
        lines += [f"## {name}", ""]
        if done < planned[name]:
            lines += [f"**Unfinished**: {done} of {planned[name]} questions. The same command goes on.", ""]
        if not found["questions"]:
            lines += [f"All {done} questions were skipped: not one chunk fits the model's context.", ""]
            continue
        lines += [_about(found), ""]
        lines += [
            f"| method | {metrics[name]} | 95 % | minus full recompute, 95 % | first token, ms | sooner | compute |"
        ]
        lines += ["|---|---|---|---|---|---|---|"]
        for method, row in found["methods"].items():
            low, high = row["score_95"]
            less, more = row["minus_full_95"]
            compute = "" if row["compute"] is None else f"{row['compute']:.3f}"
            cells = (
                method,
                f"{row['score']:.3f}",
                f"{low:.3f} to {high:.3f}",
                "" if method == BASE else f"{row['minus_full']:+.3f} ({less:+.3f} to {more:+.3f})",
                f"{row['first_token_ms']:.0f}",
                f"{row['speedup']:.2f}x",
                compute,
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _about(found: Mapping[str, Any]) -> str:
    said = [
        f"{found['questions']} questions.",
        f"Medians of a prompt: {found['chunks']:.0f} chunks, {found['prompt_tokens']:.0f} tokens.",
    ]
    if found["cut"]:
        said.append(f"In {found['cut']} prompts fewer chunks than asked for fit the model's context.")
    if found["skipped"]:
        said.append(f"{found['skipped']} questions were skipped: not one chunk fits the model's context.")
    if missed := sum(row["missed_chunks"] for row in found["methods"].values()):
        said.append(f"**{missed} chunks were not in the store when they were asked for: give more --memory-gib.**")
    return " ".join(said)
