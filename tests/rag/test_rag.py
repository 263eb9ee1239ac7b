"""`Rag` keeps index and store consistent: a text that leaves the index leaves the store."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.config import SchedulerConfig
from ragkv.entries import Entries
from ragkv.errors import CancelledError, DeadlineError, InputError, RagKVError
from ragkv.rag import Corpus, Rag, sweep
from ragkv.retrieval import Document
from ragkv.store.durable import DurableTiers
from tests.cli.conftest import model_folder  # noqa: F401 - a fixture
from tests.faults import raising

DOCUMENTS = [
    Document("a", "The town of Marl was founded by Ada Quill in 1820.", "a.txt", {"year": 1820}),
    Document("b", "The mill of Marl makes paper.", "b.txt", {"year": 1901}),
    Document("c", "The mill of Marl makes paper.", "c.txt", {"year": 1902}),
]


@pytest.fixture
def rag(model_folder: Path, tmp_path: Path) -> Iterator[Rag]:  # noqa: F811
    config = EngineConfig(store=StoreConfig(directory=str(tmp_path / "kv")))
    with (
        Engine.from_pretrained(model_folder, config) as engine,
        Rag(Corpus(engine, tmp_path / "index")) as rag,
    ):
        yield rag


def test_documents_that_share_a_text_share_an_entry(rag: Rag) -> None:
    assert rag.corpus.ingest(DOCUMENTS).kv.encoded == 2


def test_deleting_one_of_two_documents_with_a_text_keeps_its_entry(rag: Rag) -> None:
    rag.corpus.ingest(DOCUMENTS)
    entries = rag.engine.stats().store.tiers[-1].entries
    rag.corpus.delete("b")
    assert rag.engine.stats().store.tiers[-1].entries == entries
    rag.corpus.delete("c")
    for tier in rag.engine.stats().store.tiers:
        assert tier.entries == entries - 1, (
            "no document holds the text: its entry is gone from every tier"
        )


def test_a_sweep_deletes_entries_that_a_crash_between_index_and_store_left(rag: Rag) -> None:
    rag.corpus.ingest(DOCUMENTS)
    rag.index.writer.delete("a")  # as if the process died before it told the engine
    home = Path(rag.engine.config.store.directory or "").parent
    assert sweep(rag.engine, home) == 1
    assert rag.engine.stats().store.tiers[-1].entries == 1
    assert sweep(rag.engine, home) == 0


def test_a_sweep_knows_the_collections_of_a_server_and_its_tenants(rag: Rag) -> None:
    home = Path(rag.engine.config.store.directory or "").parent
    rag.corpus.ingest(DOCUMENTS[:1])
    for folder, tenant in ((home, ""), (home / "tenants" / "town", "town")):
        store = replace(rag.engine.config.store, directory=str(folder / "kv"), tenant=tenant)
        engine = rag.engine
        if tenant:
            engine = rag.engine.with_config(replace(rag.engine.config, store=store))
        with Corpus(engine, folder / "collections" / "c") as collection:
            collection.ingest(DOCUMENTS[1:])
            engine.entries.encode(["A text that no collection has."])
            engine.flush()
        if tenant:
            engine.close()
    held = rag.engine.stats().store.tiers[-1].entries
    assert sweep(rag.engine, home) == 2, "one text of each tenant"
    assert rag.engine.stats().store.tiers[-1].entries == (held or 0) - 1


def test_hits_come_in_the_order_that_is_asked_for_and_else_the_best_last(rag: Rag) -> None:
    rag.corpus.ingest(DOCUMENTS)
    best_first = rag.retrieve("paper of the mill of Marl", 3, order="score")
    in_order = rag.retrieve("paper of the mill of Marl", 3, order="document")
    best_last = rag.retrieve("the town of Marl", 3)
    found = [
        [hit.passage.document_id for hit in hits] for hits in (best_first, in_order, best_last)
    ]
    assert found == [["b", "a"], ["a", "b"], ["b", "a"]]


@pytest.mark.parametrize("how", [{"order": ""}, {"order": "best"}, {"retriever": ""}])
def test_an_unknown_order_or_retriever_is_refused(rag: Rag, how: dict[str, Any]) -> None:
    rag.corpus.ingest(DOCUMENTS)
    with pytest.raises(RagKVError, match=r"^Unknown (order|retriever) .* Known: "):
        rag.retrieve("paper of the mill of Marl", **how)


def test_a_filter_excludes_documents_that_do_not_match(rag: Rag) -> None:
    rag.corpus.ingest(DOCUMENTS)
    hits = rag.retrieve("Marl", 5, where={"year": {"gte": 1900}})
    assert {hit.passage.document_id for hit in hits} == {"b"}


def test_a_chunk_has_the_source_of_its_passage_as_metadata(rag: Rag) -> None:
    rag.corpus.ingest(DOCUMENTS)
    found = rag.ask("who makes paper?", 2, max_new_tokens=1)
    chunk = rag.chunk(found.hits[0].passage)
    assert (chunk.metadata["source"], chunk.metadata["document"], chunk.metadata["span"]) == (
        "b.txt",
        "b",
        (0, 29),
    )


def test_a_document_that_is_deleted_while_it_is_ingested_leaves_no_entry(
    rag: Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion is answered after its passages were read, and before any is computed."""
    lacking = Entries.lacking

    def deleted_meanwhile(self: Entries, chunks: Any) -> Any:
        found = lacking(self, chunks)
        rag.corpus.delete("a")
        return found

    monkeypatch.setattr(Entries, "lacking", deleted_meanwhile)
    assert rag.corpus.ingest(DOCUMENTS).kv.encoded == 1
    assert not rag.engine.entries.has(rag.engine.chunk(DOCUMENTS[0].text).token_ids)


def test_a_deadline_and_a_cancellation_end_the_search_of_a_question(rag: Rag) -> None:
    rag.corpus.ingest(DOCUMENTS)
    cancelled = threading.Event()
    cancelled.set()
    searched = rag.index.search
    checks: list[Any] = []

    def search(*arguments: Any, check: Any, **more: Any) -> Any:
        checks.append(check)
        check()
        return searched(*arguments, check=check, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rag.index, "search", search, raising=True)
        with pytest.raises(CancelledError):
            rag.ask("Who founded Marl?", cancel=cancelled)
        with pytest.raises(DeadlineError):
            list(rag.stream("Who founded Marl?", deadline_s=1e-9))
        hurried = replace(rag.engine.config, scheduler=SchedulerConfig(deadline_s=1e-9))
        patch.setattr(rag.engine.parts.intake, "_config", hurried)
        with pytest.raises(DeadlineError):
            rag.ask("Who founded Marl?")
    assert len(checks) == 3
    with pytest.raises(InputError, match="deadline_s must be"):
        rag.ask("Who founded Marl?", deadline_s="5")  # type: ignore[arg-type]


def test_the_search_counts_for_the_first_tokens_time(rag: Rag) -> None:
    rag.corpus.ingest(DOCUMENTS)
    searched = rag.index.search

    def search(*arguments: Any, **more: Any) -> Any:
        time.sleep(0.2)
        return searched(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rag.index, "search", search, raising=True)
        timing = rag.ask("Who founded Marl?", max_new_tokens=1).answer.timing
    assert timing.first_token_s >= 0.2 + timing.queue_s + timing.lookup_s


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(retreiver="bm25"), "Did you mean 'retriever'"),
        (dict(xyz=1), "order.*retriever.*where"),
        (dict(max_new_tokens=0), "max_new_tokens is 0"),
        (dict(ratio=2.0), "ratio"),
        (dict(order="worst"), "best-last"),
        (dict(session="alice"), "session"),
    ],
)
def test_a_wrong_option_is_refused_before_the_search(
    rag: Rag, options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(rag.index), "search", raising(AssertionError("it searched")))
    with pytest.raises(InputError, match=says):
        rag.ask("Who founded Marl?", **options)
    with pytest.raises(InputError, match=says):
        next(rag.stream("Who founded Marl?", **options))


def test_stop_strings_may_come_from_an_iterator(rag: Rag) -> None:
    rag.corpus.ingest(DOCUMENTS)
    whole = rag.ask("Who founded Marl?", max_new_tokens=8).answer.text
    stop = whole[len(whole) // 2]
    cut = rag.ask("Who founded Marl?", max_new_tokens=8, stop=iter([stop])).answer.text
    assert whole and cut == whole[: whole.index(stop)]


def test_a_deleted_conversation_is_refused_before_the_search(
    rag: Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = rag.engine.session("s")
    session.delete()
    monkeypatch.setattr(type(rag.index), "search", raising(AssertionError("it searched")))
    with pytest.raises(InputError, match="was deleted"):
        rag.ask("Who founded Marl?", session=session)


def test_a_follow_up_is_searched_with_the_question_that_another_replica_added(
    rag: Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other replica is simulated: once brought up to date, the session has the question."""
    rag.corpus.ingest(DOCUMENTS)
    session = rag.engine.session("s")
    monkeypatch.setattr(
        session, "bring_up_to_date", lambda: rag.engine.append(session, "Who founded Marl?", "Ada")
    )
    searched = rag.index.search
    queries: list[str] = []

    def search(query: str, *arguments: Any, **more: Any) -> Any:
        queries.append(query)
        return searched(query, *arguments, **more)

    monkeypatch.setattr(rag.index, "search", search)
    rag.ask("And when?", session=session, max_new_tokens=1)
    assert queries == ["who founded marl ?\nAnd when?"]  # as the tokenizer decodes it


def test_nothing_is_encoded_in_the_background_during_the_search(
    rag: Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    rag.corpus.ingest(DOCUMENTS)
    searched = rag.index.search
    busy: list[bool] = []

    def search(*arguments: Any, **more: Any) -> Any:
        busy.append(rag.engine.parts.idle_time.busy)
        return searched(*arguments, **more)

    monkeypatch.setattr(rag.index, "search", search)
    rag.ask("Who founded Marl?", max_new_tokens=1)
    assert busy == [True] and not rag.engine.parts.idle_time.busy


def test_what_ends_an_encoding_ends_it_while_passages_are_tokenized(
    rag: Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [document.id for document in DOCUMENTS]
    rag.corpus.ingest(DOCUMENTS, encode=False)
    tokenized = Engine.chunk
    texts: list[str] = []
    begun: list[tuple[int, int]] = []

    def chunk(engine: Engine, text: str) -> Any:
        texts.append(text)
        return tokenized(engine, text)

    def check() -> None:
        if texts:
            raise DeadlineError("The time is over.")

    monkeypatch.setattr(Engine, "chunk", chunk)
    report = rag.corpus.encode(ids, check=check, on_begin=lambda *lacks: begun.append(lacks))
    assert texts == [DOCUMENTS[0].text]
    assert (report.encoded, report.present, report.left) == (0, 0, 2)
    assert [lacks for lacks, _ in begun] == [2]
    assert rag.corpus.encode(ids).encoded == 2


def test_a_full_store_ends_an_encoding_without_a_look_up_of_each_chunk(
    rag: Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    rag.corpus.ingest(DOCUMENTS, encode=False)
    ensured = DurableTiers.ensure
    asked: list[Any] = []

    def ensure(tiers: DurableTiers, *arguments: Any) -> bool:
        asked.append(arguments)
        return ensured(tiers, *arguments)

    monkeypatch.setattr(DurableTiers, "ensure", ensure)
    monkeypatch.setattr(DurableTiers, "room_bytes", lambda _: 0)
    report = rag.corpus.encode([document.id for document in DOCUMENTS])
    assert (report.encoded, report.left, len(asked)) == (0, 2, 1)
