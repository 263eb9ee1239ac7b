"""`ragkv serve` reports a wrong setting in one sentence before it listens, and missing packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(
    *arguments: str, code: str = "from ragkv.cli import main; main()"
) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", f"import sys; sys.argv[0] = 'ragkv'; {code}", *arguments]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/no/such/model"], "No model folder at /no/such/model"),
        (["--host", "0.0.0.0"], "ragkv keys add"),
        (["--config", "/no/such/file.toml"], "Cannot read settings"),
        (["--vllm-url", "http://localhost:1"], "give both"),
        (["--engine", "vllm", "--vllm-url", "localhost"], "vllm.url must be http"),
    ],
)
def test_a_wrong_setting_of_serve_is_reported_in_one_sentence(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    ended = run("serve", "--home", str(tmp_path), *arguments)
    assert ended.returncode == 1 and said in ended.stderr and ended.stderr.count("\n") == 1, (
        ended.stderr
    )


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_serve_without_its_packages_says_what_to_install(package: str) -> None:
    hidden = "import importlib.util as u; found = u.find_spec; "
    hidden += (
        f"u.find_spec = lambda name, *more: None if name == {package!r} else found(name, *more)"
    )
    for code in (f"{hidden}; from ragkv.cli import main; main()", f"{hidden}; import ragkv.api"):
        ended = run("serve", code=code)
        assert (
            ended.returncode == 1
            and 'pip install "ragkv[api]"' in ended.stderr
            and package in ended.stderr
        )
