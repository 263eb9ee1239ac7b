"""What a text has in another form than its reader sees it: orders to a terminal, control
characters, escapes of programs and of JSON, references to characters.
"""

import json
from pathlib import Path

import pytest

from ragkv.retrieval import Document, load_bytes
from tests.timing import assert_linear, processor_seconds


def text(name: str, data: str) -> str:
    (document,) = load_bytes(Path(name), data.encode())
    assert isinstance(document, Document)
    return document.text


def notebook(source: str, printed: str) -> str:
    output = {"output_type": "stream", "text": printed}
    return json.dumps({"cells": [{"cell_type": "code", "source": source, "outputs": [output]}]})


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("oak \x1b[1mwheel\x1b(B\x1b[m turns", "oak wheel turns"),  # as of tput
        ("\x1b]0;title\x07oak \x1b]8;;u\x1b\\wheel\x1b]8;;\x1b\\", "oak wheel"),
        ("\x1bP1;2|pixels\x1b\\oak\x1b^private\x1b\\ \x1b_more\x1b\\wheel\x1bXtext\x1b\\", "oak wheel"),
        ("\x1b7oak\x1b8 \x1bOAwheel\x1b[?25l\x1bc", "oak wheel"),
        ("sagte \x8bja\x9b und \x93gut\x94 nein", "sagte \u2039ja\u203a und \u201cgut\u201d nein"),
        ("\x9b31moak\x9b0m \x9d0;title\x9cwheel", "oak wheel"),  # a terminal of 8 bits
        ("don\x92t say \x93oak\x94", "don\u2019t say \u201coak\u201d"),  # a misread windows-1252
        ("oak\x85wheel\x0cof\x1epine", "oak\nwheel\nof\npine"),
        ("10%\x08\x08\x0820% o\x08oa\x08ak\x08k _\x08w", "20% oak w"),
        ("oak\x07 \x00\x01wh\x7feel\x0f", "oak wheel"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["a.log", "a.md", "a.csv", "a.jsonl", "a.ipynb"])
def test_controls_are_read_as_a_terminal_shows_them(name: str, written: str, shown: str) -> None:
    data = {
        "a.csv": f"note\n{written}\n",
        "a.jsonl": json.dumps({"text": written}),
        "a.ipynb": notebook("1", written),
    }.get(name, written)
    if "\0" in written and name in ("a.log", "a.md", "a.csv", "a.jsonl"):
        data = data.replace("\0", "").replace("\\u0000", "")
    found = text(name, data)
    assert all(line in found for line in shown.split("\n")), found
    assert not set(map(chr, [*range(9), *range(11, 32), *range(127, 160)])) & set(found)


def test_an_order_within_a_row_separates_no_columns() -> None:
    assert text("a.csv", "\x1b[0;1mname;tons\nOak;5\n") == "name: Oak; tons: 5"


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.log", r'in {"city": "M\u00fcnchen", "m": "{\"c\": \"K\\u00f6ln\"}"}', "München Köln"),
        ("a.csv", 'id,data\n1,"{""city"": ""M\\u00fcnchen""}"\n2,K&ouml;ln\n3,x\n', "München Köln"),
        ("a.ipynb", notebook('city = "M\\u00fcnchen"', "{'other': 'K\\xf6ln'}"), "München Köln"),
        ("a.properties", r"city=M\u00fcnchen", "München"),
        ("a.yaml", 'city: "M\\u00fcnchen"\nother: "K\\xf6ln \\U0001F41E"', "München Köln \U0001f41e"),
        ("a.js", r"const a = 'M\u00fcnchen', b = `K\xf6ln \u{1F41E} \ud83d\udc1e`", "München Köln \U0001f41e"),
        ("a.po", 'msgid "Munich"\nmsgstr "M\\303\\274nchen"\nmsgstr "K\\xc3\\xb6ln"', "München Köln"),
        ("a.md", '```json\n{"city": "M\\u00fcnchen"}\n```\nf("K\\u00f6ln")', "München Köln"),
        ("a.txt", 'got {"city": "M\\u00fcnchen", "n": ["K\\u00f6ln"]}', "München Köln"),
        ("a.rst", r"in M\u00fcnchen, K\u00f6ln and \u00dcberlingen", "München Köln Überlingen"),
        ("a.jsonl", json.dumps({"text": '{"city": "M\\u00fcnchen"}'}), "München"),
        ("a.html", '<pre>{"city": "M\\u00fcnchen"}</pre>', "München"),
        ("a.json", r'{"\uaccc": "\ubbac M\u00fcnchen"}', "München \uaccc \ubbac"),
    ],
)  # fmt: skip
def test_escapes_of_letters_are_letters(name: str, data: str, expected: str) -> None:
    found = text(name, data)
    assert all(word in found for word in expected.split()), found


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.md", r"Write `\u00fc` or \u00fc for it; in quotes, \"\u00fc\", too."),
        ("a.txt", r'The escape "\u00fc" stands for it.'),
        ("a.yaml", r'a: "\\u00fc \\\\xe9"'),
        ("a.py", r'x = b"\x89PNG\xeb\x1f\x5e"; y = "\u0022\ud800\x1b"'),
        ("a.properties", r"folder=D:\ubeda"),
        ("a.tex", r"\u{a} \path{D:\u00e4} \'e"),
        ("a.md", "a &amp; b &lt;i&gt; &nope; R&D"),
    ],
)
def test_what_is_no_letter_or_is_said_about_escapes_stays(name: str, data: str) -> None:
    assert text(name, data) == data


@pytest.mark.parametrize(
    "piece",
    ["\\", '"', '\\"', "\\u00fc", '"\\', "\x9b", "\x9d", "\x1b]", "\x1bX", "\x1b", "\x08", "a\x08",
     "\\xc3", "\\303", "&a", '"\\\\u00fc\\"', "\x85"],
)  # fmt: skip
def test_escapes_take_time_linear_in_the_text(piece: str) -> None:
    def of(count: int) -> float:
        return processor_seconds(lambda: text("a.log", f"x{piece * count}y"))

    assert_linear(of, 20_000)
