"""The table at the end of a soak, and whether every check passed."""

from .findings import KINDS, Findings
from .readings import NAMES, Readings
from .world import DISK_MIB, TENANTS

FLAT_MINUTES = 20.0  # a shorter soak is not long enough to say what is flat
MEMORY_SHARE = 0.03  # the last quarter may have so much more memory than the second one
COUNT_MORE = 5  # and so many more descriptors and threads
FILES_SHARE, FILES_MORE = 0.05, 20
KV_MIB = DISK_MIB * len(TENANTS)  # KV fills its disk; `leftovers.py` lists it against what lives


def table(findings: Findings, readings: Readings, minutes: float) -> str:
    """The findings and readings for people."""
    lines = ["", f"soak of {minutes:.1f} minutes under load", ""]
    lines += [f"  {kind:<44}{findings.failures[kind]:>8}" for kind in KINDS]
    lines.append("")
    lines += [f"  {what:<44}{times:>8}" for what, times in sorted(findings.counts.items())]
    lines += ["", "  statuses (0: the connection broke): " + _pairs(findings.statuses)]
    lines += ["  refused as documented: " + (_pairs(findings.refusals) or "nothing"), ""]
    lines.append(f"  {'seconds':<44}{'P50':>8}{'P90':>8}{'P99':>8}{'longest':>9}{'requests':>10}")
    timed = {**findings.latencies, "/livez of the replica that stays": readings.livez}
    for who, times in sorted(timed.items()):
        shares = "".join(f"{times.percentile(share):8.3f}" for share in (0.5, 0.9, 0.99))
        lines.append(f"  {who:<44}{shares}{times.longest:9.3f}{len(times.seconds):10}")
    lines += ["", f"  {'the replica that stays, median by quarter':<44}" + "".join(f"{n:>9}" for n in "1234")]
    lines += [f"  {name:<44}" + "".join(f"{value:9.1f}" for value in readings.quarters(name)) for name in NAMES]
    failed = failures(findings, readings, minutes)
    lines += ["", *(f"  FAILED: {one}" for one in failed), _outcome(findings, failed)]
    if minutes < FLAT_MINUTES:
        lines.append(f"  (flatness is checked from {FLAT_MINUTES:.0f} minutes on)")
    return "\n".join(lines)


def failures(findings: Findings, readings: Readings, minutes: float) -> list[str]:
    """The checks that failed."""
    found = [f"{findings.failures[kind]} {kind}" for kind in KINDS if findings.failures[kind]]
    if wrong := {status: times for status, times in readings.livez.statuses.items() if status != 200}:
        found.append(f"/livez: {wrong}")
    if minutes >= FLAT_MINUTES:
        found += [f"{name} is not flat: {_quarters(readings, name)}" for name in NAMES if not _is_flat(readings, name)]
    return found


def _outcome(findings: Findings, failed: list[str]) -> str:
    if not findings.is_open:
        return "  interrupted"
    return "  failed" if failed else "  passed"


def _is_flat(readings: Readings, name: str) -> bool:
    """Whether the last quarter has no more than the second one, but for what is allowed; KV has a limit of its own."""
    _, second, _, last = readings.quarters(name)
    if name == "kv_mib":
        return last <= KV_MIB * (1 + FILES_SHARE)
    if name == "kv_files":  # bounded by their bytes
        return True
    if name == "rss_mib":
        return last <= second * (1 + MEMORY_SHARE)
    if name in ("descriptors", "threads", "children"):
        return last <= second + COUNT_MORE
    return last <= second * (1 + FILES_SHARE) + FILES_MORE


def _quarters(readings: Readings, name: str) -> str:
    return ", ".join(f"{value:.1f}" for value in readings.quarters(name))


def _pairs(counts: dict[str, int] | dict[int, int]) -> str:
    return ", ".join(f"{name} {times}" for name, times in sorted(counts.items(), key=lambda pair: -pair[1]))
