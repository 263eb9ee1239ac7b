"""`ragkv profile`: measures this model on this machine for the loading controller, and saves the
profile.
"""

import dataclasses
from typing import Annotated

import typer

from ragkv.runtime import counted

from . import output
from .options import AsJson, EngineOptions, with_engine_options
from .output import console, milliseconds, print_json


@with_engine_options
def profile(
    options: EngineOptions,
    quick: Annotated[bool, typer.Option("--quick", help="Takes seconds, less exact.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure prefill, recompute and loading here, more exactly than an engine does by itself."""
    with options.engine() as engine:
        with output.progress("measuring") as on_progress:
            measured = engine.parts.profiler.measure(quick=quick, on_progress=on_progress)
        path = engine.parts.profiler.in_use.file
        dtype_why = engine.stats().dtype_why
    if as_json:
        print_json({**dataclasses.asdict(measured), "dtype_why": dtype_why, "file": path})
        return
    for tokens in (512, 2048):
        console.print(
            f"prefill of {counted(tokens, 'token')}: {milliseconds(measured.prefill.at(tokens))}"
        )
    console.print(
        "a layer that recomputes a tenth of the latter: "
        f"{milliseconds(measured.recompute.at(205, 2048))}"
    )
    for name, speed in measured.tiers.items():
        rate = (
            f"{output.size(speed.bytes_per_s)}/s"
            if speed.per_byte_s
            else "no longer for more bytes"
        )
        console.print(f"{name}: {rate}, {speed.latency_s * 1e6:.3g} us a slice")
    console.print(f"dtype: {dtype_why}\nsaved in {path}; --json has all of it", style="dim")
