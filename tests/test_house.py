"""The limits of the house (`.ci/house.py`): each is broken on purpose in a small checkout, and must be said."""

import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / ".ci" / "house.py"
LIMITS = "[tool.ragkv.house]\nlines = 7\nrooms = 2\nfiles_in_a_package = 3\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Two rooms that keep the limits, on a branch main: seven lines, at most three files in a package."""
    (tmp_path / "pyproject.toml").write_text(LIMITS)
    for name, text in {
        "__init__.py": "",
        "fusion/__init__.py": "",
        "fusion/plan.py": "class Plan:\n    pass\n",
        "store/__init__.py": "",
        "store/entry.py": "class Entry:\n    pass\n\nclass Lease:\n    pass\n",
    }.items():
        file = tmp_path / "ragkv" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for command in (
        ["init", "--quiet", "--initial-branch", "main"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "first"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def house(checkout: Path) -> tuple[int, str]:
    ran = subprocess.run([sys.executable, HOUSE], cwd=checkout, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout


def add(checkout: Path, name: str, text: str) -> None:
    file = checkout / "ragkv" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text((file.read_text() if file.exists() else "") + text)


def test_a_house_within_its_limits_passes(checkout: Path) -> None:
    assert house(checkout) == (0, "The house keeps its limits.\n")


def test_one_line_too_many_is_refused_and_says_which_room_grew_since_main(checkout: Path) -> None:
    add(checkout, "fusion/plan.py", "\n\n")
    code, said = house(checkout)
    assert code == 1
    assert said == "ragkv/ has 9 lines of Python; the limit is 7. Since main: ragkv/fusion +2.\n"


def test_one_room_too_many_is_refused(checkout: Path) -> None:
    add(checkout, "cli/__init__.py", "")
    assert house(checkout) == (1, "ragkv/ has 3 rooms; the limit is 2: cli, fusion, store.\n")


def test_one_file_too_many_in_a_package_is_refused(checkout: Path) -> None:
    for name in ("a", "b"):
        add(checkout, f"store/{name}.py", "")
    assert house(checkout) == (1, "ragkv/store has 4 files; the limit is 3.\n")


def test_a_class_name_that_stands_twice_is_refused(checkout: Path) -> None:
    add(checkout, "store/entry.py", "class Plan: ...\n")
    (checkout / "pyproject.toml").write_text(LIMITS.replace("lines = 7", "lines = 9"))
    code, said = house(checkout)
    assert (code, said) == (1, "The class name Plan stands 2 times: ragkv/fusion/plan.py, ragkv/store/entry.py.\n")
