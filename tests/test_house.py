"""The limits of the house (`.ci/house.py`): each is broken on purpose in a small checkout, and must
be said.
"""

import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / ".ci" / "house.py"
LIMITS = "[tool.ragkv.house]\nrooms = 2\nfiles_in_a_package = 3\nlines_in_a_file = 6\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Two rooms that keep the limits."""
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
    return tmp_path


def house(checkout: Path) -> tuple[int, str]:
    ran = subprocess.run(
        [sys.executable, HOUSE], cwd=checkout, capture_output=True, text=True, check=False
    )
    return ran.returncode, ran.stdout


def add(checkout: Path, name: str, text: str) -> None:
    file = checkout / "ragkv" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text((file.read_text() if file.exists() else "") + text)


def test_a_house_within_its_limits_passes(checkout: Path) -> None:
    assert house(checkout) == (0, "The house keeps its limits.\n")


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (
            {"fusion/plan.py": "\n\n\n\n\n"},
            "ragkv/fusion/plan.py has 7 lines; the limit is 6.",
        ),
        (
            {"fusion/plan.py": "a, b, c = 1, 2, 3\n"},
            "ragkv/fusion/plan.py:3 assigns three or more values in one line: give each its own.",
        ),
        ({"cli/__init__.py": ""}, "ragkv/ has 3 rooms; the limit is 2: cli, fusion, store."),
        ({"store/a.py": "", "store/b.py": ""}, "ragkv/store has 4 files; the limit is 3."),
        (
            {"store/entry.py": "class Plan: ...\n"},
            "The class name Plan stands 2 times: ragkv/fusion/plan.py, ragkv/store/entry.py.",
        ),
    ],
    ids=["a long file", "a packed assignment", "rooms", "files in a package", "a class name twice"],
)
def test_one_too_many_is_refused_and_said(checkout: Path, added: dict[str, str], said: str) -> None:
    for name, text in added.items():
        add(checkout, name, text)
    assert house(checkout) == (1, f"{said}\n")
