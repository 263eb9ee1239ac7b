"""`ragkv doctor`: what this machine, the packages and a home are like, and what to change."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import output
from .options import HOME, AsJson, Device, Dtype, EngineOptions, Home, Model, Settings, Weights
from .output import console, print_json

if TYPE_CHECKING:
    from .examination import Examination, HomeHealth, Machine


def doctor(
    home: Home = HOME,
    model: Model = "reader",
    config: Settings = None,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    as_json: AsJson = False,
) -> None:
    """Examine this machine, the packages and a home; say what to change, the largest gain first."""
    from ragkv.model.loading import quiet_transformers

    from .examination import examine

    quiet_transformers()
    with output.quiet("ragkv.retrieval"), output.working("examining"):
        options = EngineOptions(home, model, config, device, dtype, weights=weights)
        found = examine(home, model, options.config())
    if as_json:
        print_json(found)
        return
    for line in _lines(found):
        console.print(line)


def _lines(found: "Examination") -> Iterator[str]:
    yield from _machine_lines(found.machine)
    yield f"dtype of {found.model}: {found.dtype_why}"
    yield from _home_lines(found.home)
    for package in found.packages:
        versions = ", ".join(f"{name} {version}" for name, version in package.versions.items())
        state = f"missing ({', '.join(package.missing)})" if package.missing else versions or "found"
        yield f"  {package.extra:<10} {package.purpose}: {state}"
    yield ""
    if not found.advice:
        yield "Nothing to change."
    for number, advice in enumerate(found.advice, 1):
        yield f"{number}. {advice.text}"


def _machine_lines(machine: "Machine") -> Iterator[str]:
    features = ", ".join(machine.features) or "none that matter"
    yield f"processor: {machine.cpu}; {features}; {machine.threads} threads on {machine.cores} cores"
    products = f"float32 {_gflops(machine.float32_flops)}, bfloat16 {_gflops(machine.bfloat16_flops)}"
    yield f"products of one thread: {products}"
    yield f"GPU: {', '.join(machine.gpus) or 'none'}"
    if machine.memory_bytes is not None and machine.available_bytes is not None:
        yield f"memory: {output.size(machine.available_bytes)} free of {output.size(machine.memory_bytes)}"
    rates = (machine.disk_write_bytes_per_s, machine.disk_read_bytes_per_s)
    written, read = ("cannot be measured" if rate is None else f"{output.size(rate)}/s" for rate in rates)
    yield f"disk: {output.size(machine.disk_free_bytes)} free; writing {written}, reading {read}"


def _home_lines(health: "HomeHealth") -> Iterator[str]:
    if health.documents is None:
        yield f"{health.home}: nothing was ingested"
    else:
        embedder = health.embedder or "none (BM25)"
        yield f"{health.home}: {health.documents} documents, {health.passages} passages, embedder: {embedder}"
    dtypes = ", ".join(f"{count} in {name}" for name, count in health.dtypes.items())
    stored = f"stored KV: {health.entries} entries, {output.size(health.used_bytes)}"
    yield (
        stored + (f" ({dtypes})" if dtypes else "") + (f", {health.unreadable} unreadable" if health.unreadable else "")
    )
    for problem in health.problems:
        yield f"  {problem}"


def _gflops(flops: float) -> str:
    return f"{flops / 1e9:.0f} GFLOP/s"
