"""Shared by all benchmarks: common options, the machine's name, a table, a JSON file, medians of
alternating runs.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch

# The exit status of a benchmark that did not run because something is missing here.
SKIPPED = 75
RESULTS = Path(__file__).parent / "results"
GIB = 1024**3


def parser(
    doc: str | None, quick: str, threads: int | None = None, runs: int | None = None
) -> argparse.ArgumentParser:
    """A parser with `--quick` (`quick` is its help) and, if a default is given, `--threads` and
    `--runs`.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help=quick)
    if threads is not None:
        made.add_argument("--threads", type=int, default=threads, help="of torch")
    if runs is not None:
        made.add_argument("--runs", type=int, default=runs, help="measured runs of each method")
    return made


def skip(reason: str) -> NoReturn:
    """End the command, because what it needs is not here; `python -m benchmarks` repeats why."""
    print(f"skipped: {reason}", file=sys.stderr, flush=True)
    sys.exit(SKIPPED)


def machine() -> dict[str, Any]:
    """The processor, its load and the versions that the numbers were measured with."""
    name = next(
        (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "ragkv": version("ragkv"),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def alternate(
    actions: Mapping[Any, Callable[[], Any]],
    runs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, float]:
    """Median seconds of each action. They alternate, in another order each round; the first round
    is not measured.
    """
    times: dict[Any, list[float]] = {name: [] for name in actions}
    for round_ in range(runs + 1):
        for name in random.Random(round_).sample(list(actions), len(actions)):
            began = clock()
            actions[name]()
            if round_:
                times[name].append(clock() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints rows under headings in aligned columns; floats get three decimals."""
    cells = [[f"{c:.3f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    widths = [
        max(len(str(h)), *(len(r[i]) for r in cells)) if cells else len(str(h))
        for i, h in enumerate(headings)
    ]
    for row in ([str(h) for h in headings], ["-" * w for w in widths], *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def save(name: str, results: Any) -> Path:
    """Writes the results and the machine as JSON; returns the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
    return path
