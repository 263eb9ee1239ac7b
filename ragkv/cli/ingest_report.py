"""The report of an ingestion of files: every file is counted; each that was not read is named with the reason."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from ragkv.runtime import duration

from . import output
from .output import console, errors

if TYPE_CHECKING:
    from ragkv.engine import Engine
    from ragkv.retrieval.rag import FileOutcome, RagIngestReport

STATUSES = ("added", "changed", "unchanged", "deleted", "ignored", "failed")
LEARN_STEPS = 400  # the default of `ragkv learn`
LEAST_LEARNED = 12  # chunks: fewer teach nothing, and their time says little
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


def learning_note(engine: "Engine", encoded: int, seconds: float) -> str | None:
    """What learned scores would bring and take, if chunks are scored without them; `None` if too little was encoded.

    A step of training costs about as much as seven passes over its six chunks; two of its three parts run the model.
    """
    encoder = engine.parts.encoder
    scorer = encoder.scorer
    if scorer is None or not encoder.makes_scores or scorer.learned is not None or encoded < LEAST_LEARNED:
        return None
    if not engine.config.fusion.learned_scores:
        return None
    pass_s = seconds / (encoded * encoder.passes)  # over one chunk; too long by what reading and indexing took
    takes_s = pass_s * (2 * LEARN_STEPS * 7 * 6 + scorer.passes * encoded)
    return (
        "tokens to recompute are chosen by how their KV varies with context: no scores were learned for this model."
        f" `ragkv learn` learns them from these documents, in about {duration(takes_s)} on this machine, and encodes "
        "nothing again. On the bundled reader learned scores close .97 of the gap to a full recompute at 5 % of its "
        "compute, the variance .55."
    )


def print_outcome(outcome: "FileOutcome") -> None:
    """One line for a file, on standard error."""
    ignored = f" ({outcome.reason})" if outcome.reason else ""
    what = outcome.reason if outcome.status == "failed" else f"{outcome.path}{ignored}"  # the reason names the file
    errors.print(f"{outcome.status}: {what}")
    errors.file.flush()


def _counts(report: "RagIngestReport") -> dict[str, int]:
    counted = Counter(outcome.status for outcome in report.files)
    return {status: counted[status] for status in STATUSES}  # type: ignore[index]
