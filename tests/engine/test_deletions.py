"""What is deleted while KV is computed is never stored after the deletion was answered."""

import threading
from typing import Any

import pytest

from ragkv import Engine
from ragkv.chat.catalogue import ChatDocument, ChunkCatalogue
from ragkv.scheduling.encoding import Encoder
from ragkv.store.durable import DurableTiers
from tests.scheduling.helpers import begin
from tests.sessions.helpers import engine_at

from .helpers import A, B, text_engine


def stored(engine: Engine) -> list[bool]:
    return [engine.entries.has(ids) for ids in (A, B)]


def test_a_chunk_that_is_deleted_while_it_is_computed_is_not_stored(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Encoder.chunks

    def deleted_meanwhile(*arguments: Any) -> Any:
        entries = compute(*arguments)
        engine.entries.delete([A])
        return entries

    with engine_at(tmp_path) as engine:
        monkeypatch.setattr(Encoder, "chunks", deleted_meanwhile)
        report = engine.entries.encode([A, B])
        assert (report.encoded, report.failed, report.left) == (1, 0, 0)
        assert stored(engine) == [False, True]
        monkeypatch.undo()
        assert engine.entries.encode([A]).encoded == 1, "asked for anew, it is stored anew"
        assert not engine.entries._watches


def test_a_chunk_that_is_deleted_before_its_turn_is_not_computed(tmp_path: Any) -> None:
    with engine_at(tmp_path) as engine:
        checks = iter([None, lambda: engine.entries.delete([B])])

        def check() -> None:
            if act := next(checks, None):
                act()

        report = engine.entries.encode([A, B], check=check)
        assert (report.encoded, report.left, stored(engine)) == (1, 0, [True, False])


def test_a_deletion_waits_for_an_entry_that_is_just_stored(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = DurableTiers.put
    deletions: list[threading.Thread] = []

    def slow(self: DurableTiers, entry: Any) -> bool:
        if not deletions:
            deletions.append(begin(lambda: engine.entries.delete([A])))
            deletions[0].join(0.2)
        return put(self, entry)

    with engine_at(tmp_path) as engine:
        monkeypatch.setattr(DurableTiers, "put", slow)
        engine.entries.encode([A])
        deletions[0].join(60)
        assert stored(engine) == [False, False]


def test_a_text_that_is_forgotten_while_known_texts_are_listed_is_not_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with text_engine() as engine:
        catalogue = ChunkCatalogue(engine)
        catalogue.register([ChatDocument("ab", {}), ChatDocument("cd", {})])
        real = engine.chunk

        def forgotten_meanwhile(text: Any, *rest: Any) -> Any:
            monkeypatch.setattr(engine, "chunk", real)
            catalogue.delete(["ab"])
            return real(text, *rest)

        monkeypatch.setattr(engine, "chunk", forgotten_meanwhile)
        catalogue.encode_ingested()
        engine.flush()
        assert engine.entries.has(real("cd").token_ids)
        assert not engine.entries.has(real("ab").token_ids)
