"""`python -m benchmarks [--quick]`: every benchmark, one after the other, then what came of each.

A benchmark whose data or servers are not here is skipped and says why. At the end stands what
became of every row of docs/papers.md, and the exit status is 1 if a benchmark failed, or if a row
has neither a result nor a reason (`papers_rows.py`).
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.papers_rows import PAGE, Outcome, rows_of, told
from benchmarks.report import SKIPPED

HERE = Path(__file__).parent
# `simulate` is a package; the others are the files with a command.
PACKAGES = ("simulate",)
TOOLS = {"__main__", "sets", "llama_cpp_forms"}  # commands that measure nothing
# What a benchmark is given that does not look for it itself.
GIVEN = {
    "simulate": ["--trace", "sharegpt-like", "--capacity-share", "0.3", "--xi", "200ms"],
}


@dataclass(frozen=True)
class Run:
    """One benchmark's end."""

    name: str
    outcome: Outcome
    seconds: float
    reason: str = ""  # why it was skipped, or how it failed


def names() -> list[str]:
    """All benchmarks."""
    files = (
        path.stem for path in HERE.glob("*.py") if "def main(" in path.read_text(encoding="utf-8")
    )
    return sorted({*files, *PACKAGES} - TOOLS)


def run(name: str, arguments: Sequence[str]) -> Run:
    """Run one benchmark in a process of its own; it prints as it goes."""
    print(f"\n== {name}", flush=True)
    given = GIVEN.get(name, [])
    own = [word for word in arguments if name not in PACKAGES]
    began = time.monotonic()
    said = ""
    command = [sys.executable, "-m", f"benchmarks.{name}", *given, *own]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            said = line.strip() or said
    took_s = time.monotonic() - began
    if process.returncode == 0:
        return Run(name, Outcome.RAN, took_s)
    if process.returncode == SKIPPED:
        return Run(name, Outcome.SKIPPED, took_s, said.removeprefix("skipped: "))
    return Run(name, Outcome.FAILED, took_s, said or f"exit status {process.returncode}")


def summary(runs: Sequence[Run]) -> Iterator[str]:
    """The last lines."""
    for outcome in Outcome:
        for one in (one for one in runs if one.outcome is outcome):
            why = f": {one.reason}" if one.reason else ""
            yield f"{outcome.value:8} {one.name}, {one.seconds:.0f} s{why}"


def main() -> int:
    """Run, tell, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the quick form of each")
    parser.add_argument("--only", nargs="+", choices=names(), help="only these")
    options = parser.parse_args()
    arguments = ["--quick"] if options.quick else []
    runs = [run(name, arguments) for name in options.only or names()]
    print("\n== what became of them")
    print("\n".join(summary(runs)))
    outcomes = {one.name: (one.outcome, one.reason) for one in runs}
    others = {name: (Outcome.SKIPPED, "not asked for") for name in names() if name not in outcomes}
    rows = list(told(rows_of(PAGE.read_text(encoding="utf-8")), {**others, **outcomes}))
    without = [row for row in rows if not row.is_told]
    print(f"\n== {PAGE.name}: {len(rows)} rows, {len(without)} with neither result nor reason")
    print("\n".join(row.line for row in rows))
    failed = [one for one in runs if one.outcome is Outcome.FAILED]
    return 1 if failed or without else 0


if __name__ == "__main__":
    assert importlib.util.find_spec("ragkv") is not None, "the package is not installed here"
    sys.exit(main())
