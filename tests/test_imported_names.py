"""What scripts beside the package import from it exists, and what they set and replace of its
objects. mypy does not see these names, and some scripts run in no test.
"""

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
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


def replaced(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names of objects of which `mock.patch` replaces an attribute, and these attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if not isinstance(node.args[0], ast.Name):
            continue
        called = ast.unparse(node.func)
        if called == "mock.patch.object":
            assert isinstance(node.args[1], ast.Constant)
            yield node.args[0].id, node.args[1].value
        elif called == "mock.patch.multiple":
            yield from ((node.args[0].id, str(keyword.arg)) for keyword in node.keywords)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_replaces_of_the_package_exists(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    imported = {
        one.asname or one.name: (node.module, one.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.partition(".")[0] == "ragkv"
        for one in node.names
    }
    missing = []
    for name, attribute in replaced(tree):
        if name in imported:
            package, own = imported[name]
            module = importlib.import_module(package)
            found = getattr(module, own, None) or importlib.import_module(f"{package}.{own}")
            if not hasattr(found, attribute):
                missing.append(f"{name}.{attribute}")
    assert missing == []
