"""Text that is read as it is, but for what is written in it in another way: escapes, references to
characters, colours of a terminal, tables of Markdown.
"""

import html
import json
import re
from collections.abc import Iterator

from .files import MARKDOWN
from .html import declared_encoding
from .html_tables import ROWS_OF_COLUMNS
from .reading import FileContent, Loaded
from .tables import Header, named_lines, row_of

MARKUP = MARKDOWN | {".xml", ".rst", ".adoc", ".org"}
JSON = frozenset({".json", ".jsonc", ".geojson"})
# Programs declare their encoding in a comment of the first two lines, LaTeX by a package.
DECLARED_BYTES = 4096
_CODING = re.compile(rb"\A(?:[^\n]*\n)?[ \t\f]*(?:#|%|//|;|--)[^\n]*?coding[:=][ \t]*([-\w.]+)")
_INPUTENC = re.compile(rb"\\usepackage\s*\[([-\w]+)\]\s*\{inputenc\}")
# Colours and other orders to a terminal; and a letter that was struck over by the next.
_TERMINAL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\^_]|.\x08"
)
_ESCAPES = re.compile(r"(?<!\\)((?:\\\\)*)((?:\\u[0-9a-fA-F]{4})+)")
_REFERENCE = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});")
# A cell of the line between the names and the rows of a table.
_RULE = re.compile(r":?-+:?")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_BAR = re.compile(r"(?<!\\)\|")


def load_text(content: FileContent) -> Loaded:
    """One document: the file as text."""
    suffix = content.path.suffix.lower()
    text = without_orders(content.text(_declared(content.data, suffix)))
    if suffix in JSON:
        text = _ESCAPES.sub(_unescaped, text)
    if suffix in MARKUP:
        text = _REFERENCE.sub(_referred, text)
    if suffix in MARKDOWN:
        text = "\n".join(content.bounded(_with_named_rows(text)))
    yield content.document(text, {})


def without_orders(text: str) -> str:
    """`text` without what tells a terminal how to show it."""
    return _TERMINAL.sub("", text) if "\x1b" in text or "\x08" in text else text


def _declared(data: bytes, suffix: str) -> str | None:
    """The encoding that a file names in itself, or `None`."""
    head = data[:DECLARED_BYTES]
    if suffix == ".xml":
        return declared_encoding(data)
    found = _INPUTENC.search(head) if suffix == ".tex" else _CODING.match(head)
    label = found.group(1).decode("ascii") if found else None
    # Emacs adds the ends of lines, as in "utf-8-unix".
    return re.sub("-(unix|dos|mac)$", "", label) if label else None


def _unescaped(found: re.Match[str]) -> str:
    """Escapes of JSON as the characters that they stand for; what is no letter stays an escape."""
    before, escapes = found.groups()
    text = json.loads(f'"{escapes}"')
    return f"{before}{text}" if _is_plain(text) else found.group()


def _referred(found: re.Match[str]) -> str:
    """The character that a reference stands for; those of ASCII stay, they would be markup."""
    text = html.unescape(found.group())
    if text == "\xa0":
        return " "
    return text if _is_plain(text) else found.group()


def _is_plain(text: str) -> bool:
    return all(
        char.isprintable() and char > "\x7f" and not "\ud800" <= char < "\ue000" for char in text
    )


def _with_named_rows(text: str) -> Iterator[str]:
    """The lines of Markdown, in which each row of a long table names its columns."""
    lines = text.split("\n")
    fence = ""
    at = 0
    while at < len(lines):
        line = lines[at]
        if mark := _FENCE.match(line):
            fence = "" if fence and mark.group(1).startswith(fence) else fence or mark.group(1)
        end = at + 1
        if not fence and "|" in line and at + 1 < len(lines) and _is_rule(lines[at + 1], line):
            end = at + 2
            while end < len(lines) and "|" in lines[end]:
                end += 1
        if end - at - 2 > ROWS_OF_COLUMNS:
            rows = [row_of(_cells(one)) for one in (line, *lines[at + 2 : end])]
            yield from named_lines(rows, Header(0, 1))
        else:
            yield from lines[at:end]
        at = end


def _is_rule(line: str, names: str) -> bool:
    cells = _cells(line)
    return all(map(_RULE.fullmatch, cells)) and len(cells) == len(_cells(names)) > 1


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|")
    if inner.endswith("|") and not inner.endswith("\\|"):
        inner = inner[:-1]
    return [cell.strip().replace("\\|", "|") for cell in _BAR.split(inner)]
