"""`ragkv profile`: measure this model on this machine for the loading controller, show it, file it."""

import dataclasses
import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from . import output
from .options import HOME, AsJson, Device, Dtype, Home, Model, Settings
from .output import console, milliseconds, print_json
from .workplace import Workplace, notice

if TYPE_CHECKING:
    from ragkv.fusion.profile import LengthFit, Profile

FAR_OFF = 0.25  # a fit as bad as that tells of other work on the machine


def profile(
    home: Home = HOME,
    model: Model = "reader",
    config: Settings = None,
    device: Device = None,
    dtype: Dtype = None,
    quick: Annotated[bool, typer.Option(help="Short prompts, fewer rounds: seconds, and less to be trusted.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the plot here [default: beside the profile].")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure prefill, recompute, loading and decoding on this machine; with ratio = None engines go by it."""
    from ragkv.calibration.profiling import measure, save

    with Workplace(home, model, config, device, dtype).engine() as engine:
        with output.progress("measuring") as on_progress:
            measured = measure(engine, quick=quick, on_progress=on_progress)
        path = save(engine, measured)
    picture = plot or (path.with_suffix(".png") if path else None)
    drawn = picture is not None and draw(measured, picture)
    if as_json:
        print_json({**dataclasses.asdict(measured), "file": path, "plot": picture if drawn else None})
        return
    show(measured)
    console.print(f"filed in {path}" + (f", drawn in {picture}" if drawn else ""), style="dim")
    if (off := _most_off(measured)) > FAR_OFF:
        notice(f"the fit is off by up to {off:.0%}; if the machine was busy, measure again when it is not.")
    if not drawn:
        notice("no plot was drawn: it needs matplotlib, `pip install matplotlib`.")


def show(measured: "Profile") -> None:
    """The table on the terminal."""
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
        rate = f"{output.size(speed.bytes_per_s)}/s" if speed.per_byte_s else "in place"
        token = f", {per_slice * speed.per_byte_s * 1e6:.2g} us a token and layer" if speed.per_byte_s else ""
        console.print(f"{name}: {rate}, {speed.latency_s * 1e6:.3g} us a slice{token}")
    if measured.copy_bytes_per_s is not None:
        console.print(f"copies to the device: {output.size(measured.copy_bytes_per_s)}/s")


def draw(measured: "Profile", path: Path) -> bool:
    """Write a plot of what was measured and what was fitted; `False` where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    importlib.import_module("matplotlib").use("Agg")
    plots: Any = importlib.import_module("matplotlib.pyplot")
    figure, (lengths, layers, tiers) = plots.subplots(1, 3, figsize=(13, 4))
    _draw_length(lengths, measured.prefill, "prefill")
    _draw_length(lengths, measured.decode, "decode step")
    lengths.set(xlabel="tokens", ylabel="seconds", title="whole passes", yscale="log")
    for keys in sorted({point.keys for point in measured.recompute.points}):
        points = [point for point in measured.recompute.points if point.keys == keys]
        rows = [point.rows for point in points]
        (line,) = layers.plot(rows, [1e3 * point.fitted_s for point in points], label=f"{keys} keys")
        layers.plot(rows, [1e3 * point.measured_s for point in points], "o", color=line.get_color())
    layers.set(xlabel="rows", ylabel="ms a layer", title="selective recompute")
    for name, speed in measured.tiers.items():
        sizes = [point.slice_bytes / 2**10 for point in speed.points]
        (line,) = tiers.plot(sizes, [1e3 * point.fitted_s for point in speed.points], label=name)
        tiers.plot(sizes, [1e3 * point.measured_s for point in speed.points], "o", color=line.get_color())
    tiers.set(xlabel="KiB a slice", ylabel="ms", title="loading")
    for axes in (lengths, layers, tiers):
        axes.legend()
    figure.suptitle(f"{measured.subject.cpu}, {measured.subject.threads} threads, {measured.subject.device}; line: fit")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plots.close(figure)
    return True


def _most_off(measured: "Profile") -> float:
    """The largest relative distance of a fit from what was measured, over whole passes and layers."""
    pairs = [(point.measured_s, point.fitted_s) for point in measured.prefill.points]
    pairs += [(point.measured_s, point.fitted_s) for point in measured.recompute.points]
    return max((abs(fitted / taken - 1) for taken, fitted in pairs if taken), default=0.0)


def _row(table: Table, what: str, at: str, measured_s: float, fitted_s: float) -> None:
    off = f"{fitted_s / measured_s - 1:+.0%}" if measured_s else ""
    table.add_row(what, at, f"{measured_s * 1e3:.3g} ms", f"{fitted_s * 1e3:.3g} ms", off)


def _draw_length(axes: Any, fit: "LengthFit", name: str) -> None:
    tokens = [point.tokens for point in fit.points]
    (line,) = axes.plot(tokens, [point.fitted_s for point in fit.points], label=name)
    axes.plot(tokens, [point.measured_s for point in fit.points], "o", color=line.get_color())
