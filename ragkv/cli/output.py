"""Prints results: JSON, notes, sizes, times and progress bars."""

import dataclasses
import json
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ragkv.errors import CancelledError
from ragkv.runtime import Rate, counted, duration
from ragkv.types import Answer, Reuse

if TYPE_CHECKING:
    from ragkv.retrieval import Hit, Passage

# In a log, where no bar is shown: the time before its first line, and between two lines.
FIRST_LINE_S = 2.0
LINE_EVERY_S = 10.0
BEGAN = time.monotonic()  # of this command, as nearly as it can know
INTERRUPTED = 130  # A command that Ctrl-C ended has this exit status.
# These are all control characters but tab and line feed.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class LiteralConsole(Console):
    """Prints texts as they are: answers, names and errors may hold `[dense]`, which is no markup
    here.

    Control characters, by which a document could steer the terminal, are replaced.
    """

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, *args: Any, **kwargs: Any) -> Text:
        return super().render_str(_CONTROL.sub("\ufffd", text), *args, **kwargs)


console = LiteralConsole()
errors = LiteralConsole(stderr=True)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    console.file.write(json.dumps(value, ensure_ascii=False, indent=2, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    """What JSON has no type for: dataclasses and mappings as dicts, paths as texts."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(value) if isinstance(value, Mapping) else str(value)


def print_note(text: str) -> None:
    """Print on standard error what the user should know."""
    errors.print(f"note: {text}", style="yellow")


def print_error(error: Exception) -> None:
    """Print on standard error why a command failed."""
    errors.print(f"error: {error}")


def size(count: float) -> str:
    """A number of bytes with its unit, such as 128 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"


def place(passage: "Passage") -> str:
    """Where a passage is from: its document, and its page if it has pages, else its place among the
    characters.
    """
    where = (
        "characters {}-{}".format(*passage.span) if passage.page is None else f"page {passage.page}"
    )
    return f"{passage.source or passage.document_id} ({where})"


def print_sources(hits: "Sequence[Hit]", answer: Answer) -> None:
    """Print the passages of an answer with their numbers in the prompt, the best first; a cited one
    is marked.
    """
    cited = {citation.chunk for citation in answer.citations}
    for number, hit in sorted(enumerate(hits), key=lambda one: one[1].rank):
        mark = "*" if number in cited else " "
        console.print(f" {mark} [{number + 1}] {place(hit.passage)}")


def print_reuse(answer: Answer, total_s: float | None = None) -> None:
    """Print what was reused, the time to the first token and that of the whole command; then the
    report's notes.
    """
    reuse = answer.reuse
    read = ", ".join(
        f"{size(count)} from {tier}" for tier, count in reuse.bytes_by_tier.items() if count
    )
    line = (
        f"{counted(reuse.tokens, 'token')}: {counts(reuse)} · first token "
        f"{milliseconds(answer.timing.first_token_s)}"
    )
    line += "" if total_s is None else f" · in all {duration(total_s)}"
    console.print(line + (f" · read {read}" if read else ""), style="dim")
    for note in reuse.notes:
        print_note(note)


def counts(reuse: Reuse) -> str:
    """The four disjoint token counts."""
    return (
        f"{reuse.exact} exact, {reuse.fused} fused, {reuse.recomputed} recomputed, "
        f"{reuse.computed} computed"
    )


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Suppress the warnings of the logger `name`."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class Stop:
    """A check that raises `CancelledError` from the first Ctrl-C or SIGTERM on; a second one ends
    the process.
    """

    def __init__(self, why: str) -> None:
        self._why = why
        self.is_set = False

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __call__(self) -> None:
        if self.is_set:
            raise CancelledError(self._why)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: object) -> None:
        self.is_set = True
        signal.signal(number, self._before[signal.Signals(number)])


@contextmanager
def working(label: str) -> Iterator[None]:
    """A moving mark on standard error for work that cannot say how far it is; in a log a line, if
    it takes longer.
    """
    if errors.is_terminal:
        with errors.status(label):
            yield
        return
    telling = threading.Timer(FIRST_LINE_S, lambda: errors.print(f"{label} ..."))
    telling.daemon = True
    telling.start()
    try:
        yield
    finally:
        telling.cancel()


@contextmanager
def progress(label: str) -> Iterator[Callable[..., None]]:
    """A bar on standard error; in a log a line now and then, with the rate and the time left.

    Call the function with (done, total), or with (done, total, label) where several kinds of work
    follow each other.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    rate = Rate()
    last = (0, 0)
    next_line = time.monotonic() + FIRST_LINE_S
    with Progress(*columns, console=errors, disable=not errors.is_terminal, transient=True) as bar:
        task = bar.add_task(label, total=None)

        def update(done: int, total: int, what: str = label) -> None:
            nonlocal rate, last, next_line
            bar.update(task, completed=done, total=total, description=what)
            if total != last[1] or done < last[0]:
                rate = Rate()  # another kind of work begins
            last = done, total
            rate.update(done, total)
            if not errors.is_terminal and time.monotonic() >= next_line:
                next_line = time.monotonic() + LINE_EVERY_S
                speed = f", {rate.per_s:.1f}/s{rate.left}" if rate.per_s else ""
                errors.print(f"{what}: {done} of {total}{speed}")
                errors.file.flush()

        yield update
