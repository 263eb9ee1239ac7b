"""Benchmarks are not run by the tests, so a renamed module would break them unnoticed: each is imported here."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if not name.startswith("__")])
def test_every_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


def test_importing_the_simulator_or_a_policy_does_not_load_torch() -> None:
    code = "import sys, benchmarks.simulate.command, ragkv.store.policies; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
