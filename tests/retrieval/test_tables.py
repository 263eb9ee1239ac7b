"""Tables of every kind of text: which rows name the columns, and that each line says of which row
it is.
"""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ragkv.config import CHUNK_TOKENS
from ragkv.retrieval import Document, Splitter, load_bytes
from ragkv.retrieval.documents.tables import table_lines
from ragkv.retrieval.documents.text_tables import with_named_rows
from tests.timing import assert_linear, processor_seconds


def text(name: str, data: str | bytes) -> str:
    (document,) = load_bytes(Path(name), data.encode() if isinstance(data, str) else data)
    assert isinstance(document, Document)
    return document.text


def book(*rows: Iterable[Any], merged: Iterable[str] = ()) -> bytes:
    import openpyxl

    made = openpyxl.Workbook()
    sheet = made.active
    for number, row in enumerate(rows, 1):
        for column, value in enumerate(row, 1):
            sheet.cell(number, column, value)
    for cells in merged:
        sheet.merge_cells(cells)
    out = io.BytesIO()
    made.save(out)
    return out.getvalue()


# Titles above the names


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("Rope, by mill\nmill,tons,men\nMarl,5,7\nOrb,6,8\n",
         "Rope, by mill\nmill: Marl; tons: 5; men: 7\nmill: Orb; tons: 6; men: 8"),
        ("Rope of 1901, by mill, in tons\nmill,tons,men\nMarl,5,7\nOrb,6,8\n",
         "Rope of 1901, by mill, in tons\nmill: Marl; tons: 5; men: 7\nmill: Orb; tons: 6; men: 8"),
        ("Rope, by mill\nand by town\n\nmill,fibre,town\nMarl,hemp,Lees\nOrb,flax,Nidd\n",
         "Rope, by mill\nand by town\nmill: Marl; fibre: hemp; town: Lees\nmill: Orb; fibre: flax; town: Nidd"),
        ("mill, tons, town\nMarl,5,Lees\nOrb,6,Nidd\n",
         "mill: Marl; tons: 5; town: Lees\nmill: Orb; tons: 6; town: Nidd"),
        ("mill, tons\nMarl, 5\nOrb, 6\n", "mill: Marl; tons: 5\nmill: Orb; tons: 6"),
        ("Author,Ada\nDate,1901\n\nmill,tons,men,town\nMarl,5,7,Lees\nOrb,6,8,Nidd\n",
         "Author; Ada\nDate; 1901\nmill: Marl; tons: 5; men: 7; town: Lees\nmill: Orb; tons: 6; men: 8; town: Nidd"),
        ("Rope\nAuthor:,Ada\nDate:,1901\n\nmill,tons,men\nMarl,5,7\nOrb,6,8\n",
         "Rope\nAuthor:; Ada\nDate:; 1901\nmill: Marl; tons: 5; men: 7\nmill: Orb; tons: 6; men: 8"),
    ],
)  # fmt: skip
def test_a_title_with_commas_is_above_the_names(data: str, expected: str) -> None:
    assert text("a.csv", data) == expected


def test_a_title_of_two_cells_is_above_the_names_of_a_sheet() -> None:
    data = book(("Rope", 1901), ("mill", "tons", "men"), ("Marl", 5, 7))
    assert text("a.xlsx", data) == "# Sheet\n\nRope; 1901\nmill: Marl; tons: 5; men: 7"


# Several tables


MILLS = [("mill", "tons"), ("Marl", 5), ("Orb", 6)]
SHOWN = "mill: Marl; tons: 5\nmill: Orb; tons: 6\n"


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([("boat", "men"), ("Wren", 3), ("Tern", 4)], "boat: Wren; men: 3\nboat: Tern; men: 4"),
        ([("Boats",), ("boat", "men", "port"), ("Wren", 3, "Lees")], "Boats\nboat: Wren; men: 3; port: Lees"),
        ([("boat", "owner"), ("Wren", "Ada"), ("Tern", "Bo")], "boat: Wren; owner: Ada\nboat: Tern; owner: Bo"),
        ([("mill", "tons"), ("Lune", 8)], "mill: Lune; tons: 8"),
        ([("Lune", 8), ("Wye", 9)], "mill: Lune; tons: 8\nmill: Wye; tons: 9"),  # more rows
        ([("Lune", "shut"), ("Wye", "shut")], "mill: Lune; tons: shut\nmill: Wye; tons: shut"),
        ([("Lune",), ("Wye", 9)], "mill: Lune\nmill: Wye; tons: 9"),
        ([("Total", 11)], "mill: Total; tons: 11"),
        ([("From the office",)], "From the office"),
    ],
)  # fmt: skip
def test_a_table_below_a_blank_row_has_names_of_its_own(
    second: list[tuple[Any, ...]], expected: str
) -> None:
    rows = [*MILLS, (), *second]
    assert text("a.xlsx", book(*rows)) == f"# Sheet\n\n{SHOWN}{expected}"
    lines = "\n".join(",".join(map(str, row)) for row in rows)
    assert text("a.csv", lines) == f"{SHOWN}{expected}"


def test_merged_names_of_a_second_table_stand_over_all_their_columns() -> None:
    rows = [*MILLS, (), ("boat", "men"), ("", "old", "young"), ("Wren", 3, 4), ("Tern", 5, 6)]
    data = book(*rows, merged=["B5:C5", "A5:A6"])
    assert text("a.xlsx", data).split("\n")[-2:] == [
        "boat: Wren; men / old: 3; men / young: 4",
        "boat: Tern; men / old: 5; men / young: 6",
    ]


# Wide rows


@pytest.mark.parametrize(
    "row",
    [
        {f"c{n}": str(7919 * n) for n in range(90)},
        {f"\u9879\u76ee{n}": "\u68c9\u7ef3" for n in range(60)},
        {"note": "The wheel of the mill was made of oak by the men of Lees. " * 60},
    ],
)
def test_each_passage_of_a_wide_row_says_which_row_it_is(row: dict[str, str]) -> None:
    lines = [
        ",".join(["id", *row]),
        ",".join(["R17", *row.values()]),
        ",".join(["R18", *row.values()]),
    ]
    found = text("a.csv", "\n".join(lines))

    def tokens(piece: str) -> int:  # as a tokenizer: digits and other scripts alone, 4 letters
        letters = sum(char.isascii() and (char.isalpha() or char == " ") for char in piece)
        return len(piece.encode()) - letters + letters // 4

    passages = Splitter(tokens, CHUNK_TOKENS).split(Document("a", found, "a.csv"))
    assert len(passages) > 3
    assert all(one.text.startswith(("id: R17", "id: R18")) for one in passages)


def test_a_long_value_is_cut_between_sentences() -> None:
    note = " ".join(f"Wheel {n} turns slowly." for n in range(60))
    lines = text("a.csv", f"id,note\n7,{note}\n8,x\n").split("\n")[1:-1]
    assert len(lines) > 1 and all(line.startswith("id: 7; note: Wheel ") for line in lines)
    assert all(line.endswith("slowly.") for line in lines)


# Tables that are drawn in text


NAMES = ["mill", "tons"]
ROWS = [[f"M{n}", str(n)] for n in range(5)]
BARS = "| mill | tons |\n|------|-----:|\n" + "".join(f"| {a} | {b} |\n" for a, b in ROWS)
LINES = "".join(f"mill: {a}; tons: {b}\n" for a, b in ROWS)
GRID = "+------+------+\n| mill | tons |\n+======+======+\n" + "".join(
    f"| {a}   | {b}    |\n+------+------+\n" for a, b in ROWS
)
FRAME = "+------+------+\n| mill | tons |\n+------+------+\n" + "".join(
    f"| {a}   |    {b} |\n" for a, b in ROWS
) + "+------+------+\n"  # fmt: skip
SIMPLE = (
    "====  ====\nmill  tons\n====  ====\n"
    + "".join(f"{a}    {b}\n" for a, b in ROWS)
    + "====  ====\n"
)
DASHES = " mill  tons\n-----  ----\n" + "".join(f"   {a}     {b}\n" for a, b in ROWS)
PSQL = " mill | tons \n------+------\n" + "".join(f" {a}   |    {b}\n" for a, b in ROWS)


def inset(table: str, prefix: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in table.splitlines())


@pytest.mark.parametrize("table", [BARS, GRID, FRAME, SIMPLE, DASHES, PSQL])
@pytest.mark.parametrize("prefix", ["", "> ", "    "])
@pytest.mark.parametrize("name", ["a.md", "a.rst", "a.org", "a.txt", "a"])
def test_rows_of_drawn_tables_name_their_columns(name: str, prefix: str, table: str) -> None:
    data = f"Before\n\n{inset(table, prefix)}\nafter\n"
    assert text(name, data) == f"Before\n\n{inset(LINES, prefix)}\nafter\n"


def test_drawn_tables_of_notebooks_name_their_columns() -> None:
    cell = {"cell_type": "markdown", "source": [*BARS.splitlines(keepends=True), "\n", "after"]}
    assert text("a.ipynb", json.dumps({"cells": [cell]})) == f"{LINES}\nafter"


def test_drawn_tables_of_mails_name_their_columns() -> None:
    mail = f"Subject: Rope\nFrom: a@b\n\nHello\n\n{inset(BARS, '> ')}\nafter\n"
    assert (
        text("a.eml", mail) == f"Subject: Rope\nFrom: a@b\n\nHello\n\n{inset(LINES, '> ')}\nafter"
    )


@pytest.mark.parametrize("row", ["| {} | {}\n", "|{}\n|{}\n\n", "| {}\n| {}\n"])
def test_tables_of_asciidoc_name_their_columns(row: str) -> None:
    rows = "".join(row.format(*one) for one in ROWS)
    assert text("a.adoc", f"|===\n| mill | tons\n\n{rows}|===\nafter\n") == f"{LINES}after\n"
    unnamed = f"|===\n| M0 | 0\n{rows}|===\n"
    assert text("a.adoc", unnamed) == unnamed


def test_rows_of_several_lines_are_one() -> None:
    grid = GRID.replace("| M1   | 1    |\n", "| M1   | 1    |\n|      | to 3 |\n")
    assert "mill: M1; tons: 1 to 3\n" in text("a.rst", grid)
    simple = SIMPLE.replace("M1    1\n", "M1    1\n      to 3\n")
    assert "mill: M1; tons: 1 to 3\n" in text("a.rst", simple)
    org = BARS.replace("|-----:|", "+------|").replace("| M3", "|------+------|\n| M3")
    assert text("a.org", org) == LINES


@pytest.mark.parametrize(
    "data",
    [
        "Mills\n=====\n\nA | B\n\n== ==\nx y\n== ==\nz\n",
        GRID.replace("| M1   | 1    |", "| M1 and more |"),
        f"```\n{BARS}```\n",
        "\n".join(BARS.splitlines()[:5]),
        "a  b\n-- --\n1  2\n",
        "+--+\n|x|\n+--+\n",
    ],
)
def test_what_is_no_long_table_stays_as_it_is(data: str) -> None:
    assert text("a.md", data) == data


# Work


@pytest.mark.parametrize(
    "piece",
    ["|===\n", "|===\n|a|b\n\n", "+--+--+\n", "== ==\n", "a b\n== ==\n", "a b\n-- --\n", "a|b\n--|--\n", "+-", "== ",
     "> ", "|", "|-", "a  b\n-- --\n   y\n", "> a|b\n> -|-\n"],
)  # fmt: skip
def test_looking_for_drawn_tables_takes_time_linear_in_the_text(piece: str) -> None:
    def seconds(count: int) -> float:
        return processor_seconds(lambda: list(with_named_rows(piece * count, True)))

    assert_linear(seconds, 4_000)


def test_many_tables_take_time_linear_in_their_rows() -> None:
    blocks: list[dict[int, str]] = [
        {0: "mill", 1: "tons"},
        {0: "Marl", 1: "5"},
        {},
        {0: "x"},
        {},
        {},
    ]

    def seconds(count: int) -> float:
        return processor_seconds(lambda: list(table_lines(blocks * count)))

    assert_linear(seconds, 4_000)
