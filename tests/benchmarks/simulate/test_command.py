"""`python -m benchmarks.simulate`: exact integers, and errors in one sentence."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from benchmarks.simulate import load_trace, xi_blocks
from benchmarks.simulate.__main__ import simulate
from benchmarks.simulate.command import run
from ragkv.control.profile import LengthFit
from ragkv.control.profile import save as save_profile
from ragkv.errors import RagKVError
from tests.control.profiles import profile

app = Typer()
app.command()(simulate)

FIGURE_1 = "t,request,conversation,in,sh,L\n0,0,A,100,0,100\n1,1,B,100,0,100\n2,2,A,200,100,200\n"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.csv").write_text(FIGURE_1)
    return tmp_path / "rows.csv"


def test_json_output_has_one_object_per_policy_with_the_exact_integers(rows: Path) -> None:
    arguments = ["--capacity-blocks", "100", "--xi", "2400", "--json"]
    done = CliRunner().invoke(
        app,
        ["--trace", str(rows), "--policy", "lru,t-lru,tail-belady", *arguments],
        catch_exceptions=False,
    )
    names = ("policy", "uncached_blocks", "tel_blocks", "max_uncached_blocks")
    assert [tuple(report[name] for name in names) for report in json.loads(done.stdout)] == [
        ("lru", 400, 50, 200),
        ("t-lru", 350, 0, 150),
        ("tail-belady", 350, 0, 150),
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"capacity_blocks": -1}, "capacity_blocks is -1"),
        ({"capacity_share": -1.0}, "capacity-share is -1"),
        ({}, "Give exactly one of --capacity-blocks"),
        ({"capacity_blocks": 1, "capacity_share": 1.0}, "Give exactly one of --capacity-blocks"),
        ({"capacity_blocks": 1, "xi": "soon"}, "'soon' is neither tokens"),
        ({"capacity_blocks": 1, "block_tokens": 0}, "block-tokens is 0"),
        ({"capacity_blocks": 1, "policies": "lru,lfu"}, "Unknown policy 'lfu'"),
        ({"capacity_blocks": 1, "policies": ","}, "names no policy"),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence(
    rows: Path, options: dict[str, object], says: str
) -> None:
    with pytest.raises(RagKVError, match=says) as error:
        run(str(rows), **{"policies": "lru", **options}, as_json=True, console=Console())  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_measured_profile_gives_the_times_and_the_threshold(rows: Path, tmp_path: Path) -> None:
    """A prefill of S tokens takes 20 + S ms, so 84 ms are four blocks of 16."""
    measured = profile(prefill=LengthFit(0.02, 0.001, 0.0))
    save_profile(measured, tmp_path)
    console = Console(file=StringIO())
    options: dict[str, Any] = dict(
        capacity_blocks=1, xi="84ms", profile=tmp_path / "profile.json", as_json=True
    )
    run(str(rows), "lru,t-lru", console=console, **options)
    for report in json.loads(console.file.getvalue()):  # type: ignore[attr-defined]
        longest = report["max_uncached_blocks"]
        assert report["p99_ms"] <= 20 + 16 * longest + 1e-6 and report["median_ms"] >= 20
    assert xi_blocks(84.0, 16, measured) == 4
    with pytest.raises(RagKVError, match="has no profile"):
        run(str(rows), "lru", console=console, **{**options, "profile": tmp_path / "none.json"})


SHAREGPT = [{"from": "human", "value": "x" * 60}, {"from": "gpt", "value": "y" * 68}]
WILDCHAT = [
    {"role": role, "content": "z" * size, "timestamp": time}
    for minute in (1, 2)
    for role, size, time in (
        ("user", 60, None),
        ("assistant", 68, f"2026-01-01T00:0{minute}:00+00:00"),
    )
]


@pytest.mark.parametrize(
    "row",
    [
        {"id": "a", "conversations": SHAREGPT * 2},
        {"conversation_hash": "a", "conversation": WILDCHAT},
    ],
)
def test_conversations_are_read_as_published(row: dict[str, Any], tmp_path: Path) -> None:
    """A turn has 15 and 17 tokens."""
    for name, text in (("a.json", json.dumps([row, row])), ("a.jsonl", json.dumps(row) + "\n")):
        (tmp_path / name).write_text(text)
    first, second = load_trace(str(tmp_path / "a.jsonl"), 16).turns
    assert (first.prompt, first.shared, first.length) == (1, 0, 2)
    assert (second.prompt, second.shared, second.length, second.since) == (3, 2, 4, 60.0)
    assert len(load_trace(str(tmp_path / "a.json"), 16).turns) == 4
    (tmp_path / "b.json").write_text('[{"text": "no conversation"}]')
    with pytest.raises(RagKVError, match="conversation 1: not of ShareGPT's"):
        load_trace(str(tmp_path / "b.json"), 16)


@pytest.mark.parametrize(("xi_ms", "blocks"), [(100, 62), (200, 125), (300, 187), (0, 0)])
def test_a_ttft_target_becomes_whole_blocks(xi_ms: float, blocks: int) -> None:
    assert xi_blocks(xi_ms, 16) == blocks
