"""The logic of `make gpu`, on a CPU with a tiny shape: the order, going on, and what is written."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, report


def options(tmp_path: Path, **changes: Any) -> Any:
    """The options of a run that takes seconds."""
    text = "--device cpu --shapes tiny --tokens 16 --lengths 1 2 --runs 1 --profiled 2"
    made = gpu.options_of([*text.split(), "--out", str(tmp_path / "gpu.json")])
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_the_smallest_cases_come_first_and_int8_from_memory_before_all_others(
    tmp_path: Path,
) -> None:
    found = gpu.cases(options(tmp_path, shapes=["tiny", "llama-3-8b"]))
    assert [case.name for case in found[:5]] == [
        "tiny 1x16 int8 memory",
        "tiny 2x16 int8 memory",
        "llama-3-8b 1x16 int8 memory",
        "llama-3-8b 2x16 int8 memory",
        "tiny 1x16 int8 disk",
    ]
    assert len(found) == 2 * 2 * 4


def test_a_run_goes_on_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(tmp_path, minutes=1)
    monkeypatch.setattr(gpu, "STORED", (("int8", "memory"), ("raw", "disk")))
    times = iter([0, 0, 0, 0, 61])  # the time is over before the third case
    left = gpu.run(given, lambda: next(times))
    assert [case.name for case in left] == ["tiny 1x16 raw disk", "tiny 2x16 raw disk"]
    found = json.loads(given.out.read_text())
    assert list(found["cases"]) == ["tiny 1x16 int8 memory", "tiny 2x16 int8 memory"]
    first = found["cases"]["tiny 1x16 int8 memory"]["seconds"]
    assert first.keys() == {
        "transformers full",
        "full recompute",
        "first-k",
        "first-k 0.05",
        "first-k 0.15",
        "attention 0.05",
        "attention 0.15",
    }
    assert not gpu.run(given)
    again = json.loads(given.out.read_text())
    assert again["cases"]["tiny 1x16 int8 memory"]["seconds"] == first
    assert len(again["cases"]) == 4
    profile = again["profiles"]["tiny"]
    assert profile["waits"] == profile["launches"] == 0  # it is a CPU
    assert profile["host_us"] > 0 and len(profile["by_host"]) == gpu.TOP
    gpu.show(again)
    assert "tiny: attention 0.15 is sooner than full recompute" in capsys.readouterr().out


def test_without_a_gpu_it_is_skipped_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if gpu.torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == report.SKIPPED
    assert "there is no CUDA device here" in capsys.readouterr().err
