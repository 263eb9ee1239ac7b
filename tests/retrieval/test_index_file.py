"""Looking into an index while other processes change or delete it."""

import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ragkv.errors import CancelledError, ConfigError, StoreError
from ragkv.retrieval import Document, Index, Splitter, index_bytes, index_schema, look_into
from ragkv.retrieval.index_schema import FILE
from ragkv.runtime import PausingCheck

from .fakes import HashEmbedder, word_splitter


def test_a_look_into_an_index_that_is_deleted_at_the_same_moment_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    Index(folder).close()
    uri_of = index_schema._uri

    def deleted_first(*where: Any) -> str:
        shutil.rmtree(folder)
        return uri_of(*where)

    monkeypatch.setattr(index_schema, "_uri", deleted_first)
    with look_into(folder) as index:
        assert index is None
    assert not folder.exists()


def test_a_look_into_an_index_that_is_being_made_finds_none(tmp_path: Path) -> None:
    """SQLite writes the first page, without tables, when it is told how to give space back."""
    with closing(sqlite3.connect(tmp_path / FILE)) as made:
        made.execute("PRAGMA auto_vacuum = FULL")
    with look_into(tmp_path) as index:
        assert index_bytes(tmp_path) > 0 and index is None


def test_a_look_into_a_damaged_index_says_so(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(StoreError, match="damaged"), look_into(tmp_path):
        pass


def test_an_index_that_cannot_be_opened_leaves_no_file_open(tmp_path: Path) -> None:
    with Index(tmp_path / "good", splitter=word_splitter(), embedder=HashEmbedder(8)) as index:
        index.writer.ingest([Document("a", "word")])
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    before = list(Path("/proc/self/fd").iterdir())
    held: list[Exception] = []  # with the frames in which a connection would live on
    for folder in (tmp_path, tmp_path / "good"):
        with pytest.raises((StoreError, ConfigError)) as raised:
            Index(folder, embedder=HashEmbedder(16))
        held.append(raised.value)
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before)
    assert [type(error) for error in held] == [StoreError, ConfigError]


class Stop:
    """A check that ends its thread's work when it was asked `after` times."""

    def __init__(self, after: int) -> None:
        self.asked = 0
        self._after = after

    def __call__(self) -> None:
        self.asked += 1
        if self.asked > self._after:
            raise CancelledError("The request was cancelled.")


def test_a_cancelled_request_ends_a_query_and_a_transaction_in_the_middle(tmp_path: Path) -> None:
    documents = [
        Document(f"{n}", f"word {n}", metadata={f"a{k}": k for k in range(50)}) for n in range(300)
    ]
    with Index(tmp_path, Splitter(len, 100)) as index:
        index.writer.ingest(documents)
        where = {f"a{k}": {"gte": 0} for k in range(50)}
        query = Stop(3)
        with pytest.raises(CancelledError):
            index.search("word", 10, where=where, check=query)
        assert query.asked == 4
        before = index.contents.stats()
        writing = Stop(1)
        with pytest.raises(CancelledError):
            index.writer.delete([document.id for document in documents], check=writing)
        assert (index.contents.stats(), len(index.search("word", 10, where=where))) == (before, 10)


def test_work_that_pauses_between_steps_never_pauses_while_it_holds_the_index(
    tmp_path: Path,
) -> None:
    paused: list[int] = []
    stopping = Stop(1_000_000)
    check = PausingCheck(lambda: paused.append(stopping.asked), stopping)
    where = {f"a{k}": {"gte": 0} for k in range(50)}
    with Index(tmp_path, Splitter(len, 100)) as index:
        index.writer.ingest(
            [
                Document(f"{n}", f"word {n}", metadata={f"a{k}": k for k in range(50)})
                for n in range(300)
            ]
        )
        index.search("word", 10, where=where, check=check)
    assert stopping.asked > 3, "what only raises is asked while a statement runs"
    assert paused == [0, 0], "before and after the embedding of the query, and not later"


def test_metadata_is_stored_once_for_a_document_and_deleting_gives_its_space_back(
    tmp_path: Path,
) -> None:
    sizes = []
    for name, metadata in (("plain", {}), ("more", {"x": "y" * 20_000})):
        with Index(tmp_path / name, Splitter(len, 100)) as index:
            empty = index_bytes(tmp_path / name)
            index.writer.ingest(
                [Document("d", " ".join(f"w{n}" for n in range(9_000)), "s" * 1_000, metadata)]
            )
            assert (
                {passage.metadata["x"] for passage in index.contents.passages()} == {"y" * 20_000}
                if metadata
                else True
            )
            sizes.append(index_bytes(tmp_path / name))
            index.writer.delete("d")
            assert index_bytes(tmp_path / name) <= empty + 16_384
    assert sizes[1] - sizes[0] < 40_000


def test_a_cancelled_search_does_not_wait_for_the_index(tmp_path: Path) -> None:
    with Index(tmp_path, Splitter(len, 100)) as index:
        index.writer.ingest([Document("a", "word")])
        held = threading.Event()
        go_on = threading.Event()

        def hold() -> None:
            with index.file.locked():
                held.set()
                go_on.wait(60)

        holding = threading.Thread(target=hold)
        holding.start()
        assert held.wait(60)
        try:
            with pytest.raises(CancelledError):
                index.search("word", 1, check=Stop(0))
            assert holding.is_alive()
        finally:
            go_on.set()
            holding.join(60)
