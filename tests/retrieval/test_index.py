"""The index: cost and reports of ingestion, traces after deletion, persistence, refused input."""

import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.errors import (
    ConfigError,
    DocumentError,
    InputError,
    ModelError,
    StoreError,
    StoreLockedError,
    StoreReadOnlyError,
)
from ragkv.retrieval import Document, Index
from ragkv.retrieval.embedders import Vectors
from tests.retrieval.fakes import HashEmbedder, word_splitter
from tests.scheduling.helpers import together

A = Document("a", "red fish\n\nblue fish", metadata={"n": 1})
B = Document("b", "old bread\n\nnew bread")


@pytest.fixture
def embedder() -> HashEmbedder:
    return HashEmbedder()


@pytest.fixture
def index(tmp_path: Path, embedder: HashEmbedder) -> Iterator[Index]:
    with Index(tmp_path / "index", splitter=word_splitter(2), embedder=embedder) as index:
        yield index


def test_new_documents_are_added_and_their_passages_reported(index: Index) -> None:
    report = index.writer.ingest([A, B])
    assert (report.added, report.changed, report.unchanged, report.deleted) == (
        ("a", "b"),
        (),
        (),
        (),
    )
    assert [p.text for p in index.contents.passages()] == [
        "red fish",
        "blue fish",
        "old bread",
        "new bread",
    ]
    assert (report.removed_passages, report.forgotten_passages, report.embedded_texts) == (
        (),
        (),
        4,
    )


def test_an_unchanged_document_is_neither_split_nor_embedded(
    index: Index, embedder: HashEmbedder
) -> None:
    index.writer.ingest([A, B])
    index.search("fish")
    written = (Path(index.directory or "") / "index.sqlite").stat().st_mtime_ns
    report = index.writer.ingest([A, B])
    assert (report.unchanged, report.embedded_texts, report.removed_passages) == (("a", "b"), 0, ())
    assert len(embedder.embedded) == 4
    assert (Path(index.directory or "") / "index.sqlite").stat().st_mtime_ns == written


def test_only_what_changed_in_a_document_is_embedded(index: Index, embedder: HashEmbedder) -> None:
    index.writer.ingest([A, B])
    report = index.writer.ingest([Document("a", "one fish\n\nblue fish", metadata={"n": 1})])
    assert (report.changed, report.added) == (("a",), ())
    assert (
        [p.text for p in report.removed_passages]
        == [p.text for p in report.forgotten_passages]
        == ["red fish"]
    )
    assert embedder.embedded[4:] == ["one fish"]
    assert [p.text for p in index.contents.passages("a")] == ["one fish", "blue fish"]
    assert index.search("red", retriever="bm25") == []


def test_changed_metadata_is_seen_by_filters_and_embeds_nothing(
    index: Index, embedder: HashEmbedder
) -> None:
    index.writer.ingest([A])
    report = index.writer.ingest([Document("a", A.text, metadata={"n": 2})])
    assert (report.changed, report.removed_passages) == (("a",), ())
    assert len(embedder.embedded) == 2
    assert index.search("fish", where={"n": 1}) == []
    assert len(index.search("fish", where={"n": 2})) == 2


def test_a_different_splitter_makes_every_document_changed(tmp_path: Path) -> None:
    for tokens, expected in ((2, 2), (4, 1)):
        with Index(tmp_path, splitter=word_splitter(tokens)) as index:
            report = index.writer.ingest([A])
            assert len(index.contents.passages()) == expected
    assert report.changed == ("a",)


def test_a_deleted_document_leaves_no_trace_in_any_file(index: Index) -> None:
    index.writer.ingest([Document("a", "zanzibar spices"), B])
    index.search("zanzibar")
    removal = index.writer.delete(["a", "a", "never there"])
    assert removal.deleted == ("a",)
    assert (
        [p.text for p in removal.removed_passages]
        == [p.text for p in removal.forgotten_passages]
        == ["zanzibar spices"]
    )
    assert index.contents.document("a") is None
    assert index.search("zanzibar", retriever="bm25") == []
    left = [file for file in Path(index.directory or "").rglob("*") if file.is_file()]
    assert not [file for file in left if b"zanzibar" in file.read_bytes()]


def test_a_shared_passage_is_embedded_once_found_once_and_outlives_one_of_its_documents(
    index: Index, embedder: HashEmbedder
) -> None:
    index.writer.ingest(
        [Document("x", "same words"), Document("y", "same words", metadata={"n": 2})]
    )
    assert embedder.embedded == ["same words"]
    assert len({p.id for p in index.contents.passages()}) == 2
    (hit,) = index.search("same words")
    assert hit.passage.document_id == "x"
    (hit,) = index.search("same words", where={"n": 2})
    assert hit.passage.document_id == "y", "the first that meets the filter"
    removal = index.writer.delete("x")
    # the KV of the text is still needed
    assert (len(removal.removed_passages), removal.forgotten_passages) == (1, ())
    (hit,) = index.search("same words")
    assert hit.passage.document_id == "y"
    assert len(index.writer.delete("y").forgotten_passages) == 1


def test_a_repeated_text_in_one_document_is_two_passages_with_their_own_spans(index: Index) -> None:
    index.writer.ingest([Document("x", "same words\n\nsame words")])
    (hit,) = index.search("same words")
    assert hit.passage.span == (0, 10)
    assert [p.span for p in index.contents.passages()] == [(0, 10), (12, 22)]


def test_the_same_document_passed_twice_counts_once_and_two_with_one_id_are_refused(
    index: Index,
) -> None:
    assert index.writer.ingest([A, A]).added == ("a",)
    with pytest.raises(InputError, match="Two different documents have the id 'a'"):
        index.writer.ingest([A, Document("a", "else")])


def test_an_ingestion_that_fails_changes_nothing(index: Index) -> None:
    index.writer.ingest([A])

    def documents() -> Iterator[Document]:
        yield B
        raise DocumentError("unreadable")

    with pytest.raises(DocumentError):
        index.writer.ingest(documents())
    assert index.contents.document_ids() == ["a"]
    with pytest.raises(DocumentError, match="not JSON"):
        index.writer.ingest([B, Document("c", "text", metadata={"when": object()})])
    assert index.contents.document_ids() == ["a"]


def test_half_a_surrogate_pair_is_an_error_in_a_document_and_harmless_in_a_query(
    index: Index,
) -> None:
    for bad in (
        Document("c", "half \ud800"),
        Document("c\udcff", "x"),
        Document("c", "x", metadata={"k": "\ud800"}),
    ):
        with pytest.raises(DocumentError, match="half a character"):
            index.writer.ingest([A, bad])
    assert index.contents.document_ids() == []
    index.writer.ingest([A])
    assert len(index.search("fish \udcff")) == 2


def test_an_interrupted_ingestion_keeps_the_vectors_computed_so_far(tmp_path: Path) -> None:
    class Tiring(HashEmbedder):
        def embed_texts(self, texts, check, tenant):  # type: ignore[no-untyped-def]
            if len(self.embedded) >= 64:
                raise KeyboardInterrupt
            return super().embed_texts(texts, check, tenant)

    many = [Document(str(i), f"number {i}") for i in range(100)]
    with Index(tmp_path, splitter=word_splitter(), embedder=Tiring()) as index:
        with pytest.raises(KeyboardInterrupt):
            index.writer.ingest(many)
        assert (
            index.contents.document_ids(),
            index.search("number"),
            index.contents.stats().texts,
        ) == ([], [], 0)
    with Index(tmp_path, splitter=word_splitter(), embedder=HashEmbedder()) as index:
        assert index.writer.ingest(many).embedded_texts == 100 - 64


def test_reopening_restores_everything_without_embedding_or_pickling(tmp_path: Path) -> None:
    with Index(tmp_path, splitter=word_splitter(2), embedder=HashEmbedder()) as index:
        index.writer.ingest([A, B])
        before = {
            name: index.search("blue bread", retriever=name) for name in ("bm25", "dense", "hybrid")
        }
    embedder = HashEmbedder()
    with Index(tmp_path, embedder=embedder, read_only=True) as index:
        assert {name: index.search("blue bread", retriever=name) for name in before} == before
        assert (index.contents.document("a"), index.contents.document_ids()) == (A, ["a", "b"])
        assert index.contents.stats().embedder == "hash"
    assert embedder.embedded == []
    assert not [f for f in tmp_path.rglob("*") if f.suffix in (".pkl", ".pickle", ".pt")]


def test_documents_ingested_by_another_process_are_found_at_the_next_search(tmp_path: Path) -> None:
    with (
        Index(tmp_path, splitter=word_splitter()) as index,
        Index(tmp_path, read_only=True) as reader,
    ):
        assert reader.search("fish") == []
        index.writer.ingest([A])
        assert [hit.passage.document_id for hit in reader.search("fish")] == ["a"]
        index.writer.delete("a")
        assert reader.search("fish") == []


def test_without_an_embedder_bm25_works_alone_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "ragkv"),
        Index(tmp_path, splitter=word_splitter()) as index,
    ):
        report = index.writer.ingest([A])
        assert report.embedded_texts == 0
        assert len(index.search("fish", retriever="bm25")) == 1
        assert not caplog.text, "who asks for BM25 is not warned of it"
        assert len(index.search("fish")) == 1
        index.search("fish")
        assert index.writer.notice is not None
        assert "BM25 alone" in index.writer.notice
    assert caplog.text.count("BM25 alone") == 1


def test_texts_ingested_without_an_embedder_get_their_vectors_at_the_next_ingestion(
    tmp_path: Path,
) -> None:
    with Index(tmp_path, splitter=word_splitter()) as index:
        index.writer.ingest([A])
    with Index(tmp_path, splitter=word_splitter(), embedder=HashEmbedder()) as index:
        assert index.writer.notice is not None
        assert "1 of 1 text found by BM25 only" in index.writer.notice
        assert index.search("fish", retriever="dense") == []
        assert index.writer.ingest([A]).embedded_texts == 1
        assert len(index.search("fish", retriever="dense")) == 1
        assert index.writer.notice is None


def test_a_different_embedder_is_refused_with_both_names(tmp_path: Path) -> None:
    with Index(tmp_path, splitter=word_splitter(), embedder=HashEmbedder(64)) as index:
        index.writer.ingest([A])
    with pytest.raises(
        ConfigError, match=r"vectors of hash \(64 dimensions, hash:64:None\), not of hash \(hash:32"
    ):
        Index(tmp_path, embedder=HashEmbedder(32))


def test_an_embedder_that_changes_its_width_is_named(tmp_path: Path) -> None:
    embedder = HashEmbedder(64)
    with Index(tmp_path, splitter=word_splitter(), embedder=embedder) as index:
        index.writer.ingest([A])
        embedder._dimension = 32
        with pytest.raises(
            ModelError, match=r"hash gave a vector of shape \(32,\) where the index has 64"
        ):
            index.search("fish")


def test_progress_is_reported_from_zero_to_all_texts(index: Index) -> None:
    seen: list[tuple[int, int]] = []
    index.writer.ingest([A, B], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 4), (4, 4)]


def test_a_read_only_index_must_exist_and_refuses_writes(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No index at"):
        Index(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()
    with Index(tmp_path, splitter=word_splitter()) as index:
        index.writer.ingest([A])
    with Index(tmp_path, splitter=word_splitter(), read_only=True) as index:
        for write in (lambda: index.writer.ingest([B]), lambda: index.writer.delete("a")):
            with pytest.raises(StoreReadOnlyError):
                write()


def test_a_second_writer_in_another_process_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    from filelock import FileLock

    with Index(tmp_path, splitter=word_splitter()) as index:
        index.writer.ingest([A])
        with FileLock(tmp_path / "writer.lock"):  # as another process holds it
            with pytest.raises(StoreLockedError, match="Another process is writing"):
                index.writer.ingest([B])
            assert len(index.search("fish")) == 1
        index.writer.ingest([B])


def test_a_file_that_is_no_database_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match="damaged: delete the directory"):
        Index(tmp_path)


def test_an_index_of_a_later_format_is_refused(tmp_path: Path) -> None:
    Index(tmp_path).close()
    with sqlite3.connect(tmp_path / "index.sqlite") as connection:
        connection.execute("UPDATE facts SET value = '99' WHERE name = 'format'")
    connection.close()
    with pytest.raises(StoreError, match="has format 99"):
        Index(tmp_path)


def test_a_full_disk_is_an_error_that_leaves_the_index_unchanged(tmp_path: Path) -> None:
    with Index(tmp_path, splitter=word_splitter()) as index:
        index.writer.ingest([A])
        pages = index.file.rows("PRAGMA page_count")[0][0]
        index.file.rows(f"PRAGMA max_page_count = {pages}")  # SQLite then reports a full disk
        with pytest.raises(StoreError, match="Free some space"):
            index.writer.ingest([Document("big", "word " * 100_000)])
        assert index.contents.document_ids() == ["a"]
        assert len(index.search("fish")) == 1


def test_searches_and_ingestions_in_many_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    with Index(tmp_path, splitter=word_splitter(2), embedder=HashEmbedder()) as index:
        index.writer.ingest([A])
        done = threading.Event()

        def search() -> None:
            while not done.is_set():
                hits = index.search("fish", k=3)
                assert len(hits) >= 2
                assert all("fish" in hit.passage.text for hit in hits[:2])

        def write() -> None:
            try:
                for round_ in range(8):
                    index.writer.ingest([Document("b", f"bread {round_}")])
                index.writer.delete("b")
            finally:
                done.set()

        together([search, search, search, write])


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
def test_the_index_directory_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    Index(tmp_path / "deep" / "index").close()
    assert (tmp_path / "deep" / "index").stat().st_mode & 0o077 == 0


def test_an_index_waits_at_the_embedder_for_the_turn_of_its_tenant() -> None:
    class Asked(HashEmbedder):
        def embed_texts(self, texts, check, tenant):  # type: ignore[no-untyped-def]
            tenants.append(tenant)
            return super().embed_texts(texts, check, tenant)

        def embed_query(self, query: str, tenant: str = "") -> Vectors:
            if query == "gulls":
                tenants.append(tenant)
            return super().embed_query(query, tenant)

    tenants: list[str] = []
    with Index(None, splitter=word_splitter(), embedder=Asked(), tenant="harbour") as index:
        index.writer.ingest([A])
        index.search("gulls")
    assert tenants == ["harbour", "harbour"]
