"""The README's snippets run unchanged, and the files that the docs name exist."""

import operator
import re
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

import ragkv.config
from ragkv import Engine, EngineConfig
from ragkv.config import KCacheConfig, SchedulerConfig
from ragkv.integrations.langchain import ChatRagKV
from ragkv.model.loading import load
from tests.api.helpers import app_on, filled, on_port, plain
from tests.integrations.langchain.helpers import tiny_folder
from tests.reader import READER

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
DOCS = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "research").glob("*.md")])
LOCAL = "http://127.0.0.1:8000"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a user who has the examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_python_snippet_of_the_readme_runs(
    snippet: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = tiny_folder(folder / "model")  # in place of the real one
    exec(compile(snippet.replace("smollm2", local), "README.md", "exec"), {})
    assert "Reuse(" in capsys.readouterr().out


def _pages() -> list[Any]:
    """The snippets of the other pages; each page is one story, whose snippets share their names."""
    found = [
        (page.name, re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
        for page in DOCS
    ]
    return [pytest.param(name, snippets, id=name) for name, snippets in found if snippets]


@pytest.fixture(scope="module")
def reader() -> Iterator[Engine]:
    with Engine.from_pretrained(READER, EngineConfig(scheduler=SchedulerConfig())) as engine:
        yield engine


@pytest.mark.enable_socket
@pytest.mark.parametrize(("name", "snippets"), _pages())
def test_the_python_snippets_of_a_page_run(
    name: str, snippets: list[str], reader: Engine, tmp_path: Path
) -> None:
    # The same dtype as the fixture's: "auto" may choose another one on a busy machine, and sessions
    # keep KV of one.
    net, tokenizer = load(READER, "cpu", str(reader.model.adapter.dtype).removeprefix("torch."))
    documents = [
        Document(page_content="Lodwin works as a pilot."),
        Document(page_content="Lodwin owns an old clarinet."),
    ]
    names: dict[str, Any] = {
        **vars(ragkv.config),
        "Engine": Engine,
        "engine": reader,
        "model": net,
        "tokenizer": tokenizer,
        "ids": torch.tensor([[1, 2, 3]]),
        "question": "What is the job of Lodwin?",
        "given_answer": "pilot",
        "chunks": documents
        if name == "langchain.md"
        else [reader.chunk(one.page_content) for one in documents],
        "session": reader.session("s"),
        "event": threading.Event(),
        "ChatRagKV": ChatRagKV,
        "retriever": RunnableLambda(lambda _: documents),
        "joined": RunnableLambda(lambda found: "\n\n".join(one.page_content for one in found)),
        "prompt": ChatPromptTemplate.from_template("{context}\n\n{question}"),
        "RunnablePassthrough": RunnablePassthrough,
        "StrOutputParser": StrOutputParser,
    }
    with on_port(app_on(reader.with_config(EngineConfig()), tmp_path / "home")) as url:
        with plain(url) as client:
            filled(client, "docs")
        for snippet in snippets:
            code = (
                snippet.replace("path/to/model", tiny_folder(tmp_path / "model"))
                .replace(LOCAL, url)
                .replace('model="smollm2', f'model="{Path(READER).name}')  # of the server
                .replace("smollm2:", f"{Path(READER).name}:")
                .replace("smollm2", READER)
            )
            exec(compile(code, name, "exec"), names)
    if "chain" in names:
        assert isinstance(names["chain"].invoke("What is the job of Lodwin?"), str)


def test_the_picture_in_the_readme_is_the_one_that_its_script_draws() -> None:
    picture = ROOT / "docs" / "figures" / "terminal.svg"
    assert f"]({picture.relative_to(ROOT)})" in README
    assert picture.read_text("utf-8") == runpy.run_path(str(picture.with_suffix(".py")))["draw"]()


def paths_in(page: Path) -> list[str]:
    """The paths in backticks in a page."""
    return re.findall(r"`((?:[\w-]+/)+[\w.-]*)`", page.read_text("utf-8"))


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS], ids=lambda page: page.name
)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    # every path of these is one of the checkout
    strict = page.name in ("architecture.md", "papers.md")
    ours = ("ragkv/", "tests/", "benchmarks/", "examples/", "docs/")
    for name in paths_in(page):
        if strict or name.endswith(".py") or name.startswith(ours):
            assert any((base / name).exists() for base in (ROOT, ROOT / "ragkv")), (
                f"{page.name} names {name}"
            )


PAPERS = (ROOT / "docs" / "papers.md").read_text("utf-8")
ROWS = {
    row: re.findall(r"`(\w+)(?: \"(.+?)\")?`", row.rsplit("|", 2)[-2])
    for row in PAPERS.split("\n")
    if row[:2] == "| "
}
MODULES = {f"benchmarks.{command}" for found in ROWS.values() for command, _ in found}
for page in (ROOT / "README.md", *DOCS):
    MODULES |= set(re.findall(r"python -m (benchmarks\.[a-z_]+)", page.read_text("utf-8")))


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_benchmark_that_a_page_names_has_options(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [module, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module(module, run_name="__main__")


def test_every_setting_and_figure_of_the_papers_page_exists() -> None:
    from benchmarks.figures import FIGURES

    for name in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)`", PAPERS):
        operator.attrgetter(name)(EngineConfig(kcache=KCacheConfig()))
    assert {figure for found in ROWS.values() for _, figure in found} <= {"", *FIGURES}


def test_every_module_is_in_the_table_of_packages() -> None:
    named = tuple(paths_in(ROOT / "docs" / "architecture.md"))
    package = ROOT / "ragkv"
    modules = [path.relative_to(package).as_posix() for path in package.rglob("*/*.py")]
    modules = [name for name in modules if not name.endswith("__.py")]
    folders = tuple(name for name in named if name.endswith("/"))
    missing = [
        name for name in sorted(modules) if name not in named and not name.startswith(folders)
    ]
    assert missing == [], "docs/architecture.md does not say what they hold"


def test_every_test_named_in_the_docs_exists() -> None:
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", "".join(page.read_text("utf-8") for page in DOCS)):
        assert f"def {name}(" in tests, f"docs name {name}"
