"""`ragkv docs` and `ragkv search`."""

from pathlib import Path

import pytest

from ragkv.config import StoreConfig
from ragkv.store.opening import open_store

from .conftest import Run
from .test_commands import entries


@pytest.fixture
def ingested(run: Run, documents: Path) -> Path:
    (documents / "rows.jsonl").write_text(
        '{"id": "7", "text": "the rope was founded by ada", "town": "marl", "source": "rows"}\n'
    )
    assert run("ingest", documents).code == 0
    return documents


def test_the_list_has_every_document_with_its_passages_and_characters(
    run: Run, ingested: Path
) -> None:
    listed = run("docs", "list", "--json").json
    assert sorted(one["id"] for one in listed) == sorted(
        [str(ingested / name) for name in ("marl.md", "mill.txt", "rows.jsonl/7")]
    )
    assert all(one["passages"] == 1 and one["characters"] > 20 for one in listed)
    shown = run("docs", "list").out
    assert "3 documents." in shown and "rows.jsonl/7 (from rows)" in shown


def test_a_document_is_shown_by_its_id_or_by_the_end_of_its_path(run: Run, ingested: Path) -> None:
    for name in (str(ingested / "mill.txt"), "mill.txt", "docs/mill.txt", "./mill.txt"):
        assert (
            run("docs", "show", name).out.strip()
            == "The mill of Marl makes paper. It was founded in 1901."
        )
    assert run("docs", "show", "7", "--json").json["metadata"] == {"town": "marl"}


def test_a_name_that_no_document_or_more_than_one_has_is_refused(run: Run, ingested: Path) -> None:
    assert "ragkv docs list" in run("docs", "show", "ill.txt").err
    (ingested / "more").mkdir()
    (ingested / "more" / "mill.txt").write_text("the mill of the town")
    run("ingest", ingested)
    refused = run("docs", "delete", "mill.txt")
    assert refused.code == 1
    assert "2 documents end with 'mill.txt'" in refused.err and "more/mill.txt" in refused.err
    assert len(run("docs", "list", "--json").json) == 4


def test_a_deleted_document_leaves_no_passage_and_no_entry(
    run: Run, ingested: Path, tmp_path: Path
) -> None:
    assert entries(tmp_path / "home") == 3
    deleted = run("docs", "delete", "mill.txt", "7", "--json").json
    assert deleted == {
        "deleted": [str(ingested / "mill.txt"), str(ingested / "rows.jsonl/7")],
        "passages": 2,
    }
    assert entries(tmp_path / "home") == 1
    assert [Path(one["id"]).name for one in run("docs", "list", "--json").json] == ["marl.md"]


@pytest.mark.usefixtures("ingested")
def test_search_shows_the_best_passages_first_without_loading_a_model(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGKV_MODEL", "/nowhere")
    found = run("search", "mill paper", "--json").json["hits"]
    assert found[0]["passage"]["source"].endswith("mill.txt")
    assert [hit["rank"] for hit in found] == list(range(1, len(found) + 1))
    shown = run("search", "mill paper", "-k", "1").out
    assert "mill.txt (characters 0-53)" in shown and "makes paper" in shown and "[2]" not in shown


@pytest.mark.usefixtures("ingested")
def test_search_applies_filters_and_says_if_nothing_matches(run: Run) -> None:
    hits = run("search", "founded", "--where", "town=marl", "--json").json["hits"]
    (found,) = (hit["passage"]["document_id"] for hit in hits)
    assert found.endswith("/rows.jsonl/7")
    assert "no passage matches" in run("search", "founded", "--where", "town=irvburg").err


@pytest.mark.usefixtures("ingested")
def test_search_and_docs_read_a_home_that_another_process_writes(run: Run, tmp_path: Path) -> None:
    with open_store(StoreConfig(directory=str(tmp_path / "home" / "kv"))):
        for command in (("search", "mill"), ("docs", "list"), ("docs", "show", "7")):
            assert run(*command).code == 0
