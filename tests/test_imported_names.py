"""What scripts beside the package import from it exists, and what they set of its objects. mypy
reads the package alone, and some scripts run in no test.
"""

import ast
import importlib
import importlib.util
import re
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


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_sets_of_another_object_is_an_attribute_that_someone_reads(
    path: Path,
) -> None:
    """Setting a name that was renamed in the package raises nothing and changes nothing."""
    package = "\n".join(each.read_text("utf-8") for each in (ROOT / "ragkv").rglob("*.py"))
    unread = [
        target.attr
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr.startswith("_")
        if not (isinstance(target.value, ast.Name) and target.value.id == "self")
        if not re.search(rf"\.{target.attr}\b", package)
    ]
    assert unread == []
