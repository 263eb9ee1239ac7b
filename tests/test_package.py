"""The wheel and the source distribution hold the whole package, and an installed wheel works
outside a checkout.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import ragkv

ROOT = Path(__file__).parents[1]
LINKS = ("api", "fusion", "retrieval", "store")  # at the root, into the package


def files_under(folder: str) -> set[str]:
    """The files of a folder of the checkout, without what Python compiled, relative to the
    checkout.
    """
    found = (
        file
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    )
    return {file.relative_to(ROOT).as_posix() for file in found}


def offline(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout, without the checkout on Python's path."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHONPATH", "RAGKV_"))
    }
    environment = {**inherited, "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1", **variables}
    folder = Path(sys.executable).parent
    return subprocess.run(
        [*map(str, command)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    offline(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def source_files(built: Path) -> set[str]:
    """The files of the source distribution, relative to its folder."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        return {
            PurePosixPath(*PurePosixPath(name).parts[1:]).as_posix() for name in archive.getnames()
        }


def test_the_wheel_installs_exactly_the_files_of_the_package_and_its_examples(wheel: Path) -> None:
    installed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    examples = {
        f"ragkv/{name}"
        for name in files_under("examples/corpus")
        | {"examples/questions.jsonl", "examples/demo.py"}
    }
    assert installed == files_under("ragkv") | examples


def test_the_source_distribution_holds_the_package_the_examples_and_the_docs(
    source_files: set[str],
) -> None:
    assert files_under("ragkv") | files_under("examples") | files_under("docs") <= source_files
    assert {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "constraints.txt",
        "pyproject.toml",
    } <= source_files


def test_the_source_distribution_holds_no_package_twice(source_files: set[str]) -> None:
    assert {name for name in source_files if name.split("/")[0] in LINKS} == set()


@pytest.mark.parametrize("name", LINKS)
def test_a_room_at_the_root_of_the_checkout_is_a_link_into_the_package(name: str) -> None:
    assert (ROOT / name).readlink() == Path("ragkv") / name


def test_each_link_of_the_readme_leads_to_a_page_or_a_heading_that_is_there() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    pictures = re.findall(r"!\[([^]]*)\]\(([^)]+)\)", text)
    # an index page shows these words where it has no picture
    assert all(len(words) > 40 for words, _ in pictures)
    links = set(re.findall(r"\]\(([^)]+)\)", text)) - {link for _, link in pictures}
    headings = {
        "#" + re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    own = {link for link in links if not link.startswith("https://")}
    assert [
        link
        for link in own - headings
        if not (ROOT / link.partition("#")[0]).exists() or link.startswith("#")
    ] == []


@pytest.mark.slow
def test_the_installed_wheel_runs_the_demo_outside_a_checkout(wheel: Path, tmp_path: Path) -> None:
    offline(sys.executable, "-m", "venv", "--without-pip", tmp_path)
    python = tmp_path / "bin" / "python"
    offline(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel
    )
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path)}))
    # no editable install behind it
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    location = offline(python, "-c", "import ragkv; print(ragkv.__file__)").stdout.strip()
    assert Path(location).is_relative_to(tmp_path)
    command = tmp_path / "bin" / "ragkv"
    assert offline(command, "--version").stdout == f"ragkv {ragkv.__version__}\n"
    demo = offline(
        python, "-m", "ragkv.examples.demo", "--questions", "2", OMP_NUM_THREADS="1"
    )  # also on a busy machine
    assert "Right, of 2 questions: full 2 · prefix 2 · cold 2 · warm 2." in demo.stdout
