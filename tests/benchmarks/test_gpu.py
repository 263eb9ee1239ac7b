"""`make gpu` without a GPU: what would run, how a step's end is told, the report, and the one sentence."""

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


def step(code: str, limit_s: float = 60) -> gpu.Step:
    return gpu.Step("a step", ("-c", code), limit_s)


@pytest.mark.parametrize(
    ("memory_gib", "shape", "kcache"), [(4, "tiny", 0), (8, "llama-3.2-1b", 0), (80, "llama-3-8b", 1)]
)
def test_shapes_fit_the_memory_of_the_device(memory_gib: float, shape: str, kcache: bool) -> None:
    todo = gpu.steps(memory_gib, quick=False)
    (ttft,) = (one for one in todo if one.title == "time to first token")
    assert ttft.arguments[ttft.arguments.index("--shapes") + 1] == shape
    assert sum("benchmarks.kcache" in one.arguments for one in todo) == kcache
    assert todo[0].arguments[:4] == ("-m", "pytest", "-m", "gpu")


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", ["ttft", "kcache"])
def test_the_benchmarks_know_the_options_they_are_given(
    name: str, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import kcache, ttft

    asked = [one.arguments for one in gpu.steps(80, quick) if f"benchmarks.{name}" in one.arguments]
    assert asked
    for _, module, *arguments in asked:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        options = {"ttft": ttft, "kcache": kcache}[name]._options()
        assert options.device == "cuda"


def test_a_step_that_fails_or_takes_too_long_is_told_and_its_output_kept() -> None:
    passed = gpu.run(step("print('all good')"))
    failed = gpu.run(step("print('half'); raise SystemExit(3)"))
    endless = gpu.run(step("import time; print('begun', flush=True); time.sleep(600)", limit_s=3))
    assert (passed.failure, passed.output) == ("", "all good\n")
    assert (failed.failure, failed.output) == ("exit status 3", "half\n")
    assert endless.failure.startswith("stopped after")
    text = gpu.render(["a device"], [passed, failed], planned=3)
    assert "- a device" in text and "2 of 3 steps" in text
    assert "| a step | passed |" in text and "| a step | exit status 3 |" in text
    assert text.count("```") == 4 and "all good" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_one_sentence_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "report.md")])
    gpu.main()
    assert capsys.readouterr().out == gpu.NO_GPU + "\n"
    assert not list(tmp_path.iterdir())


def test_the_machine_is_named_without_a_driver() -> None:
    text = "\n".join(gpu.machine_lines())
    assert "torch" in text and "driver: " in text and "Python" in text
