"""Quality and first token on a real language model, against its own full prefill: the judge of
every default.

    # SmolLM2, the dev questions of XQuAD
    python -m benchmarks.real --data FOLDER
    # another model, two sets, test questions
    python -m benchmarks.real --data FOLDER --model gemma3 --sets xquad long --half test \\
        --questions 200
    # two selectors over KV that is stored in two ways
    python -m benchmarks.real --data FOLDER --selectors hkvd attention --ratios .05 .15 \\
        --forms alone:fusion.stored_kv=alone expected:fusion.stored_kv=expected
    # the set as documents and questions for `ragkv ingest` and `ragkv gate`
    python -m benchmarks.real --data FOLDER --sets needles --half test --export OUT

MODEL is a folder, a GGUF file, a hub id, or `smollm2`, `gemma3` or `qwen2.5-coder` (1.5B), whose
packages are found if they are installed. FOLDER has the sets as published (`real_sets.py`). For
each question the full prefill decodes its first tokens; every method then predicts the same tokens
from its own KV. "gap closed" is the share that a method closes of the KL of full reuse with the
first form; "likelihood retained" is the gold answer's, between that without passages (0) and with
all computed (1). F1 is to the gold answers, and to that of full recompute. Intervals are 95 %
bootstraps over questions, paired with the method of reference. Constants are chosen on dev
questions alone. Rows are appended to `--out` question by question, and the same command goes on
where a killed run stopped.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report, sets
from benchmarks.real_judge import (
    SETTINGS,
    Form,
    Judge,
    Method,
    config_of,
    located,
    methods,
    settings_of,
)
from benchmarks.real_sets import SETS, Asked, questions
from benchmarks.rows import Row, Rows, draws, interval, markdown
from examples.metrics import token_f1
from ragkv import Engine, registry
from ragkv.errors import InputError, PromptTooLongError, RagKVError
from ragkv.fusion.plan import MOST_ASKING_ROWS
from ragkv.fusion.selectors import ASKED
from ragkv.runtime.rates import Rate

SELECTORS = tuple(registry.SELECTORS)
# rows of other values are of other runs
LABEL = ("model", "half", "settings", "asked", "f1_tokens", "tag")
# Every share in the table is of these: they are always measured.
BASELINES = ("full", "none", "reuse")
# KV as the papers store it, on which their methods stand, and ours.
FORMS = [
    "alone:fusion.stored_kv=alone,store.codec=raw",
    "expected:fusion.stored_kv=expected,store.codec=int8",
]
NO_DATA = (
    "no --data was given and no question sets were found: `python -m benchmarks.sets` names them and "
    "says where they are looked for."
)


def main() -> None:
    options = _options()
    if options.data is None:
        report.skip(NO_DATA)
    torch.set_num_threads(options.threads)
    try:
        print("\n" + (exported(options) if options.export else run(options)))
    except (RagKVError, KeyboardInterrupt) as error:
        sys.exit(str(error) or "Interrupted: the same command goes on.")


def exported(options: argparse.Namespace) -> str:
    """Write each set as documents and questions, for `ragkv ingest` and `ragkv gate`; returns how
    many.
    """
    written = []
    for name in options.sets:
        asked = questions(name, options.data, options.half, options.questions)
        passages = list(dict.fromkeys(text for one in asked for text in one.passages))
        documents = options.export / name / "documents"
        documents.mkdir(parents=True, exist_ok=True)
        for number, text in enumerate(passages):
            (documents / f"{number}.txt").write_text(text, encoding="utf-8")
        lines = [json.dumps({"question": one.question}) + "\n" for one in asked]
        (documents.parent / "questions.jsonl").write_text("".join(lines), encoding="utf-8")
        written.append(f"{documents.parent}: {len(passages)} documents, {len(asked)} questions")
    return "\n".join(written)


def run(options: argparse.Namespace) -> str:
    """Ask what no earlier run asked; returns the table. Raises `RagKVError`."""
    forms = [Form.of(text) for text in options.forms]
    compared = methods(
        options.selectors, options.ratios, forms, options.asking_rows, options.asked_layers
    )
    if options.leave_out:
        compared = [
            one
            for one in compared
            if one.name in BASELINES or not options.leave_out.search(one.name)
        ]
    names = [method.name for method in compared]
    if options.against and options.against not in names:
        raise InputError(f"{options.against!r} is not among the methods: {', '.join(names)}.")
    asked = {
        name: questions(name, options.data, options.half, options.questions)
        for name in options.sets
    }
    settings = {**SETTINGS, **settings_of(options.settings)}
    rows = Rows(options.out, fresh=options.fresh)
    tables = []
    with Engine.from_pretrained(located(options.model), config_of(settings)) as base:
        for name in options.sets:
            with Judge(base, settings, compared, options.asked, options.f1_tokens) as judge:
                found = _asked(judge, name, asked[name], compared, rows, options)
            tables += [[name, *line] for line in summarized(found, names, options.against)]
    headings = (
        "set",
        "method",
        "KL",
        "gap closed",
        "agreement",
        "likelihood retained",
        "F1, to full's",
        "compute",
    )
    ahead = ("closes more", "retains more") if options.against else ()
    about = (
        f"{options.model}, {options.half} questions, {report.machine()['cpu']}, "
        f"{options.threads} threads"
    )
    table = f"{about}\n\n{markdown((*headings, 'first token, ms', 'ingest, s', *ahead), tables)}\n"
    options.out.with_suffix(".md").write_text(table, encoding="utf-8")
    return table


def _asked(
    judge: Judge,
    name: str,
    asked: Sequence[Asked],
    compared: Sequence[Method],
    rows: Rows,
    options: argparse.Namespace,
) -> list[Row]:
    """The rows of one set: those of earlier runs, and what was missing."""
    label = {key: getattr(options, key) for key in LABEL} | {"set": name}
    marks = {method.name: {**label, "form": dict(method.form.settings)} for method in compared}
    known = {
        (row["question"], row["method"]): row
        for row in rows.all
        if row["method"] in marks
        and all(row.get(key) == value for key, value in marks[row["method"]].items())
    }
    rate = Rate()
    is_primed = False
    fitting = list[Asked]()
    for number, one in enumerate(asked, 1):
        missing = [m for m in compared if (one.key, m.name) not in known]
        if missing:
            if not is_primed:
                judge.prime(questions(name, options.data, "dev", 1)[0])
                is_primed = True
            needed = missing if missing[0].name == "full" else [compared[0], *missing]
            names = {method.name for method in missing}
            try:
                found = [
                    {**marks[row["method"]], **row}
                    for row in judge.ask(one, needed)
                    if row["method"] in names
                ]
            except PromptTooLongError as error:
                _tell(
                    f"{name} {number}/{len(asked)} is left out: {error}",
                    options.out.with_suffix(".log"),
                )
                continue
            rows.add(found)
            known |= {(row["question"], row["method"]): row for row in found}
        fitting.append(one)
        rate.update(number, len(asked))
        _tell(f"{name} {number}/{len(asked)}{rate.left}", options.out.with_suffix(".log"))
    if not fitting:
        raise InputError(f"No prompt of the set {name} fits the model's context.")
    return [known[one.key, method.name] for one in fitting for method in compared]


def _tell(line: str, log: Path) -> None:
    print(line, file=sys.stderr, flush=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def summarized(rows: Sequence[Row], names: Sequence[str], against: str = "") -> list[list[str]]:
    """A line for each method, in order: means over the questions, each of which has a row of every
    method.

    With `against`, the name of a method, also how much more of the gap each closes, and of the
    likelihood retains.
    """
    by = {name: [row for row in rows if row["method"] == name] for name in names}
    drawn = draws(len(by["full"]))

    def values(name: str, field: str) -> np.ndarray:
        return np.array([row[field] for row in by[name]])

    def closed(name: str, base: str) -> str:
        return _share(drawn, values(base, "kl") - values(name, "kl"), values("reuse", "kl"))

    def retained(name: str, base: str) -> str:
        whole = values("full", "gold") - values("none", "gold")
        return _share(drawn, values(name, "gold") - values(base, "gold"), whole)

    def f1(name: str) -> str:
        same = [
            token_f1(one["answer"], full["answer"])
            for one, full in zip(by[name], by["full"], strict=True)
        ]
        return f"{values(name, 'f1').mean():.3f}, {statistics.fmean(same):.2f}"

    return [
        [
            name,
            f"{values(name, 'kl').mean():.4f}",
            closed(name, "reuse"),
            f"{values(name, 'agreement').mean():.3f}",
            retained(name, "none"),
            f1(name) if all("f1" in row for row in by[name]) else "",
            f"{values(name, 'compute').mean():.3f}",
            f"{1e3 * statistics.median(values(name, 'first_token_s')):.0f}",
            f"{values(name, 'ingest_s').mean():.2f}",
            *([closed(name, against), retained(name, against)] if against else []),
        ]
        for name in names
    ]


def _share(drawn: np.ndarray, part: np.ndarray, whole: np.ndarray) -> str:
    """The share of a sum in another, with its interval."""
    total = whole.sum()
    if not total:
        return "nothing to close"
    low, high = interval((drawn @ part) / (drawn @ whole))
    return f"{part.sum() / total:.2f} [{low:.2f}, {high:.2f}]"


def _window(text: str) -> tuple[float, float]:
    start, stop = map(float, text.split("-"))
    return start, stop


def _options(arguments: Sequence[str] | None = None) -> Any:
    parser = sets.parser(__doc__, "real", 30, "set")
    parser.add_argument("--sets", nargs="+", choices=[*SETS], default=["xquad"])
    parser.add_argument("--half", choices=["dev", "test"], default="dev")
    parser.add_argument("--selectors", nargs="*", default=list(SELECTORS), choices=SELECTORS)
    parser.add_argument(
        "--ratios",
        nargs="*",
        type=float,
        default=[0.05, 0.15, 0.3],
        help="0 is full reuse, always in",
    )
    parser.add_argument(
        "--forms", nargs="+", default=FORMS, help="how KV is stored: NAME:SETTING=VALUE,..."
    )
    parser.add_argument(
        "--asking-rows",
        nargs="+",
        type=int,
        default=[MOST_ASKING_ROWS],
        help="of a question, at most",
    )
    parser.add_argument(
        "--asked-layers",
        nargs="+",
        type=_window,
        default=[ASKED],
        help="where in the model's depth `attention` asks, such as .5-1",
    )
    parser.add_argument(
        "--export",
        type=Path,
        help="only write the sets there, as documents and a file of questions",
    )
    parser.add_argument(
        "--leave-out", type=re.compile, help="a pattern: methods with such names are not measured"
    )
    parser.add_argument(
        "--against", default="", help="also how far each is ahead of this method: 'first-k 0.15'"
    )
    parser.add_argument(
        "--settings", nargs="*", default=[], help="of the engine, for all: SETTING=VALUE ..."
    )
    parser.add_argument("--asked", default="", help="the question's form, with {question} in it")
    parser.add_argument(
        "--answer-tokens", dest="f1_tokens", type=int, default=0, help="decode answers for their F1"
    )
    parser.add_argument(
        "--tag", default="", help="told apart from rows with another tag, such as a version"
    )
    return sets.parsed(parser, arguments)


if __name__ == "__main__":
    main()
