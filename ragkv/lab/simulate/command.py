"""The command `ragkv simulate`: reads options, writes tables and JSON."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from ragkv.errors import ConfigError

from .report import Report
from .run import ReplaySetting, load_trace, simulate
from .token_times import TokenTimes, read_profile
from .trace import Trace

HEADINGS = (
    "policy", "uncached", "TEL", "largest", "hits", "memory", "disk", "median ms", "P90", "P95", "P99", "over SLO",
)  # fmt: skip
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Options:
    """Options of the command line; see `ragkv simulate --help`."""

    trace: str
    policies: str
    capacity_blocks: int | None = None
    capacity_share: float | None = None
    memory: str | None = None
    disk: str | None = None
    xi: str | None = None
    block_tokens: int = 16
    kv_bytes_per_token: int = 131_072
    slo_ms: float = 200.0
    profile: Path | None = None
    forced: bool = False


def run(options: Options, as_json: bool, console: Console) -> None:
    """Replay and print. Raises `InputError` or `ConfigError` in one sentence."""
    if options.block_tokens < 1:
        raise ConfigError(f"--block-tokens is {options.block_tokens}; it must be at least 1.")
    trace = load_trace(options.trace, options.block_tokens)
    names = list(dict.fromkeys(name.strip() for name in options.policies.split(",") if name.strip()))
    if not names:
        raise ConfigError("--policy names no policy.")
    profile = None if options.profile is None else read_profile(options.profile)
    setting = setting_for(options, trace, TokenTimes() if profile is None else TokenTimes.of(profile))
    reports = simulate(trace, names, setting)
    if as_json:
        console.file.write("[\n" + ",\n".join(json.dumps(asdict(report)) for report in reports) + "\n]\n")
    else:
        if profile is not None:
            of = profile.subject
            where = f"{of.cpu}, {of.threads} threads, {of.device}, {of.dtype}, {profile.layers} layers"
            console.print(f"times measured on {where}: {setting.profile}", style="dim")
        show(trace, setting, reports, console)


def setting_for(options: Options, trace: Trace, profile: TokenTimes) -> ReplaySetting:
    """The replay's setting, in blocks of the trace."""
    xi_ms, xi_blocks = xi_of(options, profile, trace.block_tokens)
    return ReplaySetting(
        capacity_blocks=capacity_of(options, trace),
        disk_blocks=blocks_of(options.disk, "--disk", options) if options.disk else 0,
        xi_blocks=xi_blocks,
        xi_ms=xi_ms,
        slo_ms=options.slo_ms,
        forced=options.forced,
        profile=profile,
    )


def capacity_of(options: Options, trace: Trace) -> int:
    """Blocks of memory; exactly one of three options gives them."""
    given = [options.capacity_blocks, options.capacity_share, options.memory]
    if sum(value is not None for value in given) != 1:
        raise ConfigError("Give exactly one of --capacity-blocks, --capacity-share (of peak live) and --memory.")
    if options.capacity_blocks is not None:
        return options.capacity_blocks
    if options.memory is not None:
        return blocks_of(options.memory, "--memory", options)
    assert options.capacity_share is not None
    if not options.capacity_share >= 0:
        raise ConfigError(f"--capacity-share is {options.capacity_share}; it must be at least 0.")
    return int(options.capacity_share * trace.peak_live)


def blocks_of(text: str, option: str, options: Options) -> int:
    """Whole blocks in an amount of bytes such as 128G."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None or options.kv_bytes_per_token < 1:
        raise ConfigError(f"{option} {text!r} is no amount of bytes such as 128G, or --kv-bytes-per-token is below 1.")
    return int(float(found[1]) * UNITS[found[2].upper()] / (options.kv_bytes_per_token * options.block_tokens))


def xi_of(options: Options, profile: TokenTimes, block_tokens: int) -> tuple[float | None, int]:
    """The threshold as a time, if it was given as one, and in blocks. With `auto`, the policy `t-lru-auto` finds it."""
    if options.xi == "auto" and "t-lru-auto" not in options.policies.split(","):
        raise ConfigError("--xi auto needs the policy t-lru-auto, which finds the threshold: name it in --policy.")
    if options.xi is None or options.xi == "auto":
        return None, 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|)", options.xi.strip())
    if found is None:
        raise ConfigError(f"--xi {options.xi!r} is neither tokens (2000) nor a TTFT target (200ms) nor auto.")
    if found[2] == "ms":
        return float(found[1]), profile.xi_blocks(float(found[1]), block_tokens)
    return None, int(float(found[1])) // block_tokens


def show(trace: Trace, setting: ReplaySetting, reports: Sequence[Report], console: Console) -> None:
    """Print the table."""
    share = (
        f"{setting.capacity_blocks / trace.peak_live:.2f} of peak live"
        if trace.peak_live
        else "no conversation returns"
    )
    console.print(
        f"{trace.name}: {len(trace.turns)} requests, blocks of {trace.block_tokens} tokens; "
        f"capacity {setting.capacity_blocks} blocks ({share}); xi {setting.xi_blocks} blocks; simulated"
    )
    for note in trace.notes:
        console.print(note, style="dim")
    rows = [HEADINGS, *(cells(report) for report in reports)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADINGS))]
    for name, *numbers in rows:
        right = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
        console.print("  ".join([name.ljust(widths[0]), *right]))


def cells(r: Report) -> tuple[str, ...]:
    """A report as a row under HEADINGS."""
    counts = (str(count) for count in (r.uncached_blocks, r.tel_blocks, r.max_uncached_blocks))
    rates = (f"{rate:.1%}" for rate in (r.hit_rate, r.memory_hit_rate, r.disk_hit_rate))
    times = (f"{time:.1f}" for time in (r.median_ms, r.p90_ms, r.p95_ms, r.p99_ms))
    return (r.policy, *counts, *rates, *times, str(r.slo_misses))
