"""The import contract rejects an upward import in every package, and two files that import each
other.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]["contracts"]
LAYERS = [
    (
        contract["containers"][0],
        [layer.replace("|", ":").split(" : ") for layer in contract["layers"]],
    )
    for contract in CONTRACTS
    if contract["type"] == "layers"
]
UPWARD = [  # for every module of every layered package: a module of the layer above
    (f"{package}.{name}", f"{package}.{above[0]}")
    for package, layers in LAYERS
    for above, layer in pairwise(layers)
    for name in layer
]


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package and its contracts."""
    shutil.copytree(
        ROOT / "ragkv",
        tmp_path / "ragkv",
        ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"),
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def add_import(tree: Path, module: str, imported: str) -> None:
    path = tree.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    file.write_text(f"{file.read_text(encoding='utf-8')}\nimport {imported}\n", encoding="utf-8")


def test_the_contract_covers_every_package_that_has_more_than_one_module() -> None:
    top = next(layers for package, layers in LAYERS if package == "ragkv")
    packages = {path.parent.name for path in (ROOT / "ragkv").glob("*/__init__.py")}
    assert packages <= {name for layer in top for name in layer}


def test_an_upward_import_breaks_the_contract(tree: Path) -> None:
    add_import(tree, "ragkv.store.entry", "ragkv.engine")
    ran = lint(tree)
    assert ran.returncode == 1
    assert "Imports only go down BROKEN" in ran.stdout


def test_two_files_that_import_each_other_break_the_contract(tree: Path) -> None:
    add_import(tree, "ragkv.prompt.history.history", "ragkv.prompt.history.truncation")
    ran = lint(tree)
    assert ran.returncode == 1
    assert "No two files or packages import each other BROKEN" in ran.stdout


def test_a_copy_of_the_recipes_tier_among_the_tiers_keeps_the_contract(tree: Path) -> None:
    shutil.copy(ROOT / "tests/store/toy_tier.py", tree / "ragkv/store/tiers/toy.py")
    ran = lint(tree)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "imported"), UPWARD, ids=lambda name: str(name).removeprefix("ragkv.")
)
def test_an_upward_import_in_any_layered_module_breaks_the_contract(
    tree: Path, module: str, imported: str
) -> None:
    add_import(tree, module, imported)
    assert lint(tree).returncode == 1
