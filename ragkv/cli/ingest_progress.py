"""How far an ingestion is, with a rate and the time left: a bar on a terminal, else a line into the log every 10 s."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, Progress, TextColumn

from ragkv.runtime import Rate

from . import output

if TYPE_CHECKING:
    from ragkv.retrieval.rag import FileProgress

LOG_EVERY_S = 10.0


class IngestProgress:
    """One ingestion of files: first they are read, then the KV of their chunks is computed."""

    def __init__(self, every_s: float = LOG_EVERY_S) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._reading, self._embedding, self._encoding = Rate(), Rate(), Rate()
        self._files = self._texts = ""
        self._line = "reading: looking for files"
        self._done, self._total = 0.0, 0.0

    def on_file(self, progress: "FileProgress") -> None:
        """Called before and after each file."""
        with self._lock:
            self._reading.update(progress.size, progress.size_total)
            self._done, self._total = progress.size, progress.size_total
            sizes = f"{output.size(progress.size)} of {output.size(progress.size_total)}"
            rate = f", {output.size(self._reading.per_s)}/s" if self._reading.per_s else ""
            name = f": {progress.path}" if progress.outcome is None else ""
            counts = f"{progress.files} of {progress.files_total} files, {sizes}"
            self._files = f"reading: {counts}{rate}{self._reading.left}{name}"
            self._line, self._embedding = self._files, Rate()

    def on_embed(self, done: int, total: int) -> None:
        """Called after each batch of passages that was embedded."""
        with self._lock:
            self._embedding.update(done, total)
            rate = f", {self._embedding.per_s:.1f}/s" if self._embedding.per_s else ""
            self._line = f"{self._files} ({done} of {total} passages embedded{rate}{self._embedding.left})"

    def on_encode(self, done: int, total: int) -> None:
        """Called after each chunk whose KV is stored."""
        with self._lock:
            self._encoding.update(done, total)
            self._done, self._total = done, total
            rate = f", {self._encoding.per_s:.1f} chunks/s" if self._encoding.per_s else ""
            self._line = f"encoding KV: {done} of {total} chunks{rate}{self._encoding.left}"

    @property
    def line(self) -> str:
        """What is being done."""
        with self._lock:
            return self._line

    @contextmanager
    def shown(self) -> Iterator[Self]:
        """Show the progress while the block runs: it is told also while one long file is parsed."""
        ended = threading.Event()
        show = self._show_bar if output.errors.is_terminal else self._write_lines
        thread = threading.Thread(target=show, args=(ended,), name="ragkv-progress", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join()

    def _write_lines(self, ended: threading.Event) -> None:
        while not ended.wait(self._every_s):
            output.errors.print(self.line)
            output.errors.file.flush()

    def _show_bar(self, ended: threading.Event) -> None:
        columns = (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=output.errors, transient=True) as bar:
            task = bar.add_task("", total=None)
            while not ended.wait(0.2):
                bar.update(task, description=self.line, completed=self._done, total=self._total or None)
