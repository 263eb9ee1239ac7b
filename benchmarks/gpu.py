"""Everything that needs a GPU, in one command with one report: `make gpu`.

    python -m benchmarks.gpu [--quick] [--out gpu-report.md]

Runs the tests marked `gpu` and the GPU benchmarks, each in a process of its own, and writes what they say to one file
of Markdown, after each step anew, so a crash loses nothing. Shapes follow from the device's memory. This project is
developed without a GPU: please send the file back, also if everything passed.
"""

import argparse
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import report

GIB = 1024**3
LEAST_GIB = {"llama-3-8b": 24, "llama-3.2-1b": 6}  # of device memory: bfloat16 weights, and as much for prompts
KCACHE_GIB = 24  # the benchmark's shape has 13 GiB of weights
SHOWN_LINES = 400  # of a step's output; the last ones
NO_GPU = (
    "No CUDA device here, so there is nothing to run: `make gpu` needs an NVIDIA GPU and a build of torch for CUDA "
    "(see docs/gpu.md)."
)


@dataclass(frozen=True, slots=True)
class Step:
    """One process of the run."""

    title: str
    arguments: tuple[str, ...]  # of the Python interpreter
    limit_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step."""

    step: Step
    failure: str  # why it failed; empty if it passed
    seconds: float
    output: str


def main() -> None:
    options = _options()
    if not torch.cuda.is_available():
        print(NO_GPU)
        return
    memory_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    todo, outcomes = steps(memory_gib, options.quick), list[Outcome]()
    for number, step in enumerate(todo, 1):
        print(f"\n{number} of {len(todo)}: {step.title} (at most {step.limit_s / 60:.0f} minutes)", flush=True)
        outcomes.append(run(step))
        options.out.write_text(render(machine_lines(), outcomes, len(todo)), encoding="utf-8")
    failed = [outcome.step.title for outcome in outcomes if outcome.failure]
    print(f"\nwritten: {options.out};", f"failed: {', '.join(failed)}" if failed else "everything passed")
    sys.exit(1 if failed else 0)


def steps(memory_gib: float, quick: bool) -> list[Step]:
    """What runs on a device with that much memory."""
    shape = next((name for name, least in LEAST_GIB.items() if memory_gib >= least), "tiny")
    ttft = ("-m", "benchmarks.ttft", "--device", "cuda", *(("--quick",) if quick else ("--shapes", shape)))
    lengths = ("--lengths", "6", "32") if shape == "llama-3-8b" and memory_gib >= 2 * LEAST_GIB[shape] else ()
    todo = [
        Step("tests marked gpu", ("-m", "pytest", "-m", "gpu", "-rfEs", "-p", "no:cacheprovider", "-v"), 1200),
        Step("what doctor finds", ("-m", "ragkv", "doctor"), 600),
        Step("time to first token", (*ttft, *(() if quick else lengths), "--peak"), 3600),
        Step("peak memory of a prefill", (*ttft, *(("--shapes", "tiny") if quick else ()), "--memory"), 1800),
    ]
    if memory_gib >= KCACHE_GIB:
        gib = f"{memory_gib - 4:.0f}"  # what torch and the driver need stays free
        parts = ("--runs", "2") if quick else ()
        kcache = ("-m", "benchmarks.kcache", "--device", "cuda", "--device-gib", gib, *parts)
        todo.append(Step("KCache, the paper's table 3", kcache, 3600))
    return todo


def run(step: Step) -> Outcome:
    """Run a step, print its output as it comes, and keep it."""
    began, lines = time.monotonic(), list[str]()
    command = [sys.executable, *step.arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        limit = threading.Timer(step.limit_s, process.kill)
        limit.start()
        assert process.stdout is not None
        for line in process.stdout:
            print("  " + line, end="", flush=True)
            lines.append(line)
        status = process.wait()
        seconds = time.monotonic() - began
        limit.cancel()
    ended = f"exit status {status}" if status else ""
    failure = f"stopped after {seconds:.0f} s" if seconds >= step.limit_s else ended
    return Outcome(step, failure, seconds, "".join(lines[-SHOWN_LINES:]))


def machine_lines() -> list[str]:
    """Device, driver and versions."""
    about = report.machine()
    index = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    devices = [torch.cuda.get_device_properties(number) for number in index]
    return [
        *(f"{d.name}, {d.total_memory / GIB:.0f} GiB, compute capability {d.major}.{d.minor}" for d in devices),
        f"driver: {_driver()}",
        f"torch {about['torch']} for CUDA {torch.version.cuda}, Python {about['python']}",
        f"processor: {about['cpu']}, {about['cores']} cores",
        f"ragkv: {_said(['git', 'describe', '--always', '--dirty'])}",
    ]


def _driver() -> str:
    return _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def _said(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return f"unknown ({command[0]} does not run)"
    return ", ".join(sorted(set(done.stdout.split("\n")) - {""})) or "unknown"


def render(machine: Sequence[str], outcomes: Sequence[Outcome], planned: int) -> str:
    """The report: the machine, a table of the steps, and the output of each."""
    lines = ["# ragkv on a GPU", "", *(f"- {line}" for line in machine), ""]
    if len(outcomes) < planned:
        lines += [f"Only {len(outcomes)} of {planned} steps have ended.", ""]
    lines += ["| step | result | seconds |", "|---|---|---|"]
    lines += [f"| {o.step.title} | {o.failure or 'passed'} | {o.seconds:.0f} |" for o in outcomes]
    for outcome in outcomes:
        command = shlex.join(("python", *outcome.step.arguments))
        lines += ["", f"## {outcome.step.title}", "", f"`{command}`", "", "```", outcome.output.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="a tiny shape and few runs")
    parser.add_argument("--out", type=Path, default=Path("gpu-report.md"), help="the report")
    return parser.parse_args()


if __name__ == "__main__":
    main()
