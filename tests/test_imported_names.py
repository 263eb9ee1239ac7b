"""What scripts beside the package import from it exists. mypy reads the package alone, and some
scripts run in no test.
"""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    path for folder in ("benchmarks", "examples", "tools") for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_imports_from_the_package_exists(path: Path) -> None:
    missing = [
        f"{node.module}.{one.name}"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
        if node.level == 0 and node.module.partition(".")[0] == "ragkv"
        for one in node.names
        if not hasattr(importlib.import_module(node.module), one.name)
        and importlib.util.find_spec(f"{node.module}.{one.name}") is None
    ]
    assert missing == []
