"""Forms of passages are known until their KV is deleted."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragkv.chat import catalogue
from ragkv.chat.catalogue import Forms, forms_file
from ragkv.errors import StoreError
from tests.scheduling.helpers import until


class Engine:
    """An engine whose disk fails while `fails`."""

    def __init__(self, directory: Path, model: str = "own") -> None:
        identity = SimpleNamespace(key=lambda _: SimpleNamespace(digest=model))
        self.encoder = SimpleNamespace(identity=identity)
        self.config = SimpleNamespace(
            store=SimpleNamespace(directory=str(directory), read_only=False)
        )
        self.entries = self
        self.fails = True
        self.deleted: list[Any] = []

    def delete(self, forms: list[Any]) -> None:
        if self.fails:
            raise StoreError("the disk failed")
        self.deleted += forms


def forms_of(directory: Path) -> Path:
    """The file of forms there."""
    return directory / forms_file(Engine(directory))  # type: ignore[arg-type]


def test_forms_of_another_model_stay_for_it_and_are_deleted_by_no_other(tmp_path: Path) -> None:
    other = Engine(tmp_path, "other")
    Forms(other).add((1_000_000,))  # type: ignore[arg-type]
    own = Engine(tmp_path)
    own.fails = other.fails = False
    Forms(own).add((1,))  # type: ignore[arg-type]
    Forms(own).delete()  # type: ignore[arg-type]
    Forms(other).delete()  # type: ignore[arg-type]
    assert own.deleted == [(1,)] and other.deleted == [(1_000_000,)]


def test_forms_whose_kv_could_not_be_deleted_are_deleted_the_next_time(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    forms: Any = Forms(engine)  # type: ignore[arg-type]
    forms.add((1, 2))
    with pytest.raises(StoreError):
        forms.delete()
    forms.add((3,))
    kept = forms_of(tmp_path).read_text().splitlines()
    assert [json.loads(line) for line in kept] == [[1, 2], [3]]
    engine.fails = False
    Forms(engine).delete()  # type: ignore[arg-type]
    assert engine.deleted == [(1, 2), (3,)]
    Forms(engine).delete()  # type: ignore[arg-type]
    assert len(engine.deleted) == 2, "none is left"


def test_a_question_is_answered_where_old_forms_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(catalogue, "MAX_TOKENS", 4)
    forms = Forms(Engine(tmp_path))  # type: ignore[arg-type]
    for number in range(6):
        forms.add((number,))
    said = "was not deleted (the disk failed): the next form tries again."
    until(lambda: said in caplog.text)


def test_no_question_waits_until_old_forms_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "MAX_TOKENS", 4)
    engine = Engine(tmp_path)
    engine.fails = False
    may_delete = threading.Event()
    delete = engine.delete

    def delete_later(forms: list[Any]) -> None:
        assert may_delete.wait(60)
        delete(forms)

    monkeypatch.setattr(engine, "delete", delete_later)
    forms = Forms(engine)  # type: ignore[arg-type]
    for number in range(6):
        forms.add((number,))
    forms.add((2,))  # it is used again
    may_delete.set()
    until(lambda: forms_of(tmp_path).read_text() == "[2]\n[5]\n")
    assert engine.deleted == [(number,) for number in range(5)]


def test_too_many_forms_are_deleted_after_the_next_one_was_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "MAX_TOKENS", 4)
    engine = Engine(tmp_path)
    engine.fails = False
    forms = Forms(engine)  # type: ignore[arg-type]
    for number in range(6):
        forms.add((number,))
    until(lambda: engine.deleted == [(number,) for number in range(5)])
    until(lambda: forms_of(tmp_path).read_text() == "[5]\n")


def test_a_form_after_a_line_that_was_cut_is_known_after_a_restart(tmp_path: Path) -> None:
    forms_of(tmp_path).write_text("[9]\n[1, 2")
    engine = Engine(tmp_path)
    engine.fails = False
    Forms(engine).add((3,))  # type: ignore[arg-type]
    Forms(engine).delete()  # type: ignore[arg-type]
    assert engine.deleted == [(9,), (3,)]
