"""The report of an ingestion of files: every file is counted; each that was not read is named with the reason."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from . import output
from .output import console, errors

if TYPE_CHECKING:
    from ragkv.rag import FileOutcome, RagIngestReport

STATUSES = ("added", "changed", "unchanged", "deleted", "ignored", "failed")
NAMED = 5  # files that are named for each reason to ignore them; --json names all


def as_json_value(report: "RagIngestReport", seconds: float) -> dict[str, Any]:
    """The report as JSON values: every file with its status, reason and documents."""
    index = report.index
    documents = {name: getattr(index, name) for name in ("added", "changed", "unchanged", "deleted", "embedded_texts")}
    return {
        "files": output.plain(report.files),
        "counts": _counts(report),
        "index": documents,
        "kv": output.plain(report.kv),
        "deleted_entries": report.deleted_entries,
        "seconds": round(seconds, 3),
    }


def print_report(report: "RagIngestReport", seconds: float) -> None:
    """Print the counts, then the files that were not read, with the reasons."""
    index, kv = report.index, report.kv
    counts = ", ".join(f"{count} {status}" for status, count in _counts(report).items() if count)
    console.print(f"Files: {counts or 'none'}, in {duration(seconds)}.")
    documents = {"added": index.added, "changed": index.changed, "unchanged": index.unchanged, "deleted": index.deleted}
    parts = ", ".join(f"{len(ids)} {what}" for what, ids in documents.items() if ids)
    console.print(
        f"Documents: {parts or 'none'}. "
        f"Chunks: {kv.encoded} encoded, {kv.present} already stored, {report.deleted_entries} dropped.",
    )
    ignored: dict[str, list[str]] = {}
    for outcome in report.files:
        if outcome.status == "ignored":
            ignored.setdefault(outcome.reason, []).append(outcome.path)
    for reason, paths in ignored.items():
        more = f" and {len(paths) - NAMED} more (--json names all)" if len(paths) > NAMED else ""
        console.print(f"ignored, {reason}: {', '.join(paths[:NAMED])}{more}")
    for outcome in report.files:
        if outcome.status == "failed":
            console.print(f"failed: {outcome.reason}")


def print_outcome(outcome: "FileOutcome") -> None:
    """One line for a file, on standard error."""
    ignored = f" ({outcome.reason})" if outcome.reason else ""
    what = outcome.reason if outcome.status == "failed" else f"{outcome.path}{ignored}"  # the reason names the file
    errors.print(f"{outcome.status}: {what}")
    errors.file.flush()


def duration(seconds: float) -> str:
    """Such as 8 s, 3 min 20 s or 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _counts(report: "RagIngestReport") -> dict[str, int]:
    counted = Counter(outcome.status for outcome in report.files)
    return {status: counted[status] for status in STATUSES}  # type: ignore[index]
