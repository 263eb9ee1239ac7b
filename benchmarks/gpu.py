"""What a GPU gains: warm first token against full prefills, in ten minutes of a machine.

    make gpu                                     tests marked gpu, then this
    python -m benchmarks.gpu --minutes 8         continues where the last run ended
    python -m benchmarks.gpu --device cpu --shapes tiny --tokens 64 --lengths 2 3

Models have real shapes and random weights, entries random numbers: neither changes a time. Chunks
have 512 tokens, the question 32. A case is a shape, a number of chunks, a codec and a tier; the
smallest come first, int8 from memory before all others. Each case is written to the file when it is
done, and a run leaves out what the file has, so a run that ends early loses one case at most. The
file also has a profile: for each shape, what a layer launches and how long host and device take.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.random_model import SHAPES
from benchmarks.ttft_world import OUR_FULL, TRANSFORMERS_FULL, Method, World, model_of
from ragkv.model.layer_views import use_graphs

SIZES = ("qwen2.5-1.5b", "llama-3.2-3b", "llama-3-8b")  # in this order
LENGTHS = (8, 16, 32, 64)  # chunks
STORED = (("int8", "memory"), ("int8", "disk"), ("raw", "memory"), ("raw", "disk"))
METHODS = (
    Method("first-k", 0.0),
    Method("first-k", 0.05),
    Method("first-k", 0.15),
    Method("attention", 0.05),
    Method("attention", 0.15),
)
PROFILED = METHODS[-1]
# Times sooner than our full recompute, by tier; from so many tokens on, by shape.
AIMS = {"memory": 2.5, "disk": 2.0}
AIMED_TOKENS = {"llama-3-8b": 8192, "qwen2.5-1.5b": 16384}
TOP = 15  # operations of a profile


@dataclass(frozen=True)
class Case:
    """What is measured together."""

    shape: str
    chunks: int
    tokens: int  # of a chunk
    codec: str
    tier: str

    @property
    def name(self) -> str:
        """Its name in the file."""
        return f"{self.shape} {self.chunks}x{self.tokens} {self.codec} {self.tier}"


def label(method: Method) -> str:
    """Its name in the file."""
    return f"{method.name} {method.ratio:g}" if method in METHODS[1:] else method.name


class Results:
    """The file of results. What it has is not measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {"machine": {}, "cases": {}, "profiles": {}}
        if path.exists():
            self.found = json.loads(path.read_text())

    def add(self, kind: str, name: str, value: Any) -> None:
        """Keep `value`, and write the file."""
        self.found[kind][name] = value
        self.found["machine"] = report.machine()
        self.path.parent.mkdir(exist_ok=True, parents=True)
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps(self.found, indent=2) + "\n")
        written.replace(self.path)


def cases(options: argparse.Namespace) -> list[Case]:
    """All cases, in the order in which they are measured."""
    return [
        Case(shape, chunks, options.tokens, codec, tier)
        for codec, tier in STORED
        for shape in options.shapes
        for chunks in options.lengths
    ]


def run(options: argparse.Namespace, clock: Callable[[], float] = time.monotonic) -> list[Case]:
    """Measure until all is done or the time is over; what is left."""
    until = clock() + 60 * options.minutes
    results = Results(options.out)
    todo = [case for case in cases(options) if case.name not in results.found["cases"]]
    done = 0
    for shape, of_shape in groupby(todo, lambda case: case.shape):
        if clock() > until:
            break
        longest = options.tokens * max(options.lengths) + 64
        model = model_of(shape, options.device, longest)
        for case in of_shape:
            if clock() > until:
                break
            _case(model, case, options, results)
            done += 1
        del model
    return todo[done:]


def _case(model: Any, case: Case, options: argparse.Namespace, results: Results) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        World(
            model, case.chunks, case.tokens, case.tier, folder, codec=case.codec, alike=True
        ) as world,
    ):
        actions = {
            label(method): world.action(method)
            for method in (Method(TRANSFORMERS_FULL), Method(OUR_FULL), *METHODS)
        }
        eager = world.action(PROFILED)
        with _without_graphs(world) as has_graphs:
            if has_graphs:
                actions[f"{label(PROFILED)}, no graphs"] = _in(_without_graphs, world, eager)
        seconds = report.alternate(actions, options.runs)
        results.add("cases", case.name, {**asdict(case), "seconds": seconds})
        print(_line(case, seconds), flush=True)
        if case.shape not in results.found["profiles"] and case.chunks >= options.profiled:
            results.add("profiles", case.shape, profile(world.action(PROFILED), world.layers))


def _in(context: Any, world: World, action: Callable[[], Any]) -> Callable[[], Any]:
    def inside() -> Any:
        with context(world):
            return action()

    return inside


@contextmanager
def _without_graphs(world: World) -> Iterator[bool]:
    """Layers part by part meanwhile; whether they are graphs otherwise."""
    plain = world.engine.model.adapter._plain or []
    graphs = plain[0].graphs if plain else None
    use_graphs(plain, None)
    try:
        yield graphs is not None
    finally:
        use_graphs(plain, graphs)


def profile(action: Callable[[], Any], layers: int) -> dict[str, Any]:
    """What `action` launches in a layer of each of its two passes, and the longest operations."""
    action()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiled:
        action()
    events = profiled.key_averages()
    each = 2 * layers
    called = {event.key: event.count for event in events}
    device = sorted(events, key=lambda event: -event.self_device_time_total)
    host = sorted(events, key=lambda event: -event.self_cpu_time_total)
    return {
        "launches": sum(n for key, n in called.items() if "Launch" in key) / each,
        "waits": sum(n for key, n in called.items() if "Synchronize" in key),
        "host_us": sum(event.self_cpu_time_total for event in events) / each,
        "device_us": sum(event.self_device_time_total for event in events) / each,
        "by_device": [
            (event.key, event.count / each, event.self_device_time_total / each)
            for event in device[:TOP]
        ],
        "by_host": [
            (event.key, event.count / each, event.self_cpu_time_total / each)
            for event in host[:TOP]
        ],
    }


def _line(case: Case, seconds: dict[str, float]) -> str:
    full = seconds[OUR_FULL]
    times = ", ".join(f"{name} {1e3 * s:.0f} ms ({full / s:.2f}x)" for name, s in seconds.items())
    return f"{case.name}: {times}"


def show(found: dict[str, Any]) -> None:
    """The table of times sooner than our full recompute, crossovers, and the aims."""
    names = [label(method) for method in METHODS]
    rows = []
    crossed: dict[str, int] = {}  # by shape, of the first codec and tier
    aims = []
    for case in found["cases"].values():
        seconds = case["seconds"]
        full = seconds[OUR_FULL]
        length = case["chunks"] * case["tokens"]
        gain = full / seconds[label(PROFILED)]
        if gain > 1 and (case["codec"], case["tier"]) == STORED[0]:
            crossed[case["shape"]] = min(length, crossed.get(case["shape"], length))
        if length >= AIMED_TOKENS.get(case["shape"], length + 1):
            aim = AIMS[case["tier"]]
            aims.append(
                f"{case['shape']}, {length} tokens, {case['codec']}, {case['tier']}: {gain:.2f} "
                f"times sooner, aim {aim}: {'reached' if gain >= aim else 'missed'}"
            )
        rows.append(
            [
                case["shape"],
                length,
                case["codec"],
                case["tier"],
                f"{1e3 * seconds[TRANSFORMERS_FULL]:.0f}",
                f"{1e3 * full:.0f}",
                *(f"{1e3 * seconds[name]:.0f} ({full / seconds[name]:.2f}x)" for name in names),
            ]
        )
    report.table(["shape", "tokens", "codec", "tier", "transformers ms", "full ms", *names], rows)
    for shape in sorted({case["shape"] for case in found["cases"].values()}):
        length = crossed.get(shape)
        print(
            f"{shape}: {label(PROFILED)} is sooner than full recompute "
            + ("at no length measured" if length is None else f"from {length} tokens on")
        )
    print(*aims, sep="\n")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line."""
    parser = report.parser(__doc__, quick="one shape and length")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "gpu.json")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no case after these")
    parser.add_argument("--shapes", nargs="+", default=list(SIZES), choices=sorted(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), help="chunks")
    parser.add_argument("--tokens", type=int, default=512, help="of a chunk")
    parser.add_argument("--runs", type=int, default=3, help="of each method; one more warms up")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument(
        "--profiled", type=int, default=16, help="chunks of the prompt that is profiled, at least"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.shapes = options.shapes[:1]
        options.lengths = options.lengths[:1]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print what was found so far."""
    options = options_of(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        report.skip("there is no CUDA device here: see docs/research/gpu.md, or give --device cpu.")
    left = run(options)
    found = Results(options.out).found
    show(found)
    print(f"{len(found['cases'])} cases in {options.out}")
    if left:
        print(f"{len(left)} cases are left, from {left[0].name} on: run it again.")


if __name__ == "__main__":
    main()
