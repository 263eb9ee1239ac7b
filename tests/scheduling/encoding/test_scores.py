"""Chunks are scored only where a selector needs scores."""

from pathlib import Path
from typing import Any

import pytest

from ragkv import FusionConfig, StoreConfig
from ragkv.model import Adapter
from tests.engine.helpers import A, B, C, Q, engine_of


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every layer that a model runs, from now on."""
    found: list[int] = []
    call_layer = Adapter.call_layer

    def counted(self: Adapter, layer: int, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(hidden.shape[1])
        return call_layer(self, layer, hidden, *args, **kwargs)

    monkeypatch.setattr(Adapter, "call_layer", counted)
    return found


def test_a_selector_without_scores_pays_for_none(rows: list[int]) -> None:
    spent = {}
    for selector in ("hkvd", "first-k", "sensitivity"):
        with engine_of(fusion=FusionConfig(selector=selector)) as engine:
            rows.clear()
            engine.warm([A, B, C])
            spent[selector] = sum(rows)
    assert spent["hkvd"] == spent["first-k"]
    assert spent["sensitivity"] > 2.5 * spent["hkvd"]


def test_a_request_for_a_selector_with_scores_has_them_made_for_the_next_one() -> None:
    with engine_of(fusion=FusionConfig(selector="hkvd")) as engine:
        engine.warm([A, B])
        first = engine.prefill(Q, [A, B], selector="sensitivity", ratio=0.5)
        assert any("no sensitivity scores" in note for note in first.reuse.notes)
        engine.flush()
        second = engine.prefill(Q, [A, B], selector="sensitivity", ratio=0.5)
        assert second.reuse.notes == ()
        assert second.reuse.recomputed > 0


def test_entries_with_scores_stay_usable_under_a_selector_without(tmp_path: Path) -> None:
    store = StoreConfig(directory=str(tmp_path))
    with engine_of(store=store, fusion=FusionConfig(selector="sensitivity")) as engine:
        assert engine.warm([A, B]).encoded == 2
    with engine_of(store=store, fusion=FusionConfig(selector="hkvd")) as engine:
        assert engine.warm([A, B]).present == 2
        assert engine.prefill(Q, [A, B], selector="sensitivity", ratio=0.5).reuse.notes == ()
