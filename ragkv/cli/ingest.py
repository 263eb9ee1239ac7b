"""`ragkv ingest`: files and folders into the index and the store, with an outcome for every file.

The report counts every file, and names each that was not read with the reason.
"""

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.config import GIB
from ragkv.errors import DocumentError
from ragkv.runtime import duration

from . import output
from .options import AsJson, EngineOptions, with_engine_options
from .output import console, print_json, print_note

if TYPE_CHECKING:
    from ragkv.retrieval.rag import FileOptions, Rag, RagIngestReport

STATUSES = ("added", "changed", "unchanged", "deleted", "ignored", "failed")
NAMED = 5  # So many files are named for each reason to ignore them; --json names all.


@with_engine_options
def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files and folders.")],
    options: EngineOptions,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Longest chunk, in tokens.", show_default="512; the reader: 128")
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(help="Encoding of text, whatever a page declares; auto guesses it.", show_default="UTF-8"),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete documents whose files are gone from the folders.")
    ] = False,
    index_only: Annotated[bool, typer.Option("--index-only", help="Leave the KV to the first questions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Index documents and compute the KV of their chunks. Unchanged files are skipped.

    Every file seen is reported as added, changed, unchanged, ignored or failed. The exit status is 1 if one failed.
    """
    missing = [path for path in paths if not os.path.lexists(path)]
    if len(missing) == len(paths):  # said before the model is loaded
        raise DocumentError(f"Cannot read {missing[0]}: there is no such file or folder. Check the path.")
    options.check_writable()
    from ragkv.retrieval import ParseLimits
    from ragkv.retrieval.rag import FileOptions, nothing_read

    began = time.monotonic()
    with options.rag(chunk_tokens) as rag:
        how = FileOptions(encoding, prune=prune, limits=ParseLimits(inflated_bytes=GIB))
        report = _ingested(rag, paths, how, encode=not index_only)
        if rag.index.notice:
            print_note(rag.index.notice)
    if failed := report.kv.failed:
        print_note(f"{failed} entries could not be stored. Questions that need these chunks compute them.")
    if as_json:
        print_json(_as_json(report, time.monotonic() - began))
    else:
        _show(report, time.monotonic() - began)
    if (problem := nothing_read(paths, report.files)) is not None:
        raise DocumentError(problem)
    if any(outcome.status == "failed" for outcome in report.files):
        raise typer.Exit(1)


def _ingested(rag: "Rag", paths: Sequence[Path], how: "FileOptions", encode: bool) -> "RagIngestReport":
    # Failures are in the report; pypdf's warnings do not name the file.
    with output.quiet("ragkv.retrieval.rag.files"), output.quiet("pypdf"), output.progress("reading") as show:
        how = replace(
            how,
            on_file=lambda done: show(done.files, done.files_total, f"reading {done.path}"),
            on_embed=lambda done, total: show(done, total, "embedding passages"),
        )
        return rag.ingest_files(
            paths, how, encode=encode, on_encode=lambda done, total: show(done, total, "encoding KV, chunks")
        )


def _as_json(report: "RagIngestReport", seconds: float) -> dict[str, Any]:
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


def _show(report: "RagIngestReport", seconds: float) -> None:
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
        elif outcome.reason and outcome.status != "ignored":
            console.print(f"read in part: {outcome.path}: {outcome.reason}")


def _counts(report: "RagIngestReport") -> dict[str, int]:
    counted = Counter(outcome.status for outcome in report.files)
    return {status: counted[status] for status in STATUSES}  # type: ignore[index]
