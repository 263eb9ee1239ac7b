"""Reads the options of `python -m benchmarks.simulate`, and writes tables and JSON."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

from ragkv.errors import ConfigError, ProfileError

from .replay import ReplaySetting, Report, load_trace, simulate, xi_blocks
from .trace import Trace

if TYPE_CHECKING:
    from ragkv.control.profile import Profile  # imports torch

HEADINGS = (
    "policy",
    "uncached",
    "TEL",
    "largest",
    "hits",
    "median ms",
    "P90",
    "P95",
    "P99",
    "over SLO",
)


def run(
    trace_name: str,
    policies: str,
    *,
    capacity_blocks: int | None = None,
    capacity_share: float | None = None,
    xi: str | None = None,
    profile: Path | None = None,
    block_tokens: int = 16,
    slo_ms: float = 200.0,
    forced: bool = False,
    as_json: bool,
    console: Console,
) -> None:
    """Replay and print. The options are those of the command. Raises `InputError` or
    `ConfigError`.
    """
    if block_tokens < 1:
        raise ConfigError(f"--block-tokens is {block_tokens}; it must be at least 1.")
    trace = load_trace(trace_name, block_tokens)
    names = list(dict.fromkeys(name.strip() for name in policies.split(",") if name.strip()))
    if not names:
        raise ConfigError("--policy names no policy.")
    speeds = None if profile is None else profile_in(profile)
    xi_ms, threshold = xi_of(xi, block_tokens, speeds)
    capacity = capacity_of(capacity_blocks, capacity_share, trace)
    setting = ReplaySetting(capacity, threshold, xi_ms, slo_ms, forced, speeds)
    reports = simulate(trace, names, setting)
    if as_json:
        console.file.write(
            "[\n" + ",\n".join(json.dumps(asdict(report)) for report in reports) + "\n]\n"
        )
    else:
        show(trace, setting, reports, console)


def capacity_of(blocks: int | None, share: float | None, trace: Trace) -> int:
    """Blocks; exactly one of two options gives them."""
    if (blocks is None) == (share is None):
        raise ConfigError(
            "Give exactly one of --capacity-blocks and --capacity-share (of peak live)."
        )
    if blocks is not None:
        return blocks
    assert share is not None
    if not share >= 0:
        raise ConfigError(f"--capacity-share is {share}; it must be at least 0.")
    return int(share * trace.peak_live)


def profile_in(path: Path) -> "Profile":
    """The profile in a file of `ragkv profile`; the last one of several."""
    from ragkv.control.profile import Profile, read_measurements

    try:
        found = list(read_measurements(path).values())
    except ValueError as error:
        raise ProfileError(f"{error}; give the file profile.json of a store.") from error
    if not found:
        raise ProfileError(f"{path} has no profile; `ragkv profile` writes one.")
    return Profile.from_dict(found[-1])


def xi_of(
    xi: str | None, block_tokens: int, profile: "Profile | None" = None
) -> tuple[float | None, int]:
    """The threshold as a time, if it was given as one, and in blocks."""
    if xi is None:
        return None, 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|)", xi.strip())
    if found is None:
        raise ConfigError(f"--xi {xi!r} is neither tokens (2000) nor a TTFT target (200ms).")
    number = float(found[1])
    return (
        (number, xi_blocks(number, block_tokens, profile))
        if found[2]
        else (None, int(number) // block_tokens)
    )


def show(trace: Trace, setting: ReplaySetting, reports: Sequence[Report], console: Console) -> None:
    """Print the table."""
    share = (
        f"{setting.capacity_blocks / trace.peak_live:.2f} of peak live"
        if trace.peak_live
        else "no conversation returns"
    )
    console.print(
        f"{trace.name}: {len(trace.turns)} requests, blocks of {trace.block_tokens} tokens; "
        f"capacity {setting.capacity_blocks} blocks ({share}); xi {setting.xi_blocks} blocks; "
        "simulated"
    )
    for note in trace.notes:
        console.print(note, style="dim")
    first, *others = HEADINGS
    table = Table(first, *(Column(name, justify="right") for name in others), box=None)
    for report in reports:
        table.add_row(*cells(report))
    console.print(table)


def cells(r: Report) -> tuple[str, ...]:
    """A report as a row under HEADINGS."""
    counts = (str(count) for count in (r.uncached_blocks, r.tel_blocks, r.max_uncached_blocks))
    times = (f"{time:.1f}" for time in (r.median_ms, r.p90_ms, r.p95_ms, r.p99_ms))
    return (r.policy, *counts, f"{r.hit_rate:.1%}", *times, str(r.slo_misses))
