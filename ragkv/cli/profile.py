"""`ragkv profile`: measures this model on this machine for the loading controller, and saves the profile."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

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
    """Measure prefill, recompute, loading and decoding here. Engines with ratio = None use the profile."""
    from ragkv.lab.profiling import measure, save

    with options.engine() as engine:
        with output.progress("measuring") as on_progress:
            measured = measure(engine, quick=quick, on_progress=on_progress)
        path = save(engine, measured)
        dtype_why = engine.stats().dtype_why
    if as_json:
        print_json({**dataclasses.asdict(measured), "dtype_why": dtype_why, "file": path})
        return
    show(measured)
    console.print(f"dtype: {dtype_why}", style="dim")
    console.print(f"saved in {path}", style="dim")
    if (error := _largest_error(measured)) > BAD_FIT:
        print_note(f"the fit is off by up to {error:.0%}; if the machine was busy, measure again when it is idle.")


def show(measured: "Profile") -> None:
    """Print what was fitted to the measured times; `--json` has all of them."""
    subject, per_slice = measured.subject, measured.stored_bytes_per_token / measured.layers
    console.print(f"{subject.cpu}, {subject.threads} threads, {subject.device}, {subject.dtype}", style="dim")
    for name, fit in (("prefill", measured.prefill), ("decode step", measured.decode)):
        longest = max(fit.points, key=lambda point: point.tokens)
        console.print(f"{name} at {longest.tokens} tokens: {milliseconds(longest.measured_s)}")
    layer = measured.recompute
    console.print(
        f"a layer of recompute: {milliseconds(layer.fixed_s)} + rows x "
        f"({layer.per_row_s * 1e6:.3g} + keys x {layer.per_row_key_s * 1e6:.2g}) us; "
        f"placing a token: {measured.place_token_layer_s * 1e6:.3g} us; start: {milliseconds(measured.start_s)}"
    )
    for name, speed in measured.tiers.items():
        rate = f"{output.size(speed.bytes_per_s)}/s" if speed.per_byte_s else "no longer for more bytes"
        token = f", {per_slice * speed.per_byte_s * 1e6:.2g} us a token and layer" if speed.per_byte_s else ""
        console.print(f"{name}: {rate}, {speed.latency_s * 1e6:.3g} us a slice{token}")
    if measured.copy_bytes_per_s is not None:
        console.print(f"copies to the device: {output.size(measured.copy_bytes_per_s)}/s")


def _largest_error(measured: "Profile") -> float:
    """The largest relative error of the fitted times of whole passes and layers."""
    pairs = [(point.measured_s, point.fitted_s) for point in measured.prefill.points]
    pairs += [(point.measured_s, point.fitted_s) for point in measured.recompute.points]
    return max((abs(fitted_s / measured_s - 1) for measured_s, fitted_s in pairs if measured_s), default=0.0)
