"""Questions over passages in new combinations."""

import json
from pathlib import Path

import pytest

combinations = pytest.importorskip("benchmarks.combinations")
from ragkv import Engine  # noqa: E402
from tests.engine.helpers import text_engine  # noqa: E402
from tests.reader import READER  # noqa: E402


def test_no_two_questions_have_the_same_passages_and_the_draw_is_always_the_same() -> None:
    found = combinations.drawn(200, 400, 4)
    assert len(found) == len({frozenset(places) for places in found}) == 200
    assert all(len(set(places)) == 4 and max(places) < 400 for places in found)
    assert found == combinations.drawn(200, 400, 4)


def test_passages_are_different_and_of_the_length_that_was_asked_for() -> None:
    with text_engine() as engine:
        chunks = combinations.chunks_of(engine, None, 50, 8)
    assert {len(chunk.token_ids) for chunk in chunks} == {8}
    assert len({chunk.token_ids for chunk in chunks}) > 40


def test_fused_reuses_what_came_in_any_combination_and_prefix_only_a_common_beginning() -> None:
    def reused(engine: Engine, way: str) -> list[float]:
        chunks = combinations.chunks_of(engine, None, 6, 70)
        orders = ((0, 1, 2), (2, 1, 0), (2, 0, 1))
        return [
            combinations.ask(engine, [chunks[at] for at in order], way)["reused"]
            for order in orders
        ]

    with text_engine() as base:
        fused = reused(base, "fused")
        prefix = reused(base, "prefix")
    assert fused[0] < 0.2 < 0.5 < fused[1]
    assert prefix[1] == prefix[0] < 0.2 < prefix[2] < 0.5


def test_the_curve_has_a_row_for_each_window() -> None:
    rows = [
        {"question": number, "way": way, "reused": 0.5, "compute": number, "first_token_s": 1.0}
        for number in range(combinations.WINDOW + 1)
        for way in combinations.WAYS
    ]
    first, second = combinations.summarized(rows)
    assert first[0] == "1 to 20" and second[0] == "21 to 21"
    assert first[1:] == [0.5] * 3 + [9.5] * 3 + [1.0] * 3


def test_a_run_writes_the_curve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.report.RESULTS", tmp_path)
    monkeypatch.setenv("BENCHMARK_DATA", str(tmp_path))
    given = ("--questions", "4", "--passages", "9", "--each", "2", "--tokens", "20")
    monkeypatch.setattr("sys.argv", ["combinations", "--model", READER, *given])
    combinations.main()
    assert "1 to 4" in capsys.readouterr().out
    rows = json.loads((tmp_path / "combinations.json").read_text())["results"]
    assert [row["way"] for row in rows] == ["fused", "prefix"] * 4
