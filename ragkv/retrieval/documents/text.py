"""Plain text, read unchanged, except that the rows of its tables name their columns."""

import re

from .files import MARKDOWN
from .html import declared_encoding
from .reading import FileContent, Loaded
from .text_tables import with_named_rows

# Text for people, in which tables are drawn.
WITH_TABLES = MARKDOWN | {"", ".txt", ".text", ".rst", ".org", ".adoc"}
# Programs declare their encoding in a comment of the first two lines, LaTeX by a package.
DECLARED_BYTES = 4096
_CODING = re.compile(rb"\A(?:[^\n]*\n)?[ \t\f]*(?:#|%|//|;|--)[^\n]*?coding[:=][ \t]*([-\w.]+)")
_INPUTENC = re.compile(rb"\\usepackage\s*\[([-\w]+)\]\s*\{inputenc\}")


def load_text(content: FileContent) -> Loaded:
    """One document: the file as text for people."""
    suffix = content.path.suffix.lower()
    text = content.text(_declared(content.data, suffix))
    if suffix in WITH_TABLES:
        text = "\n".join(content.bounded(with_named_rows(text, suffix in MARKDOWN)))
    yield content.document(text, {})


def load_program(content: FileContent) -> Loaded:
    """One document: the file as text of a program, or for one."""
    declared = _declared(content.data, content.path.suffix.lower())
    yield content.document(content.text(declared, of_program=True), {})


def _declared(data: bytes, suffix: str) -> str | None:
    """The encoding that a file names in itself, or `None`."""
    head = data[:DECLARED_BYTES]
    if suffix == ".xml":
        return declared_encoding(data)
    found = _INPUTENC.search(head) if suffix == ".tex" else _CODING.match(head)
    label = found.group(1).decode("ascii") if found else None
    # Emacs adds the ends of lines, as in "utf-8-unix".
    return re.sub("-(unix|dos|mac)$", "", label) if label else None
