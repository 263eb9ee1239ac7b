"""Benchmarks are not run by the tests, so a renamed module would break them unnoticed: each is
imported here.
"""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if not name.startswith("__")])
def test_every_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
