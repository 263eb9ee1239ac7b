"""The documentation site builds without a warning: its links, anchors and names exist."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",  # without --quiet, which hides the warnings from it
        "--site-dir",
        str(folder),
    ]
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr[-3000:]
    return folder


def test_the_reference_shows_public_names_and_every_command(site: Path) -> None:
    engine = (site / "reference" / "engine.html").read_text("utf-8")
    assert (
        'id="ragkv.engine.Engine.answer"' in engine and 'id="ragkv.sessions.Session.fork"' in engine
    )
    commands = (site / "reference" / "commands.html").read_text("utf-8")
    for name in ("ragkv ingest", "ragkv serve", "ragkv keys add"):
        assert f"<code>{name}</code>" in commands
    assert "<code>--ratio</code>" in commands


def test_each_notebook_has_a_page_and_can_be_downloaded(site: Path) -> None:
    for path in (ROOT / "examples" / "notebooks").glob("*.ipynb"):
        assert (site / "notebooks" / path.name).read_bytes() == path.read_bytes()
        page = (site / "notebooks" / f"{path.stem}.html").read_text("utf-8")
        assert f'href="{path.name}"' in page and "Engine" in page and "<h2" in page


def test_pages_ask_no_other_server_for_anything(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        for start in ('src="http', '<link rel="stylesheet" href="http', "fonts.googleapis"):
            assert start not in text, (page.name, start)
