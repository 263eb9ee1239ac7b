"""`ragkv simulate`: exact integers, sizes in bytes and in blocks, and errors in one sentence."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ragkv.cli.app import app
from ragkv.errors import ConfigError, RagKVError
from ragkv.fusion.profile import LengthFit, LengthPoint, Profile, RecomputeFit, Subject, TierSpeed, save
from ragkv.lab.simulate import TokenTimes
from ragkv.lab.simulate.command import Options, run
from ragkv.lab.simulate.token_times import read_profile

FIGURE_1 = "t,request,conversation,in,sh,L\n0,0,A,100,0,100\n1,1,B,100,0,100\n2,2,A,200,100,200\n"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.csv").write_text(FIGURE_1)
    return tmp_path / "rows.csv"


def test_json_output_has_one_object_per_policy_with_the_exact_integers(rows: Path) -> None:
    arguments = ["--capacity-blocks", "100", "--xi", "2400", "--json"]
    done = CliRunner().invoke(
        app, ["simulate", "--trace", str(rows), "--policy", "lru,t-lru,tail-belady", *arguments], catch_exceptions=False
    )
    names = ("policy", "uncached_blocks", "tel_blocks", "max_uncached_blocks")
    assert [tuple(report[name] for name in names) for report in json.loads(done.stdout)] == [
        ("lru", 400, 50, 200),
        ("t-lru", 350, 0, 150),
        ("tail-belady", 350, 0, 150),
    ]


def test_the_table_names_the_trace_the_capacity_and_every_policy(rows: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", "--trace", str(rows), "--policy", "lru,fifo", "--capacity-share", "1"])
    assert done.exit_code == 0
    for word in ("rows.csv", "1.00 of peak live", "simulated", "lru", "fifo", "P95"):
        assert word in done.stdout


def test_a_capacity_in_bytes_gives_the_reports_of_the_same_capacity_in_blocks(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reports(**options: object) -> object:
        run(Options(str(rows), "lru", **options), True, Console())  # type: ignore[arg-type]
        return json.loads(capsys.readouterr().out)

    in_bytes = reports(memory="1600K", kv_bytes_per_token=1024, xi="200ms")
    assert in_bytes == reports(capacity_blocks=100, xi="2000") != reports(capacity_blocks=99, xi="2000")


def test_a_disk_below_memory_serves_the_blocks_that_memory_dropped(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"memory": "1600K", "disk": "16M", "kv_bytes_per_token": 1024}
    run(Options(str(rows), "lru", **sizes), True, Console())  # type: ignore[arg-type]
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["uncached_blocks"], report["memory_hit_rate"], report["disk_hit_rate"]) == (300, 0.0, 0.25)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"capacity_blocks": -1}, "capacity_blocks is -1"),
        ({"capacity_share": -1.0}, "capacity-share is -1"),
        ({}, "Give exactly one of --capacity-blocks"),
        ({"capacity_blocks": 1, "memory": "1G"}, "Give exactly one of --capacity-blocks"),
        ({"memory": "much"}, "'much' is no amount of bytes"),
        ({"capacity_blocks": 1, "xi": "soon"}, "'soon' is neither tokens"),
        ({"capacity_blocks": 1, "xi": "auto"}, "--xi auto needs the policy t-lru-auto"),
        ({"capacity_blocks": 1, "block_tokens": 0}, "block-tokens is 0"),
        ({"capacity_blocks": 1, "policies": "lru,lfu"}, "Unknown policy 'lfu'"),
        ({"capacity_blocks": 1, "policies": ","}, "names no policy"),
        ({"capacity_blocks": 1, "profile": Path("nowhere.json")}, "no profile in nowhere.json"),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence(rows: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(RagKVError, match=says) as error:
        run(Options(str(rows), **{"policies": "lru", **options}), True, Console())  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("xi_ms", "blocks"), [(100, 62), (200, 125), (300, 187), (0, 0)])
def test_a_ttft_target_becomes_whole_blocks(xi_ms: float, blocks: int) -> None:
    assert TokenTimes().xi_blocks(xi_ms, 16) == blocks


def test_the_fixed_cost_of_a_profile_reduces_the_blocks_within_a_ttft_target() -> None:
    assert TokenTimes(token_ms=0.1, fixed_ms=40).xi_blocks(200, 16) == 100
    assert TokenTimes(token_ms=0.1, fixed_ms=40).xi_blocks(20, 16) == 0


def test_the_file_that_ragkv_profile_saves_gives_the_times(rows: Path, tmp_path: Path) -> None:
    lengths = (LengthPoint(100, 0.03, 0.03), LengthPoint(200, 0.05, 0.05))
    measured = Profile(
        subject=Subject("w", "a", "r", "bfloat16", "raw", "here", "a processor", 2, "cpu"),
        layers=4,
        kv_bytes_per_token=64,
        stored_bytes_per_token=64.0,
        prefill=LengthFit(0.01, 2e-4, 0.0, lengths),
        recompute=RecomputeFit(0.0, 0.0, 0.0, 0.0),
        place_token_layer_s=1e-6,
        start_s=0.0,
        decode=LengthFit(0.0, 0.0, 0.0),
        tiers={"memory": TierSpeed(0.0, 0.0), "disk": TierSpeed(0.0, 1e-7)},
    )
    file = save(measured, tmp_path)
    times = TokenTimes.of(read_profile(file))
    wanted = {"token_ms": 0.2, "fixed_ms": 10.0, "load_token_ms": 64e-4}
    assert asdict(times) == pytest.approx(wanted)
    command = ["simulate", "--trace", str(rows), "--policy", "lru", "--capacity-blocks", "100", "--profile", str(file)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "times measured on a processor, 2 threads, cpu, bfloat16, 4 layers" in " ".join(done.stdout.split())


@pytest.mark.parametrize("text", ['{"speed": 1}', "[]", "{", "{}", '{"token_ms": 0.1}'])
def test_a_bad_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError):
        read_profile(tmp_path / "p.json")
