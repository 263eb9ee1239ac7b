"""`ragkv profile`: measures this model on this machine for the loading controller, and saves the profile."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from . import output
from .options import HOME, Adapter, AsJson, Device, Dtype, EngineOptions, Home, Model, Settings, Weights
from .output import console, milliseconds, print_json, print_note

if TYPE_CHECKING:
    from ragkv.fusion.profile import Profile

BAD_FIT = 0.25  # relative error of a fit; a larger one suggests other work on the machine


def profile(
    home: Home = HOME,
    model: Model = "reader",
    config: Settings = None,
    device: Device = None,
    dtype: Dtype = None,
    adapter: Adapter = None,
    weights: Weights = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short prompts, fewer rounds: takes seconds, less exact.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="File for the plot.", show_default="next to the profile")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure prefill, recompute, loading and decoding here. Engines with ratio = None use the profile."""
    from ragkv.lab.profiling import measure, save

    with EngineOptions(home, model, config, device, dtype, adapter, weights).engine() as engine:
        with output.progress("measuring") as on_progress:
            measured = measure(engine, quick=quick, on_progress=on_progress)
        path = save(engine, measured)
        dtype_why = engine.stats().dtype_why
    picture = plot or (path.with_suffix(".png") if path else None)
    drawn = picture is not None and draw(measured, picture)
    if as_json:
        print_json(
            {**dataclasses.asdict(measured), "dtype_why": dtype_why, "file": path, "plot": picture if drawn else None}
        )
        return
    show(measured)
    console.print(f"dtype: {dtype_why}", style="dim")
    console.print(f"saved in {path}" + (f", drawn in {picture}" if drawn else ""), style="dim")
    if (error := _largest_error(measured)) > BAD_FIT:
        print_note(f"the fit is off by up to {error:.0%}; if the machine was busy, measure again when it is idle.")
    if not drawn:
        print_note("no plot was drawn: it needs matplotlib, `pip install matplotlib`.")


def show(measured: "Profile") -> None:
    """Print the profile as a table."""
    subject, per_slice = measured.subject, measured.stored_bytes_per_token / measured.layers
    console.print(f"{subject.cpu}, {subject.threads} threads, {subject.device}, {subject.dtype}", style="dim")
    table = Table("what", "measured at", "time", "fit", "off")
    for name, fit in (("prefill", measured.prefill), ("decode step", measured.decode)):
        for length in fit.points:
            _row(table, name, f"{length.tokens} tokens", length.measured_s, length.fitted_s)
    for point in measured.recompute.points:
        _row(table, "a layer of recompute", f"{point.rows} of {point.keys}", point.measured_s, point.fitted_s)
    for name, speed in measured.tiers.items():
        for piece in speed.points:
            _row(table, f"a slice from {name}", output.size(piece.slice_bytes), piece.measured_s, piece.fitted_s)
    console.print(table)
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


def draw(measured: "Profile", path: Path) -> bool:
    """Write a plot of measured and fitted times. Returns `False` if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    importlib.import_module("matplotlib").use("Agg")
    plots: Any = importlib.import_module("matplotlib.pyplot")
    figure, (lengths, layers, tiers) = plots.subplots(1, 3, figsize=(13, 4))
    for name, fit in (("prefill", measured.prefill), ("decode step", measured.decode)):
        _plot(lengths, name, [point.tokens for point in fit.points], fit.points)
    lengths.set(xlabel="tokens", ylabel="ms", title="whole passes", yscale="log")
    for keys in sorted({point.keys for point in measured.recompute.points}):
        points = [point for point in measured.recompute.points if point.keys == keys]
        _plot(layers, f"{keys} keys", [point.rows for point in points], points)
    layers.set(xlabel="rows", ylabel="ms a layer", title="selective recompute")
    for name, speed in measured.tiers.items():
        _plot(tiers, name, [point.slice_bytes / 2**10 for point in speed.points], speed.points)
    tiers.set(xlabel="KiB a slice", ylabel="ms", title="loading")
    for axes in (lengths, layers, tiers):
        axes.legend()
    figure.suptitle(f"{measured.subject.cpu}, {measured.subject.threads} threads, {measured.subject.device}; line: fit")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plots.close(figure)
    return True


def _largest_error(measured: "Profile") -> float:
    """The largest relative error of the fitted times of whole passes and layers."""
    pairs = [(point.measured_s, point.fitted_s) for point in measured.prefill.points]
    pairs += [(point.measured_s, point.fitted_s) for point in measured.recompute.points]
    return max((abs(fitted_s / measured_s - 1) for measured_s, fitted_s in pairs if measured_s), default=0.0)


def _row(table: Table, what: str, at: str, measured_s: float, fitted_s: float) -> None:
    off = f"{fitted_s / measured_s - 1:+.0%}" if measured_s else ""
    table.add_row(what, at, f"{measured_s * 1e3:.3g} ms", f"{fitted_s * 1e3:.3g} ms", off)


def _plot(axes: Any, label: str, x: Sequence[float], points: Sequence[Any]) -> None:
    """Plot fitted times as a line and measured times as dots of the same colour, in ms."""
    (line,) = axes.plot(x, [1e3 * point.fitted_s for point in points], label=label)
    axes.plot(x, [1e3 * point.measured_s for point in points], "o", color=line.get_color())
