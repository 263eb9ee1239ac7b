"""What a reader must hold in mind: the files that are entered on the way to the first token.

Counted are files of `ragkv/` in which a function is called, in any thread, and all of their lines.
Run with `-s` to see them.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ragkv
from ragkv import EngineConfig
from ragkv.config import ControllerConfig
from ragkv.retrieval.rag import Rag
from tests.reader import READER
from tests.retrieval.fakes import HashEmbedder

ROOT = Path(ragkv.__file__).parent
CORPUS = Path(__file__).parents[1] / "examples" / "corpus"
IS_FUNCTION = 0x2  # of a code object: it has a namespace of its own, unlike a module's or class's


class Entered:
    """The files of `ragkv/` in which a function was called."""

    def __init__(self) -> None:
        self.files: set[Path] = set()

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """A profile function of Python."""
        code = frame.f_code
        if event == "call" and code.co_flags & IS_FUNCTION:
            path = Path(code.co_filename)
            if path.is_relative_to(ROOT):
                self.files.add(path)

    @property
    def lines(self) -> int:
        """All lines of these files."""
        return sum(len(file.read_text("utf-8").splitlines()) for file in self.files)

    def without(self, other: "Entered") -> "Entered":
        """Those that `other` did not enter."""
        rest = Entered()
        rest.files = self.files - other.files
        return rest

    def __str__(self) -> str:
        sizes = {
            os.path.relpath(file, ROOT): len(file.read_text("utf-8").splitlines())
            for file in self.files
        }
        names = ", ".join(f"{name} {sizes[name]}" for name in sorted(sizes))
        return f"{len(sizes)} files, {sum(sizes.values())} lines: {names}"


@contextmanager
def entering() -> Iterator[Entered]:
    """What the block enters, also in threads that begin in it."""
    entered = Entered()
    threading.setprofile(entered.see)
    sys.setprofile(entered.see)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Entered]:
    """What is entered on a filled home: to open it, to a first token, and by a turn besides."""
    home = tmp_path_factory.mktemp("home")
    # An idle engine would measure a profile on another thread, sooner or later.
    config = EngineConfig(controller=ControllerConfig(measure=False))
    how: dict[str, Any] = dict(config=config, embedder=HashEmbedder(), chunk_tokens=128)
    with Rag.open(home, READER, **how) as rag:
        rag.ingest(CORPUS)
    with entering() as opening:
        rag = Rag.open(home, READER, **how)
    with rag:
        with entering() as asking:
            hits = rag.retrieve("Which pilots work in the harbour?")
            stream = rag.stream("Which pilots work in the harbour?", hits, max_new_tokens=2)
            next(stream)
        list(stream)
        with entering() as turn:
            list(rag.stream("Who?", hits, rag.engine.session("s"), max_new_tokens=2))
    return {"open": opening, "ask": asking, "turn": turn.without(asking)}


# The path may not grow. The aims are 50 files to open a home, and 45 files of 8,000 lines to ask.
@pytest.mark.parametrize(
    ("what", "files", "lines"), [("open", 80, 15_400), ("ask", 66, 12_100), ("turn", 12, 2_400)]
)
def test_a_reader_need_not_hold_more_in_mind(
    paths: dict[str, Entered], what: str, files: int, lines: int
) -> None:
    print(f"\n{what}: {paths[what]}")
    assert len(paths[what].files) <= files
    assert paths[what].lines <= lines
