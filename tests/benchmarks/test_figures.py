"""The papers' figures: what is charged, what is left out, and what each says of itself."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

figures = pytest.importorskip("benchmarks.figures")
from benchmarks import figures_conversations as conversations  # noqa: E402
from benchmarks.figure_bench import Bench, Figure, Kind, NotHereError  # noqa: E402
from benchmarks.queueing import QueueServer, serve  # noqa: E402
from benchmarks.simulate.workloads import GeneratedSession  # noqa: E402
from ragkv.control.profile import LengthFit, TierSpeed  # noqa: E402
from tests.reader import READER  # noqa: E402


def _bench(*, turns: list[tuple[int, int, int]], profiled_tokens: int, disk: TierSpeed) -> Any:
    """Turns of (number, history, new) in blocks of 16 tokens; a prefill of 1 ms a token."""
    return SimpleNamespace(
        trace=SimpleNamespace(
            turns=[
                SimpleNamespace(number=number, shared=history, prompt=history + new)
                for number, history, new in turns
            ]
        ),
        profiled_tokens=profiled_tokens,
        profile=SimpleNamespace(
            prefill=LengthFit(0.0, 1e-3, 1e-6),
            tiers={"disk": disk},
            layers=2,
            stored_bytes_per_token=100.0,
        ),
    )


def test_new_tokens_attend_to_a_history_that_is_loaded_meanwhile() -> None:
    fast = TierSpeed(0.0, 0.0)
    bench = _bench(turns=[(2, 30, 10)], profiled_tokens=10_000, disk=fast)
    ((number, left_out, history, new, all_s, new_s, *_),) = conversations.recomputation(bench)
    assert (number, left_out, history, new) == (2, 0, 480, 160)
    assert all_s == pytest.approx(0.64 + 0.64**2)
    assert new_s == pytest.approx(0.16 + 0.64**2 - 0.48**2), "the history's attention is charged"
    slow = TierSpeed(0.0, 1e-4)
    bench = _bench(turns=[(2, 30, 10)], profiled_tokens=10_000, disk=slow)
    ((*_, new_s, _, _),) = conversations.recomputation(bench)
    layer_s = 480 * 100 / 2 * 1e-4
    assert new_s == pytest.approx(3 * layer_s), "two layers, and the first one that nothing hides"


def test_a_fit_is_not_used_beyond_twice_what_it_saw() -> None:
    turns = [(2, 2, 2), (2, 90, 10), (3, 90, 10)]
    bench = _bench(turns=turns, profiled_tokens=64, disk=TierSpeed(0.0, 0.0))
    ((number, left_out, history, *_),) = conversations.recomputation(bench)
    assert (number, left_out, history) == (2, 1, 32)


def test_a_history_on_disk_takes_the_disk_s_time_and_in_an_inclusive_store_it_stays_there() -> None:
    sessions = [GeneratedSession(n * 100.0, ((5, 5, 1000.0), (5, 5, 0.0))) for n in range(3)]
    small = {"memory_tokens": 20, "disk_tokens": 100, "turn_ms": 0.0, "token_ms": 100.0}
    free = serve(sessions, "lru", QueueServer(**small))
    assert (free.from_memory, free.from_disk) == (0, 3)
    slow = serve(sessions, "lru", QueueServer(**small, disk_tokens_per_s=1.0))
    assert slow.prefill_s - free.prefill_s == pytest.approx(3 * (10 - 0.5)), "10 s, .5 s hidden"
    assert slow.recompute_s == free.recompute_s == pytest.approx(0.1 * (3 * 5 + 3 * 15))
    ours = serve(sessions, "lru", QueueServer(**small, inclusive=True))
    assert (ours.from_memory, ours.from_disk) == (0, 3)
    tight = {**small, "disk_tokens": 10}
    assert serve(sessions, "lru", QueueServer(**tight)).from_disk == 1
    assert serve(sessions, "lru", QueueServer(**tight, inclusive=True)).from_disk == 0


def test_a_token_costs_more_behind_a_long_history() -> None:
    server = QueueServer(1, 1, token_ms=1.0, key_share=0.01)
    assert server.prefill_s(10, behind=100) == pytest.approx(0.010 * (1 + 0.01 * 105))


def test_every_figure_says_what_it_is_and_has_as_many_headings_as_columns() -> None:
    assert all(isinstance(figure.kind, Kind) for figure in figures.FIGURES.values())
    assert all(figure.make.__doc__ for figure in figures.FIGURES.values())
    bench = SimpleNamespace(quick=True)
    (row,) = list(conversations.over_arrivals(bench))[:1]
    assert len(row) == len(figures.FIGURES["cachedattention 25"].headings.split())


@pytest.mark.parametrize(
    "name",
    [
        "cacheblend 2",
        "cacheblend 6",
        "cacheblend 15a",
        "cacheblend 15b",
        "cacheblend 16",
        "kcache table 1",
        "kcache table 4",
    ],
)
def test_a_measured_figure_has_as_many_columns_as_headings(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "qa").mkdir()
    articles = [
        {
            "title": f"Article {number}",
            "paragraphs": [
                {
                    "context": f"Firm {number}.{place} is old. Dana{place} leads it.",
                    "qas": [
                        {
                            "id": f"{number}-{place}",
                            "question": f"Who leads firm {place}?",
                            "answers": [{"text": f"Dana{place}"}],
                        }
                    ],
                }
                for place in range(5)
            ],
        }
        for number in range(12)
    ]
    (tmp_path / "qa" / "xquad.en.json").write_text(json.dumps({"data": articles}))
    monkeypatch.setenv("BENCHMARK_DATA", str(tmp_path))
    figure = figures.FIGURES[name]
    options = SimpleNamespace(model=READER, quick=True, trace="sharegpt-like", profile=None)
    bench = Bench(options)
    rows = list(figure.make(bench))
    bench.engine.close()
    assert rows and {len(row) for row in rows} == {len(figure.headings.split())}


def test_a_figure_without_its_data_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def missing(_: Any) -> Any:
        raise NotHereError("no sets")
        yield

    made = figures._made("a 1", Figure(missing, "x", Kind.MEASURED), SimpleNamespace())
    assert made == {"skipped": "no sets"}
    assert capsys.readouterr().out == "\na 1: skipped, no sets\n"
