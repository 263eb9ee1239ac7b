"""The page's files: no outside address, no data parsed as markup."""

import gzip
import re
from pathlib import Path

import pytest

import ragkv
from ragkv.api.app import page_text
from ragkv.registry import SELECTORS

PAGE = Path(ragkv.__file__).parent / "api" / "page"
FILES = sorted(path for path in PAGE.iterdir() if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
ON_WIRE_BYTES = 41_000  # compressed
BYTES = 112_000  # with comments and types, because there is no build step


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in FILES) < BYTES
    assert sum(len(gzip.compress(path.read_bytes())) for path in FILES) < ON_WIRE_BYTES


def test_the_page_refers_to_no_outside_address() -> None:
    for path in FILES:
        addresses = set(
            re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", path.read_text("utf-8"))
        )
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_turns_text_into_markup_or_code(path: Path) -> None:
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc|setHTML"
    code = r"\beval\(|new Function|setAttribute\(\"on|javascript:"
    assert re.findall(f"{markup}|{code}", path.read_text("utf-8")) == []


def test_the_page_offers_every_selector() -> None:
    menu = re.search(r"The server's choice</option>(.*?)</select>", page_text(), re.DOTALL)
    assert menu is not None
    assert sorted(re.findall(r"<option>([\w-]+)</option>", menu[1])) == sorted(SELECTORS)


def test_every_element_id_used_in_a_script_exists() -> None:
    ids = re.findall(r"\bid=\"([\w-]+)\"", (PAGE / "index.html").read_text("utf-8"))
    assert len(ids) == len(set(ids))
    asked = {
        name
        for path in SCRIPTS
        for name in re.findall(r"\$\(\"([\w-]+)\"\)", path.read_text("utf-8"))
    }
    icons = {
        f"i-{name}"
        for path in SCRIPTS
        for name in re.findall(r"icon\(\"([\w-]+)\"\)", path.read_text("utf-8"))
    }
    assert asked | icons <= set(ids)
