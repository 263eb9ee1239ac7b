"""What the defaults rest on: each beside its alternatives, on as many test questions as time
allows.

    python -m benchmarks.defaults --data FOLDER [--quick]
    python -m benchmarks.defaults --data FOLDER --sets six needles --questions 100
    python -m benchmarks.defaults --data FOLDER --studies neutral order --model gemma3

The studies (`default_ways.py`): over which layers the question asks; how much of the first passage
is computed in place; the length of the neutral text that chunks are encoded behind; the length of
chunks; whether the best passage stands first or last; attention weighed at the beginnings of
chunks; a second round of asking (ProphetKV); asking over a slice of each chunk (QCFuse's anchors);
beginnings of chunks recomputed before the question chooses. Every way is compared with the full
prefill of its own prompt: KL over the first tokens of that one's greedy answer, and the gold
answer's log-likelihood a token, which is also given for the full prefill itself. Differences are
paired with the default by question, and their intervals are 95 % bootstraps.

Questions are asked in turn from every set. Rows are appended to `--out` question by question, and
the same command goes on where a killed run stopped; `--tables` only writes what is known. MODEL and
FOLDER are those of `benchmarks.real`.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import report, sets
from benchmarks.default_ways import STUDIES, Asker, Study
from benchmarks.real import NO_DATA
from benchmarks.real_judge import config_of, located
from benchmarks.real_sets import Asked, questions
from benchmarks.rows import Row, Rows, draws, interval, markdown
from ragkv import Engine
from ragkv.errors import PromptTooLongError, RagKVError
from ragkv.runtime.rates import Rate

ALL = "all"  # the questions of all sets
TABLES_EVERY = 10  # questions: what is known is written then
HEADINGS = (
    "set",
    "way",
    "n",
    "KL",
    "KL more than the default's",
    "gold likelihood more than the default's",
    "the same of the full prefill",
    "compute",
)


def main() -> None:
    options = _options()
    if options.data is None and not options.tables:
        report.skip(NO_DATA)
    torch.set_num_threads(options.threads)
    try:
        print("\n" + run(options))
    except (RagKVError, KeyboardInterrupt) as error:
        sys.exit(str(error) or "Interrupted: the same command goes on.")


def run(options: argparse.Namespace) -> str:
    """Ask what no earlier run asked; returns the tables. Raises `RagKVError`."""
    rows = Rows(options.out, fresh=options.fresh)
    if options.tables:
        return tables(rows.all, options)
    settings = {"dtype": options.dtype}
    with (
        Engine.from_pretrained(located(options.model), config_of(settings)) as base,
        Asker(base, options.studies) as asker,
    ):
        label = {"model": options.model, "dtype": base.model.identity.dtype, "half": options.half}
        todo = list(_todo(options))
        rate = Rate()
        ends = time.monotonic() + options.seconds
        for number, (name, asked) in enumerate(todo, 1):
            _ask(asker, rows, {**label, "set": name}, asked)
            rate.update(number, len(todo))
            print(f"{number}/{len(todo)}, {name}{rate.left}", file=sys.stderr, flush=True)
            if number % TABLES_EVERY == 0:
                tables(rows.all, options)
            if time.monotonic() > ends:
                break
    return tables(rows.all, options)


def _todo(options: argparse.Namespace) -> Iterator[tuple[str, Asked]]:
    """The first question of every set, then the second ones: a run that ends early has asked
    equally many of each.
    """
    by_set = {
        name: questions(name, options.data, options.half, options.questions)
        for name in options.sets
    }
    for number in range(options.skip, max(map(len, by_set.values()))):
        yield from ((name, asked[number]) for name, asked in by_set.items() if number < len(asked))


def _ask(asker: Asker, rows: Rows, label: Mapping[str, Any], asked: Asked) -> None:
    """Ask a question in the ways in which no earlier run asked it."""
    known = {
        row["way"]
        for row in rows.all
        if row["question"] == asked.key and all(row[key] == label[key] for key in label)
    }
    try:
        found = list(asker.ask(asked, known))
    except PromptTooLongError as error:
        print(f"{asked.key} is left out: {error}", file=sys.stderr)
        return
    rows.add([{**label, "question": asked.key, **row} for row in found])


def tables(rows: Sequence[Row], options: argparse.Namespace) -> str:
    """Write the table of every study beside `--out`, as Markdown and JSON; returns them."""
    own = [row for row in rows if (row["model"], row["half"]) == (options.model, options.half)]
    dtypes = ", ".join(sorted({row["dtype"] for row in own}))
    cpu = report.machine()["cpu"]
    parts = [f"{options.model}, {dtypes}, {options.half} questions, {cpu}"]
    found = {}
    for name in options.studies:
        study = STUDIES[name]
        lines = list(summarized(own, study))
        found[name] = {"default": study.default, "rows": lines}
        parts.append(f"**{study.title}** (default: {study.default})")
        parts.append(markdown(HEADINGS, [[*map(_cell, line.values())] for line in lines]))
    text = "\n\n".join(parts) + "\n"
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    results = json.dumps({"about": parts[0], "studies": found}, indent=2)
    options.out.with_suffix(".json").write_text(results + "\n", encoding="utf-8")
    return text


def summarized(rows: Sequence[Row], study: Study) -> Iterator[Row]:
    """A line for each set and way of a study, over the questions asked in all its ways."""
    ways = [way.name for way in study.ways]
    by = {(row["set"], row["question"], row["way"]): row for row in rows}
    asked = dict.fromkeys(key[:2] for key in by)
    whole = [key for key in asked if all((*key, way) in by for way in ways)]
    sets = list(dict.fromkeys(name for name, _ in whole))
    for name in (*sets, ALL) if len(sets) > 1 else sets:
        keys = [key for key in whole if name in (key[0], ALL)]
        for way in ways:
            own = [by[*key, way] for key in keys]
            default = [by[*key, study.default] for key in keys]
            yield {
                "set": name,
                "way": way,
                "n": len(keys),
                "kl": float(np.mean([row["kl"] for row in own])),
                "more_kl": _more(own, default, "kl"),
                "more_gold": _more(own, default, "gold"),
                "more_full_gold": _more(own, default, "full_gold"),
                "compute": float(np.mean([row["compute"] for row in own])),
            }


def _more(own: Sequence[Row], default: Sequence[Row], field: str) -> list[float]:
    """The mean difference, and the ends of its interval."""
    values = np.array([row[field] for row in own]) - np.array([row[field] for row in default])
    return [float(values.mean()), *interval(draws(len(values)) @ values)]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        mean, low, high = value
        return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]" if any(value) else "0"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = sets.parser(__doc__, "defaults", 100, "set")
    parser.add_argument("--sets", nargs="+", default=["six"])
    parser.add_argument("--half", choices=["dev", "test"], default="test")
    parser.add_argument("--skip", type=int, default=0, help="so many of each set's first questions")
    parser.add_argument("--studies", nargs="+", choices=[*STUDIES], default=[*STUDIES])
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="end after the question under way then"
    )
    parser.add_argument("--dtype", default="auto", help="of the model and its KV")
    parser.add_argument("--tables", action="store_true", help="only write what is known")
    return sets.parsed(parser, arguments)


if __name__ == "__main__":
    main()
