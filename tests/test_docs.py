"""The README's snippets run unchanged, and the files that the docs name exist."""

import re
from pathlib import Path

import pytest

from ragkv.model.loading import READER

ROOT = Path(__file__).parents[1]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_python_snippet_of_the_readme_runs(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (READER / "config.json").is_file():
        pytest.skip("the bundled reader is missing")
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {})
    assert "Reuse(" in capsys.readouterr().out


def test_the_readme_begins_with_the_two_commands() -> None:
    first, second = (ROOT / "README.md").read_text("utf-8").splitlines()[1:3]
    assert (first.split()[:2], second.split()[:2]) == (["make", "demo"], ["make", "test"])


def test_every_file_named_in_the_docs_exists() -> None:
    """Checks the paths in backticks in docs/architecture.md and docs/papers.md."""
    for page in ("architecture.md", "papers.md"):
        for name in re.findall(r"`((?:[\w-]+/)+[\w.-]*)`", (ROOT / "docs" / page).read_text("utf-8")):
            assert any((base / name).exists() for base in (ROOT, ROOT / "ragkv")), f"docs/{page} names {name}"
