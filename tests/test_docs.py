"""What README and the pages name exists: files, modules, tests, settings and benchmarks."""

import operator
import re
import runpy
from pathlib import Path

import pytest

from ragkv import EngineConfig
from ragkv.config import KCacheConfig
from ragkv.registry import POLICIES, SELECTORS
from ragkv.retrieval.documents.formats import FORMATS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
DOCS = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "research").glob("*.md")])


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


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/index.md"])
def test_the_links_of_a_page_that_is_read_in_a_checkout_lead_to_files(name: str) -> None:
    page = ROOT / name
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8"))
    assert links and [link for link in links if not (page.parent / link).exists()] == []
    assert (
        re.findall(r"`docs/[\w/-]+\.md`", page.read_text("utf-8")) == []
    )  # which no reader can follow


def test_the_list_of_all_pages_is_in_the_order_of_the_site() -> None:
    nav = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    listed = re.findall(r"\]\((?:\.\./examples/)?([\w/]+)\.(?:md|ipynb)\)", index)
    assert [f"{name}.md" for name in listed] == [page for page in nav if page != "index.md"]


def test_every_page_that_code_names_exists() -> None:
    folders = ("ragkv", "benchmarks", "examples", "tests", "deploy", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    suffixes = (".py", ".js", ".html", ".conf", ".service", ".toml", "")
    missing = [
        (str(file.relative_to(ROOT)), page)
        for file in (*files, *ROOT.glob("*"))
        if file.is_file() and file.suffix in suffixes
        for page in re.findall(r"\bdocs/[\w/.-]+\.md\b", file.read_text("utf-8", "ignore"))
        if not (ROOT / page).is_file()
    ]
    assert missing == []


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


def first_column(page: str, heading: str) -> list[str]:
    """The names in backticks in the first column of the table that begins with `heading`."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    table = text[text.index(heading) :].split("\n\n")[0]
    return [
        name for row in table.split("\n") for name in re.findall(r"`([\w-]+)`", row.split("|")[1])
    ]


def test_the_table_of_formats_has_every_ending_that_is_not_read_as_plain_text() -> None:
    text = (ROOT / "docs" / "ingest.md").read_text("utf-8")
    table = text[text.index("| ending |") :].split("\n\n")[0]
    rows = {ending for row in table.split("\n") for ending in re.findall(r"`(\.\w+)`", row)}
    other = {ending for ending, by in FORMATS.items() if not by.startswith("text:")}
    assert other - rows == set()


@pytest.mark.parametrize(
    ("page", "heading", "names"),
    [
        ("ask.md", "| selector |", SELECTORS),
        ("research/policies.md", "| name | what it evicts |", POLICIES),
    ],
    ids=["selectors", "policies"],
)
def test_a_table_of_a_page_has_every_registered_name(
    page: str, heading: str, names: dict[str, str]
) -> None:
    assert sorted(first_column(page, heading)) == sorted(names)
