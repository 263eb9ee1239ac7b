"""`ragkv ingest`: files and folders into the index and the store, with an outcome for every file; `--watch` follows.

The report counts every file, and names each that was not read with the reason.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragkv.config import GIB
from ragkv.errors import DocumentError, MissingExtraError
from ragkv.runtime import duration

from . import output
from .options import AsJson, EngineOptions, with_engine_options
from .output import console, errors, print_json, print_note

if TYPE_CHECKING:
    from ragkv.retrieval.rag import FileOptions, FileOutcome, Rag, RagIngestReport

WATCH_MS = 200  # How long one wait for changes takes.
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
    watch: Annotated[bool, typer.Option("--watch", help="Go on: follow new, changed and deleted files.")] = False,
    index_only: Annotated[bool, typer.Option("--index-only", help="Leave the KV to the first questions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Index documents and compute the KV of their chunks. Unchanged files are skipped.

    Every file seen is reported as added, changed, unchanged, ignored or failed. The exit status is 1 if one failed.
    """
    _check_paths(paths, all_needed=watch)
    options.check_writable()
    from ragkv.retrieval import ParseLimits
    from ragkv.retrieval.rag import FileOptions

    file_options = FileOptions(encoding, prune=prune or watch, limits=ParseLimits(inflated_bytes=GIB))
    with options.rag(chunk_tokens) as rag:
        runs = Runs(rag, paths, file_options, encode=not index_only)
        if watch:
            with ended_by_signal() as ended:
                follow(runs, options.home, as_json, ended)
        else:
            _end(paths, runs.first(as_json))


@dataclass(slots=True)
class Runs:
    """Ingestions of the same paths: a first one, and with `--watch` one after each change."""

    rag: "Rag"
    paths: Sequence[Path]
    options: "FileOptions"
    encode: bool

    def first(self, as_json: bool) -> "RagIngestReport":
        """Ingest all, and print the report."""
        began = time.monotonic()
        report = self._run(self.encode)
        if self.rag.index.notice:
            print_note(self.rag.index.notice)
        if failed := report.kv.failed:
            print_note(f"{failed} entries could not be stored. Questions that need these chunks compute them.")
        seconds = time.monotonic() - began
        if as_json:
            print_json(as_json_value(report, seconds))
        else:
            print_report(report, seconds)
        return report

    def again(self) -> "RagIngestReport":
        """Ingest what changed since, without a look at the KV of what did not."""
        return self._run("changed" if self.encode else False)

    def _run(self, encode: "bool | Literal['changed']") -> "RagIngestReport":
        # Failures are in the report; pypdf's warnings do not name the file.
        with output.quiet("ragkv.retrieval.rag.files"), output.quiet("pypdf"), output.progress("reading") as show:
            options = replace(
                self.options,
                on_file=lambda done: show(done.files, done.files_total, f"reading {done.path}"),
                on_embed=lambda done, total: show(done, total, "embedding passages"),
            )
            return self.rag.ingest_files(
                self.paths,
                options,
                encode=encode,
                on_encode=lambda done, total: show(done, total, "encoding KV, chunks"),
            )


@contextmanager
def ended_by_signal() -> Iterator[threading.Event]:
    """Inside the block SIGINT and SIGTERM set the event and raise `KeyboardInterrupt`.

    SIGINT does so too where it was ignored, as a shell starts its background jobs. The event says that a signal came
    even if the exception is lost, as it is in a finalizer.
    """
    ended = threading.Event()

    def interrupt(*_: object) -> None:
        ended.set()
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow(runs: Runs, home: Path, as_json: bool, ended: threading.Event) -> None:
    """Ingest all, and again after each change, until it is interrupted or `ended` is set."""
    changes = _changes(runs.paths, home, ended)
    next(changes)  # from here on no change is missed
    failures = _failures(runs.first(as_json).files)
    print_note("following changes; Ctrl-C or SIGTERM ends it.")
    try:
        for _ in changes:
            report = runs.again()
            again, failures = failures, _failures(report.files)
            for outcome in report.files:
                if outcome.status in ("added", "changed", "deleted") or outcome in failures - again:
                    print_outcome(outcome)
    except KeyboardInterrupt:
        pass
    print_note("no longer following changes.")


def _changes(paths: Sequence[Path], home: Path, ended: threading.Event) -> Iterator[None]:
    """Something at once, and then after each change of a file that is neither hidden nor in the home, until `ended`."""
    try:
        from watchfiles import watch  # an extra
    except ImportError as error:
        raise MissingExtraError("watchfiles", "watch", "Following changes (--watch)") from error
    roots, own = [path.absolute() for path in paths], home.absolute()

    def is_of_interest(_: object, name: str) -> bool:
        path = Path(name)
        parts = next((path.relative_to(root).parts for root in roots if path.is_relative_to(root)), ())
        return not path.is_relative_to(own) and not any(part.startswith(".") for part in parts)

    waits = watch(
        *roots,
        watch_filter=is_of_interest,
        stop_event=ended,
        rust_timeout=WATCH_MS,
        yield_on_timeout=True,
        ignore_permission_denied=True,
    )
    for number, changed in enumerate(waits):
        if number == 0 or changed:
            yield


def _failures(outcomes: "Sequence[FileOutcome]") -> "set[FileOutcome]":
    return {outcome for outcome in outcomes if outcome.status == "failed"}


def _check_paths(paths: Sequence[Path], all_needed: bool) -> None:
    """Raise `DocumentError` before the model is loaded if there is nothing to read."""
    missing = [path for path in paths if not os.path.lexists(path)]
    if missing and (all_needed or len(missing) == len(paths)):
        raise DocumentError(f"Cannot read {missing[0]}: there is no such file or folder. Check the path.")


def _end(paths: Sequence[Path], report: "RagIngestReport") -> None:
    """Exit status 1 if a file failed, and an error if nothing was read."""
    from ragkv.retrieval.rag import nothing_read

    if (problem := nothing_read(paths, report.files)) is not None:
        raise DocumentError(problem)
    if _failures(report.files):
        raise typer.Exit(1)


# The report


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
        elif outcome.reason and outcome.status != "ignored":
            console.print(f"read in part: {outcome.path}: {outcome.reason}")


def print_outcome(outcome: "FileOutcome") -> None:
    """One line for a file, on standard error."""
    ignored = f" ({outcome.reason})" if outcome.reason else ""
    what = outcome.reason if outcome.status == "failed" else f"{outcome.path}{ignored}"  # the reason names the file
    errors.print(f"{outcome.status}: {what}")
    errors.file.flush()


def _counts(report: "RagIngestReport") -> dict[str, int]:
    counted = Counter(outcome.status for outcome in report.files)
    return {status: counted[status] for status in STATUSES}  # type: ignore[index]
