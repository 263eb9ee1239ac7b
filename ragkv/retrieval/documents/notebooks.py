"""Jupyter notebooks: the cells in their order, code and what it printed as code of Markdown.

Pictures and other rich outputs are left out where the notebook has no text for them, and this is
told.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ragkv.errors import DocumentError
from ragkv.runtime import counted

from .escapes import unescaped, without_controls
from .reading import FileContent, Loaded
from .text_tables import with_named_rows


def load_notebook(content: FileContent) -> Loaded:
    """One document."""
    lost = list[str]()
    with content.parsing("a notebook"):
        book = json.loads(content.text())
        if not isinstance(book, dict) or not isinstance(
            book.get("cells", book.get("worksheets")), list
        ):
            raise DocumentError(
                f"{content.path} is not a notebook: it has no cells. Rename it to .json to read it "
                "as it is."
            )
        text = "\n\n".join(content.bounded(_cell_texts(book, lost)))
    yield content.document(text, {"format": "markdown"}, lost)


def _cell_texts(book: Mapping[str, Any], lost: list[str]) -> Iterator[str]:
    about = book.get("metadata", {})
    language = about.get("language_info", {}).get("name", "") or about.get("kernelspec", {}).get(
        "language", ""
    )
    without_text = 0
    sheets = book.get("worksheets", [book])  # as in notebooks before 2015
    for cell in (cell for sheet in sheets for cell in sheet.get("cells", ())):
        source = _joined(cell.get("source", cell.get("input", "")))
        if cell.get("cell_type") != "code":
            yield "\n".join(with_named_rows(source, is_markdown=True))
            continue
        if source.strip():
            yield _code(unescaped(source, of_program=True), str(language))
        for output in cell.get("outputs", ()):
            text = _output_text(output)
            if text.strip():
                yield _code(unescaped(without_controls(text), of_program=True), "")
            without_text += not text and output.get("output_type") != "stream"
    if without_text:
        lost.append(f"{counted(without_text, 'output')} without text")


def _output_text(output: Mapping[str, Any]) -> str:
    match output.get("output_type"):
        case "stream":
            return _joined(output.get("text", ""))
        case "error" | "pyerr":
            return f"{output.get('ename', '')}: {output.get('evalue', '')}"
    return _joined(output.get("data", output).get("text/plain", output.get("text", "")))


def _joined(lines: Any) -> str:
    return "".join(map(str, lines)) if isinstance(lines, list) else str(lines)


def _code(text: str, language: str) -> str:
    fence = "~~~~" if "```" in text else "```"
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}"
