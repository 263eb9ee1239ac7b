"""The recorded dialogue of benchmarks/openwebui.py, and the rows that the benchmark prints."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from benchmarks import openwebui
from ragkv import Engine, EngineConfig, StoreConfig
from tests.api.helpers import app_on
from tests.api.whole import needs_reader

pytestmark = needs_reader


@pytest.fixture(scope="module")
def loaded() -> Iterator[Engine]:
    with Engine.from_pretrained("reader", EngineConfig(store=StoreConfig(memory_bytes=0))) as engine:
        yield engine


def test_every_turn_has_its_own_passages_in_the_system_message_and_the_dialogue_so_far(
    loaded: Engine, tmp_path: Path
) -> None:
    with TestClient(app_on(loaded, tmp_path), base_url="http://localhost") as client:
        client.post("/v1/collections", json={"name": "docs"})
        client.post("/v1/collections/docs/documents", json={"documents": openwebui.documents()})
        turns = openwebui.recorded(client, openwebui.questions())
    assert len(turns) == openwebui.TURNS >= 6
    systems = [messages[0]["content"] for messages in turns]
    assert len(set(systems)) == len(systems) and all(text.count("<source ") == openwebui.PASSAGES for text in systems)
    assert [len(messages) for messages in turns] == [2 * number for number in range(1, len(turns) + 1)]
    for earlier, later in itertools.pairwise(turns):
        assert later[1:-2] == earlier[1:], "what was said is sent again"


def test_each_row_has_a_time_by_mode_and_most_of_a_prompt_is_reused(loaded: Engine) -> None:
    rows = openwebui.measured(loaded, runs=1)
    assert len(rows) == openwebui.TURNS
    for row in rows:
        assert all(row[mode] > 0.0 for mode in openwebui.MODES) and row["tokens"] > 50
    assert max(row["reused"] for row in rows[1:]) > 0.4
