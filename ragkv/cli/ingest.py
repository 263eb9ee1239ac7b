"""`ragkv ingest`: reads files and folders into the index, then stores KV, with an outcome for every
file.

The report counts every file. It names each file that was not read, with the reason. Questions can
be answered without KV, so by default KV is computed only for a few seconds, and the report says how
much is left. While a server has the home, this process writes the index, and the server computes
KV.
"""

import codecs
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import webencodings

from ragkv.config import CHUNK_TOKENS, GIB
from ragkv.errors import CancelledError, DeadlineError, DocumentError, InputError
from ragkv.runtime import Check, Rate, counted, duration

from . import output
from .options import AsJson, EngineOptions, with_engine_options
from .output import INTERRUPTED, Stop, console, print_json, print_note
from .running_server import server_of

if TYPE_CHECKING:
    from ragkv.entries import EncodeReport
    from ragkv.rag import FileOptions, FileProgress, Rag, RagIngestReport
    from ragkv.retrieval import IngestReport
    from ragkv.runtime.server_file import ServerAddress

STATUSES = ("added", "changed", "moved", "unchanged", "gone", "deleted", "ignored", "failed")
BY_DEFAULT_S = 5.0  # for which KV is computed: enough for some notes, and to tell the speed
NAMED = 5  # the most files named for each reason to ignore them; --json names all


ChunkTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Longest chunk, in tokens.", show_default=str(CHUNK_TOKENS)),
]
Encoding = Annotated[
    str | None,
    typer.Option(
        help="Encoding of text, whatever a page declares; auto guesses it.", show_default="UTF-8"
    ),
]
Prune = Annotated[
    bool, typer.Option("--prune", help="Delete documents whose files are gone from the folders.")
]
AllKv = Annotated[
    bool, typer.Option("--kv", help="Compute the KV of all chunks now, however long it takes.")
]
Minutes = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="About how long KV is computed at most; 0: none.",
        show_default=f"{BY_DEFAULT_S:g} seconds",
    ),
]


@with_engine_options
def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files and folders.")],
    options: EngineOptions,
    chunk_tokens: ChunkTokens = None,
    encoding: Encoding = None,
    prune: Prune = False,
    all_kv: AllKv = False,
    minutes: Minutes = None,
    as_json: AsJson = False,
) -> None:
    """Index documents, and begin to compute the KV of their chunks. Unchanged files are skipped.

    Questions can be asked once the index is made. KV makes their answers faster; questions compute
    what is missing. Ctrl-C and SIGTERM keep what is done, and the same command goes on. KV stops
    when store.disk_bytes are full. The exit status is 1 if a file failed.
    """
    _check(paths, prune, encoding)
    if all_kv and minutes is not None:
        raise InputError("--kv has no limit of time: leave --kv or --minutes out.")
    server = server_of(options.home, options.model) if options.uses_server_settings else None
    if server is None:
        options.check_writable()
    from ragkv.rag import FileOptions
    from ragkv.retrieval import ParseLimits
    from ragkv.retrieval.documents.alone import LoneParser

    began = time.monotonic()
    with (
        options.rag(chunk_tokens, index_only=server is not None) as rag,
        LoneParser() as parser,
        Stop("Interrupted. What is done is kept, and the same command goes on.") as check,
    ):
        how = FileOptions(encoding, prune, ParseLimits(inflated_bytes=GIB), parser.load)
        try:
            report = _indexed(rag, paths, how, check, began)
            if not as_json:
                _show(report, rag.index.contents.stats().passages)
            speed = None
            if server is not None:
                _note_server(server, report)
            else:
                limit_s = math.inf if all_kv else BY_DEFAULT_S if minutes is None else 60 * minutes
                kv, speed = _encoded(rag, report.index, check, limit_s)
                report = replace(report, kv=kv)
        except CancelledError as error:
            print_note(str(error))
            raise typer.Exit(INTERRUPTED) from None
        if rag.index.writer.notice:
            print_note(rag.index.writer.notice)
    seconds = time.monotonic() - began
    if as_json:
        _print_json(report, seconds)
    elif speed is not None:
        console.print(f"{_kv_line(report.kv, speed)} In all {duration(seconds)}.")
    _note_kv(report.kv)
    _end(paths, report, was_interrupted=check.is_set)


def _check(paths: Sequence[Path], prune: bool, encoding: str | None) -> None:
    """Raise `DocumentError` for paths without files, and `InputError` for an unknown encoding,
    before the model is loaded.
    """
    if encoding not in (None, "auto") and webencodings.lookup(encoding) is None:
        try:
            codecs.lookup(encoding)
        except LookupError:
            raise InputError(
                f"--encoding names the unknown encoding {encoding!r}. Name another, or let auto guess it."
            ) from None
    missing = [path for path in paths if not os.path.lexists(path)]
    hint = "Check the path; with --prune, what was read from there before is deleted."
    if len(missing) == len(paths) and not prune:
        raise DocumentError(f"Cannot read {missing[0]}: there is no such file or folder. {hint}")
    if not prune and not any(_holds_a_file(path) for path in paths):
        said = "an empty folder" if len(paths) == 1 else "an empty folder, and so are the others"
        raise DocumentError(f"No documents: {paths[0]} is {said}. {hint}")


def _end(paths: Sequence[Path], report: "RagIngestReport", was_interrupted: bool) -> None:
    """Raise what the exit status says: that nothing was read, a file failed, or it was stopped."""
    from ragkv.rag import nothing_read

    if (problem := nothing_read(paths, report.files)) is not None:
        raise DocumentError(problem)
    if any(outcome.status == "failed" for outcome in report.files):
        raise typer.Exit(1)
    if was_interrupted:
        print_note("the same command goes on.")
        raise typer.Exit(INTERRUPTED)


def _print_json(report: "RagIngestReport", seconds: float) -> None:
    """The report without the texts of the index."""
    names = ("added", "changed", "unchanged", "deleted", "embedded_texts")
    index = {name: getattr(report.index, name) for name in names}
    shown = {"files": report.files, "kv": report.kv, "deleted_entries": report.deleted_entries}
    print_json({**shown, "index": index, "counts": _counts(report), "seconds": round(seconds, 3)})


def _note_kv(kv: "EncodeReport") -> None:
    """Say what became of the KV that is not stored."""
    if kv.failed:
        print_note(
            f"Not stored: {counted(kv.failed, 'entry')}. Questions that need these chunks "
            "compute them."
        )
    if kv.left:
        print_note(
            "what is left is computed by and by: by `ragkv serve` between questions, and by each "
            "question for its own passages; the same command with --kv computes it now."
        )


def _holds_a_file(path: Path) -> bool:
    """Whether there is a file at `path` or below it, or nothing can be known."""
    return not path.is_dir() or any(not one.is_dir() for one in path.rglob("*"))


def _note_server(server: "ServerAddress", report: "RagIngestReport") -> None:
    """Say what becomes of the KV while a server has the home."""
    print_note(
        f"the server at {server.url} (pid {server.pid}) has this home: it finds the documents from "
        "now on, and computes their KV when questions need it."
    )
    if gone := len(report.index.forgotten_passages):
        print_note(
            f"the KV of {counted(gone, 'passage')} that no document has any more is kept until "
            "`ragkv gc`, which needs the server to be stopped."
        )


def _kv_line(kv: "EncodeReport", speed: "_Speed") -> str:
    """How much KV there is, how large it is, and how long the rest takes."""
    done = f"{counted(kv.encoded, 'passage')} computed, {kv.present} there already"
    left = f", {kv.left} left ({output.size(speed.left_bytes)}{speed.left})" if kv.left else ""
    return f"KV: {done}{left}; {output.size(kv.bytes_per_token)} a token."


def _indexed(
    rag: "Rag", paths: Sequence[Path], how: "FileOptions", check: Check, began: float
) -> "RagIngestReport":
    """Read the files. Raises `CancelledError` between two files."""

    def on_file(done: "FileProgress") -> None:
        check()
        show(done.files, done.files_total, f"reading {done.path}")

    def on_embed(done: int, total: int) -> None:
        check()
        show(done, total, "embedding passages")

    def on_indexed() -> None:
        took = f"in {duration(time.monotonic() - began)}"
        if rag.index.contents.stats().passages:
            print_note(
                f"the files are read {took}: `ragkv ask` finds passages by their words from now on."
            )

    # Failures are in the report; pypdf's warnings do not name the file.
    with (
        output.quiet("ragkv.rag.files"),
        output.quiet("pypdf"),
        output.progress("reading") as show,
    ):
        how = replace(how, on_file=on_file, on_indexed=on_indexed, on_embed=on_embed)
        return rag.corpus.ingest_files(paths, how, encode=False)


@dataclass(slots=True)
class _Speed:
    """How fast KV is computed, and how much of it is left."""

    rate: Rate = field(default_factory=Rate)
    left_bytes: float = 0.0

    @property
    def left(self) -> str:
        """How long the rest takes, as far as it is known."""
        return self.rate.left.removesuffix(" left")


def _encoded(
    rag: "Rag", index: "IngestReport", check: Check, limit_s: float
) -> "tuple[EncodeReport, _Speed]":
    """Compute KV until it is complete, the time is over, the store is full, or it is stopped."""
    ends = time.monotonic() + limit_s
    speed = _Speed()
    lacking_bytes = 0
    is_said = limit_s <= BY_DEFAULT_S  # that it takes long: the line at the end comes soon

    def go_on() -> None:
        check()
        if time.monotonic() > ends:
            raise DeadlineError(f"The {duration(limit_s)} are over.")

    def on_begin(chunks: int, nbytes: int) -> None:
        nonlocal lacking_bytes
        lacking_bytes = nbytes
        speed.left_bytes = nbytes
        speed.rate.update(0, chunks)

    def on_encode(done: int, total: int) -> None:
        nonlocal is_said
        speed.rate.update(done, total)
        speed.left_bytes = lacking_bytes * (total - done) / total
        if not is_said and speed.left:
            is_said = True
            print_note(
                f"KV of {counted(total - done, 'passage')} more, {output.size(speed.left_bytes)}"
                f"{speed.left}; Ctrl-C keeps what is done."
            )
        show(done, total, "computing KV, chunks")

    with output.progress("computing KV") as show:
        documents = (*index.added, *index.changed, *index.unchanged)
        return rag.corpus.encode(documents, on_encode, go_on, on_begin), speed


def _show(report: "RagIngestReport", passages: int) -> None:
    """Print the counts, then the files that were not read, with the reasons."""
    index = report.index
    counts = ", ".join(f"{count} {status}" for status, count in _counts(report).items() if count)
    console.print(f"Files: {counts or 'none'}.")
    documents = {
        "added": index.added,
        "changed": index.changed,
        "unchanged": index.unchanged,
        "deleted": index.deleted,
    }
    parts = ", ".join(f"{len(ids)} {what}" for what, ids in documents.items() if ids)
    console.print(f"Documents: {parts or 'none'}. In the index: {counted(passages, 'passage')}.")
    ignored: dict[str, list[str]] = {}
    for outcome in report.files:
        if outcome.status in ("ignored", "gone"):
            ignored.setdefault(f"{outcome.status}, {outcome.reason}", []).append(outcome.path)
    for what, paths in ignored.items():
        more = f" and {len(paths) - NAMED} more (--json names all)" if len(paths) > NAMED else ""
        console.print(f"{what}: {', '.join(paths[:NAMED])}{more}")
    for outcome in report.files:
        if outcome.status == "failed":
            console.print(f"failed: {outcome.reason}")
        elif outcome.reason and outcome.status not in ("ignored", "gone"):
            console.print(f"{outcome.status}: {outcome.path}: {outcome.reason}")


def _counts(report: "RagIngestReport") -> dict[str, int]:
    counted = Counter(outcome.status for outcome in report.files)
    return {status: counted[status] for status in STATUSES}  # type: ignore[index]
