"""What a reader must hold in mind: the files that are entered on the way to the first token.

Counted are files of `ragkv/` in which a function is called, in any thread, and all of their lines.
Kinds of value are the dataclasses and named tuples of ragkv that are made on the thread of the
question, from a passage's text to the first layer. Run with `-s` to see them.
"""

import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ragkv
from ragkv import Engine, EngineConfig
from ragkv.config import ControllerConfig
from ragkv.rag import Corpus, Rag
from tests.api.helpers import BARE, app_on, client_of, engine_of, filled
from tests.reader import READER
from tests.retrieval.fakes import HashEmbedder

ROOT = Path(ragkv.__file__).parent
CORPUS = Path(__file__).parents[1] / "examples" / "corpus"
IS_FUNCTION = 0x2  # of a code object: it has a namespace of its own, unlike a module's or class's
QUESTION = "Which pilots work in the harbour?"


class Entered:
    """The files of `ragkv/` in which a function was called, and the kinds of value made."""

    def __init__(self) -> None:
        self.files: set[Path] = set()
        self.kinds: set[str] = set()
        self._thread = threading.get_ident()
        self._computes = False  # whether the first layer was called

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """A profile function of Python."""
        code = frame.f_code
        if event != "call" or not code.co_flags & IS_FUNCTION:
            return
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT):
            self.files.add(path)
            self._computes |= code.co_name == "call_layer"
        elif code.co_filename == "<string>" and not self._computes:
            self._see_made(frame)

    def _see_made(self, frame: FrameType) -> None:
        """Note the class if the frame is the generated `__init__` or `__new__` of one of ours."""
        made = frame.f_locals.get("_cls") or type(frame.f_locals.get("self"))
        is_value = dataclasses.is_dataclass(made) or hasattr(made, "_fields")
        is_own = getattr(made, "__module__", "").startswith("ragkv.")
        if is_value and is_own and threading.get_ident() == self._thread:
            self.kinds.add(made.__qualname__)

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


class Watch:
    """Whose steps are counted now: a thread keeps its profile function for life, and works for
    later blocks as well.
    """

    current: Entered | None = None

    @classmethod
    def see(cls, *event: Any) -> None:
        """A profile function of Python."""
        if cls.current is not None:
            cls.current.see(*event)


@contextmanager
def entering(settle: Callable[[], object] = lambda: None) -> Iterator[Entered]:
    """What the block enters, also in threads that begin in it or in an earlier one. `settle` waits
    for them, and does not count.
    """
    entered = Watch.current = Entered()
    threading.setprofile(Watch.see)
    sys.setprofile(Watch.see)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        settle()
        threading.setprofile(None)
        Watch.current = None


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Entered]:
    """What is entered on a filled home: to open it, to a first token, and by a turn and by a chat
    request besides what an answer enters.
    """
    home = tmp_path_factory.mktemp("home")
    # An idle engine would measure a profile on another thread, sooner or later.
    config = EngineConfig(controller=ControllerConfig(measure=False))
    how: dict[str, Any] = dict(config=config, embedder=HashEmbedder(), chunk_tokens=128)
    with Rag(Corpus.open(home, READER, **how)) as rag:
        rag.corpus.ingest(CORPUS)
    with entering() as opening:
        rag = Rag(Corpus.open(home, READER, **how))
    with rag:
        rag.engine.flush()  # what opening stores is not written by the question
        with entering(rag.engine.parts.store.flush) as asking:
            stream = rag.stream(QUESTION, max_new_tokens=2)
            next(stream)
        list(stream)
        hits = rag.retrieve(QUESTION)
        with entering() as streaming:
            next(rag.engine.stream(QUESTION, rag.chunks_of(hits), max_new_tokens=2))
        with entering() as answering:
            rag.ask(QUESTION, max_new_tokens=2)
        with entering(rag.engine.flush) as turn:
            session = rag.engine.session("s")
            list(rag.engine.stream("Who?", rag.chunks_of(hits), session, max_new_tokens=2))
    asking.kinds = streaming.kinds
    answering.files |= asking.files
    chat = _chat(tmp_path_factory.mktemp("served"))
    return {
        "open": opening,
        "ask": asking,
        "turn": turn.without(answering),
        "chat": chat.without(answering),
    }


def _chat(home: Path) -> Entered:
    """What a second chat request over a collection enters, but for what another thread does every
    two seconds.
    """
    body = {
        "model": "reader:facts",
        "messages": [{"role": "user", "content": "Who built the mill of Oro?"}],
        "max_tokens": 2,
    }
    with (
        pytest.MonkeyPatch.context() as patch,
        Engine.from_pretrained(READER, BARE) as engine,
        entering() as entered,
        client_of(app_on(engine, home)) as client,
    ):
        patch.setattr("ragkv.api.documents.deletions.POLL_S", 600.0)
        filled(client)
        engine_of(client.app).flush()
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        entered.files = set()
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        found = entered.files
        entered.files = set()
    entered.files = found
    return entered


# The path may not grow. A file more than was measured is allowed: which one a thread enters in time
# differs from run to run. The aims are 50 files to open a home, 45 files of 8,000 lines to ask, 20
# more for a chat request, and 12 kinds of value.
@pytest.mark.parametrize(
    ("what", "files", "lines"),
    [("open", 50, 9_200), ("ask", 46, 8_230), ("turn", 12, 2_480), ("chat", 20, 4_850)],
)
def test_a_reader_need_not_hold_more_in_mind(
    paths: dict[str, Entered], what: str, files: int, lines: int
) -> None:
    print(f"\n{what}: {paths[what]}")
    assert len(paths[what].files) <= files
    assert paths[what].lines <= lines


def test_few_kinds_of_value_stand_between_text_and_tensor(paths: dict[str, Entered]) -> None:
    kinds = sorted(paths["ask"].kinds)
    print(f"\n{len(kinds)} kinds of value: {', '.join(kinds)}")
    assert len(kinds) <= 12
