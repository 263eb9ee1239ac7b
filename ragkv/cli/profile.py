"""`ragkv profile`: measures this model on this machine for the loading controller, and saves the profile."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.runtime import counted

from . import output
from .options import AsJson, EngineOptions, with_engine_options
from .output import console, milliseconds, print_json, print_note

if TYPE_CHECKING:
    from ragkv.fusion.profile import Profile

BAD_FIT = 0.25  # A larger relative error of a fit suggests other work on the machine.


@with_engine_options
def profile(
    options: EngineOptions,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short prompts, fewer rounds: takes seconds, less exact.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure prefill, recompute, loading and decoding here, more exactly than an engine does by itself."""
    with options.engine() as engine:
        with output.progress("measuring") as on_progress:
            measured = engine.profiler.measure(quick=quick, on_progress=on_progress)
        path = engine.load_control.profile_file
        dtype_why = engine.stats().dtype_why
    if as_json:
        print_json({**dataclasses.asdict(measured), "dtype_why": dtype_why, "file": path})
        return
    longest = max(measured.prefill.points, key=lambda point: point.size)
    console.print(f"prefill of {counted(longest.size, 'token')}: {milliseconds(longest.measured_s)}")
    console.print(f"decode step behind them: {milliseconds(measured.decode.at(longest.size))}")
    layer_s = measured.recompute.at(longest.size // 10, longest.size)
    console.print(f"a layer that recomputes a tenth of them: {milliseconds(layer_s)}")
    for name, speed in measured.tiers.items():
        rate = f"{output.size(speed.bytes_per_s)}/s" if speed.per_byte_s else "no longer for more bytes"
        console.print(f"{name}: {rate}, {speed.latency_s * 1e6:.3g} us a slice")
    console.print(f"dtype: {dtype_why}\nsaved in {path}; --json has all of it", style="dim")
    if (error := _largest_error(measured)) > BAD_FIT:
        print_note(f"the fit is off by up to {error:.0%}; if the machine was busy, measure again when it is idle.")


def _largest_error(measured: "Profile") -> float:
    """The largest relative error of the fitted times of whole passes and layers."""
    pairs = [(point.measured_s, point.fitted_s) for point in measured.prefill.points]
    pairs += [(point.measured_s, point.fitted_s) for point in measured.recompute.points]
    return max((abs(fitted_s / measured_s - 1) for measured_s, fitted_s in pairs if measured_s), default=0.0)
