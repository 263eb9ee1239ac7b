"""Documents of every format with each field and structure blown up: work, memory and disk are
linear in what was sent.

Work is counted as calls, also of functions in C, and as characters that are tokenized: the same on
a busy machine.
"""

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ragkv.errors import DocumentError
from ragkv.retrieval import Document, Index, Splitter, index_bytes, load_bytes
from ragkv.retrieval.documents.formats import FORMATS
from tests.timing import assert_linear, processor_seconds

from .pdf_files import pdf_of
from .sample_files import epub_of, paragraph, pdf, pptx_of, table, word, xlsx_of

SIZE = 300  # of the smallest document, in repeated units
SLACK = 1.2  # how much worse than linear a doubling may be
LEAST = 200_000  # Below so many bytes of memory or disk, what every document takes is most of it.


def jsonl(**fields: object) -> bytes:
    import json

    return json.dumps({"text": "A mill. " * 50, **fields}).encode()


def notebook(cells: int) -> bytes:
    import json

    made = [{"cell_type": "code", "source": f"wheel = {k}", "outputs": []} for k in range(cells)]
    return json.dumps({"cells": made, "nbformat": 4, "metadata": {}}).encode()


def subtitles(count: int) -> str:
    """As SubRip has them; each lasts a second."""
    return "".join(
        f"{k + 1}\n{k // 3600:02}:{k // 60 % 60:02}:{k % 60:02},000 --> "
        f"{k // 3600:02}:{k // 60 % 60:02}:{k % 60:02},900\nLine {k} of it.\n\n"
        for k in range(count)
    )


def mail(*lines: str) -> str:
    return "\n".join(("Subject: Wheel", *lines))


CASES: dict[str, Callable[[int], bytes | str]] = {
    "word.txt": lambda n: "x" * 40 * n,
    "words.txt": lambda n: " ".join(f"w{k:x}" for k in range(4 * n)),
    "same.txt": lambda n: "mill " * 20 * n,
    "lines.txt": lambda n: "ab cd\n" * 8 * n,
    "blank.txt": lambda n: "a\n\n" * 12 * n,
    "spaces.txt": lambda n: "a" + " " * 60 * n + "b",
    "sentences.txt": lambda n: "A b. " * 8 * n,
    "marks.txt": lambda n: "a" + "\u0301" * 20 * n,
    "emoji.txt": lambda n: "\U0001f469\u200d\U0001f467" * 8 * n,
    "chinese.txt": lambda n: "磨坊在河边。" * 6 * n,
    "headings.md": lambda n: "# a b\n" * 4 * n,
    "deep.md": lambda n: (
        "".join(f"{'#' * k} {'t' * 150}\n" for k in range(1, 6)) + "###### s\nword two\n" * 4 * n
    ),
    "heading.md": lambda n: "# " + "h" * 20 * n + "\n\n" + "some words. " * 8 * n,
    "blanks.md": lambda n: ("# a" + " " * 20 * n + "b\n") * 2,
    "closed.md": lambda n: "# x" + " #" * 20 * n,
    "fences.md": lambda n: "```\ncode here\n```\n" * 4 * n,
    "quotes.md": lambda n: "> " * 12 * n + "x",
    "quotations.md": lambda n: ("> " * 12 * n + "x\n") * 3,
    "tabbed_quotations.md": lambda n: "mill\n" + ("\t> " * 12 * n + "x\n") * 2,
    "blank_quotations.md": lambda n: "mill " * 300 + "\n" + "> \n" * 12 * n,
    "tags.html": lambda n: "<a " * 12 * n,
    "deep.html": lambda n: "<div>" * 4 * n + "x",
    "cells.html": lambda n: "<table><tr>" + "<td>x y" * 6 * n,
    "lists.html": lambda n: "<ul><li>word" * 4 * n,
    "headings.html": lambda n: "<h1>a b</h1>" * 4 * n,
    "rows.csv": lambda n: "a,b\n" + "1,2\n" * 4 * n,
    "columns.csv": lambda n: (
        ",".join(f"c{k}" for k in range(4 * n)) + "\n" + "1," * (4 * n - 1) + "1\n"
    ),
    "quotes.csv": lambda n: '"' * 20 * n + "\n",
    "source.jsonl": lambda n: jsonl(source="s" * 60 * n),
    "metadata.jsonl": lambda n: jsonl(
        metadata={f"k{k}": k for k in range(n)}, text="A mill. " * 4 * n
    ),
    "documents.jsonl": lambda n: b"\n".join(
        jsonl(id=f"d{k}", text=f"Line {k} of it.") for k in range(n // 2)
    ),
    "headers.eml": lambda n: mail(*[f"X-{k}: y" for k in range(2 * n)], "", "body " * n),
    "words.eml": lambda n: mail("To: " + "=?utf-8?q?a?= " * n, "", "body " * n),
    "paragraphs.docx": lambda n: word(paragraph("one two three") * (n // 4)),
    "rows.docx": lambda n: word(table(*[["a", "b"]] * (n // 8))),
    "spans.pdf": lambda n: pdf_of(
        "BT 72 700 Td /F1 1 Tf "
        + "/Span << /ActualText (abc) >> BDC (x) Tj EMC (-) Tj 0 -1 Td " * (n // 4)
        + "ET"
    ),
    "lines.log": lambda n: "a \\u00e9 b\n" * 4 * n,
    "lines.srt": subtitles,
    "cells.ipynb": notebook,
    "slide.pptx": lambda n: pptx_of(n // 2),
    "sheet.xlsx": lambda n: xlsx_of(n // 2),
    "chapter.epub": lambda n: epub_of(f"<html><body>{'<p>one two</p>' * n}</body></html>"),
    "pages.pdf": lambda n: pdf(*[f"Page {k} of the mill." for k in range(n // 20)]),
}


class Cost(NamedTuple):
    """What a document took."""

    calls: int
    tokenized: int
    memory: int
    disk: int


def cost(name: str, size: int, folder: Path) -> Cost:
    """Parse, split and store a document."""
    made = CASES[name](size)
    tokenized = 0
    calls = 0
    data = made.encode() if isinstance(made, str) else made

    def count(text: str) -> int:
        nonlocal tokenized
        tokenized += len(text)
        return len(text) // 4 + 1

    def counted(*_: Any) -> None:
        nonlocal calls
        calls += 1

    with Index(folder, Splitter(count, 32)) as index:
        tracemalloc.start()
        sys.setprofile(counted)
        try:
            found = list(load_bytes(Path(name), data))
            documents = [one for one in found if isinstance(one, Document)]
            index.writer.ingest(documents)
        except DocumentError:
            documents = []
        finally:
            sys.setprofile(None)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        index.search("mill", 3)
        used = index_bytes(folder)
        index.writer.delete([one.id for one in documents])
        assert index_bytes(folder) < 150_000, "deleting has freed the space"
    return Cost(calls, tokenized, peak, used)


def test_a_file_of_every_format_grows() -> None:
    growing = {FORMATS.get(Path(name).suffix) for name in CASES}
    assert set(FORMATS.values()) == growing, "CASES lacks a file that this loader reads"


@pytest.mark.parametrize("name", CASES)
def test_four_times_the_document_takes_four_times_the_work_memory_and_disk(
    name: str, tmp_path: Path
) -> None:
    cost(name, 10, tmp_path / "imports")
    one, two, four = (cost(name, size * SIZE, tmp_path / f"{size}") for size in (1, 2, 4))
    for field, least in (
        ("calls", 2_000),
        ("tokenized", 10_000),
        ("memory", LEAST),
        ("disk", LEAST),
    ):
        first, second, last = (max(getattr(one_of, field), least) for one_of in (one, two, four))
        assert second < 2 * SLACK * first and last < 2 * SLACK * second, (
            f"{field}: {first}, {second}, {last}"
        )


def test_blank_rows_behind_a_table_cost_no_more_each() -> None:
    def seconds(rows: int) -> float:
        data = b"mill,tons\nOak,5\n" + b",\n" * rows
        return processor_seconds(lambda: load_bytes(Path("d.csv"), data))

    assert_linear(seconds, 4_000)
