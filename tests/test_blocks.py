"""Every shell and Python block of README and of the pages for users is run as a reader would run
it: the blocks of a page in their order, in one folder, on the home that `ragkv ingest
examples/corpus` makes. A `text` block after a block is what it prints.

README's and those of docs/ask.md run with the other tests. The other pages are slow tests.

`EXCEPTIONS` lists the blocks that need what a test has not, with the reason.
"""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ragkv.api.settings import ServeConfig
from tests.cluster.servers import free_port

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = ("sh", "python")
ALL = (*RUN, "toml", "json")  # `text` is what a block prints, or a drawing
HOME = ".ragkv"
# Beginning of a block -> why no test runs it. Each page is named, so that none hides another's.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("README.md", "make demo"): "installs packages; tests/test_package.py runs the demo",
    ("README.md", "python3 -m venv"): "installs packages from the network",
    ("clients.md", "from llama_index"): "another environment; `make test-clients` runs it",
    ("clients.md", "from haystack"): "another environment; `make test-clients` runs it",
    ("deploy.md", "docker compose run"): "needs Docker; tests/api/test_deploy.py reads the files",
    ("deploy.md", "apt-get install"): "needs root; tests/api/attacks start the same nginx",
    ("deploy.md", "python3 -m venv"): "needs root and systemd",
    ("models.md", 'ragkv ask "Where is Thomas Telford buried?" --home notes --device'): "a GPU",
    ("models.md", "export RAGKV_PACKED_BYTES"): "downloads a model",
    ("scale.md", "pip install"): "needs Redis and nginx; api/attacks/test_two_servers.py",
    ("vllm.md", "python3.11 -m venv"): "vLLM's environment; `make test-vllm` runs the connector",
    ("vllm.md", ". vllm/bin/activate"): "vLLM's environment; `make test-vllm` runs the example",
    ("vllm.md", "import uuid"): "needs vLLM's server",
    ("vllm.md", "pip install"): "needs vLLM's server; tests/vllm start it",
}

pytestmark = [
    pytest.mark.enable_socket,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),
]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    shown: str = ""  # what the page says that it prints

    @property
    def exception(self) -> str | None:
        """Why no test runs it."""
        for (page, beginning), why in EXCEPTIONS.items():
            if page == self.page and self.text.startswith(beginning):
                return why
        return None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text("utf-8")
    found: list[Block] = []
    fences = list(re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    for number, fence in enumerate(fences):
        shown = ""
        if number + 1 < len(fences):
            after = fences[number + 1]
            if after[1] == "text" and not text[fence.end() : after.start()].strip():
                shown = after[2]
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(page.name, line, fence[1], fence[2], shown))
    return found


STORIES = [
    pytest.param(
        page,
        id=page.name,
        marks=() if page.name in ("README.md", "ask.md") else pytest.mark.slow,
    )
    for page in PAGES
    if any(one.language in ALL for one in blocks(page))
]


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader who has ingested the examples, and a copy of that home in `kept`."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("examples", "deploy"):
        shutil.copytree(ROOT / name, folder / name)
    command = folder / "bin" / "ragkv"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ragkv "$@"\n')
    command.chmod(0o755)
    _run(folder, "ragkv ingest examples/corpus --minutes 0", 0)
    shutil.copytree(folder / HOME, folder / "kept")
    return folder


@pytest.fixture
def folder(ingested: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That folder as it was after ingesting, as the current one."""
    shutil.rmtree(ingested / HOME)
    shutil.copytree(ingested / "kept", ingested / HOME)
    monkeypatch.chdir(ingested)
    for name in os.environ:
        if name.startswith("RAGKV_"):
            monkeypatch.delenv(name)
    return ingested


@pytest.mark.parametrize("page", STORIES)
def test_the_blocks_of_a_page_run_and_print_what_it_shows(page: Path, folder: Path) -> None:
    port = free_port()
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.ExitStack() as stack:
        for block in blocks(page):
            if block.language not in ALL or block.exception is not None:
                continue
            text = re.sub(r"(127\.0\.0\.1|localhost):8000", rf"\1:{port}", block.text)
            try:
                if block.language == "sh":
                    printed = _shell(folder, text, port, stack)
                elif block.language == "python":
                    printed = _python(text, names)
                elif block.language == "toml":
                    (folder / "block.toml").write_text(text)
                    ServeConfig.gather(folder / "block.toml", environment={})
                else:
                    json.loads(text)
            except Exception as error:
                error.add_note(f"The block is {page.name}:{block.line}.")
                raise
            if block.shown and block.language in RUN:
                assert _matches(block.shown, printed), f"{page.name}:{block.line} prints\n{printed}"


def _python(text: str, names: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(text, "block", "exec"), names)
    return printed.getvalue()


def _shell(folder: Path, text: str, port: int, stack: contextlib.ExitStack) -> str:
    """Run the lines; a server is started, and runs until the page ends."""
    printed = ""
    for part in re.split(r"^(ragkv serve(?: .*)?)$", text, flags=re.MULTILINE):
        if part.startswith("ragkv serve"):
            stack.enter_context(_served(folder, part, port))
        elif part.strip():
            printed += _run(folder, part, port)
    return printed


def _environment(folder: Path, port: int) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAGKV_")}
    return {
        **own,
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "RAGKV_SERVE__PORT": str(port),
    }


def _run(folder: Path, text: str, port: int) -> str:
    ran = subprocess.run(
        ["bash", "-e", "-c", text],
        cwd=folder,
        env=_environment(folder, port),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, f"{text}\n{ran.stdout[-1000:]}\n{ran.stderr[-3000:]}"
    return ran.stdout + ran.stderr


@contextlib.contextmanager
def _served(folder: Path, command: str, port: int) -> Iterator[None]:
    with (folder / "serve.log").open("w") as log:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=folder,
            env=_environment(folder, port),
            stdout=log,
            stderr=log,
        )
        try:
            _until_ready(server, port)
            yield
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(120)
    assert server.returncode == 0, (folder / "serve.log").read_text()[-3000:]


def _until_ready(server: "subprocess.Popen[bytes]", port: int) -> None:
    for _ in range(1200):
        assert server.poll() is None, "the server ended"
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
            return
        time.sleep(0.5)
    raise TimeoutError


def _matches(shown: str, printed: str) -> bool:
    """Whether what was printed holds what the page shows: `...` is any text, and numbers of a
    measurement differ.
    """
    pieces = [re.escape(_masked(piece)) for piece in shown.strip().split("...")]
    return re.search(".*?".join(pieces), _masked(printed), re.DOTALL) is not None


def _masked(text: str) -> str:
    text = re.sub(r"\d+ min \d+ s\b", "0 s", text)
    text = re.sub(r"\d[\d,.]*(?= ?(ms|s|minutes|GB|GiB|MB|MiB|KB|KiB|B|tokens/s|x)\b)", "#", text)
    text = re.sub(r"\d+(?= (tokens|fused|recomputed|computed)\b)", "#", text)
    return re.sub(r"[ \t]+", " ", text)


def test_each_exception_is_a_block_of_its_page() -> None:
    every = [block for page in PAGES for block in blocks(page)]
    for page, beginning in EXCEPTIONS:
        assert any(
            one.page == page and one.text.startswith(beginning) and one.language in RUN
            for one in every
        ), f"{page} has no block that begins with {beginning!r}"


def test_blocks_are_of_a_language_that_is_run_or_shown() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language in (*ALL, "text"), f"{page.name}:{block.line}"
