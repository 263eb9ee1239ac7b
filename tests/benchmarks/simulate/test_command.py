"""`python -m benchmarks.simulate`: exact integers, and errors in one sentence."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from benchmarks.simulate import xi_blocks
from benchmarks.simulate.__main__ import simulate
from benchmarks.simulate.command import run
from ragkv.errors import RagKVError

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
        app, ["--trace", str(rows), "--policy", "lru,t-lru,tail-belady", *arguments], catch_exceptions=False
    )
    names = ("policy", "uncached_blocks", "tel_blocks", "max_uncached_blocks")
    assert [tuple(report[name] for name in names) for report in json.loads(done.stdout)] == [
        ("lru", 400, 50, 200),
        ("t-lru", 350, 0, 150),
        ("tail-belady", 350, 0, 150),
    ]


def test_the_table_names_the_trace_the_capacity_and_every_policy(rows: Path) -> None:
    done = CliRunner().invoke(app, ["--trace", str(rows), "--policy", "lru,fifo", "--capacity-share", "1"])
    assert done.exit_code == 0
    for word in ("rows.csv", "1.00 of peak live", "simulated", "lru", "fifo", "P95"):
        assert word in done.stdout


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
def test_a_wrong_option_is_refused_in_one_sentence(rows: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(RagKVError, match=says) as error:
        run(str(rows), **{"policies": "lru", **options}, as_json=True, console=Console())  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("xi_ms", "blocks"), [(100, 62), (200, 125), (300, 187), (0, 0)])
def test_a_ttft_target_becomes_whole_blocks(xi_ms: float, blocks: int) -> None:
    assert xi_blocks(xi_ms, 16) == blocks
