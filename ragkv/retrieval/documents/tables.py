"""Rows to text: each row is one line that names its columns, so a passage from the middle of a table makes sense."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ragkv.errors import DocumentError

from .limits import ParseLimits
from .reading import Loaded, decode, document_of, parsing

DELIMITERS = ",;\t|"
SAMPLE_CHARS = 64 * 1024


def lines_of(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Each row after the first as "column: value; column: value". The first row has the names of the columns.

    Rows without a value are left out. If there is only one row, its values are the text.
    """
    header: list[str] | None = None
    others = 0
    for row in rows:
        values = [" ".join(value.split()) for value in row]
        if not any(values):
            continue
        if header is None:
            header = values
            continue
        others += 1
        names = [*header, *[""] * (len(values) - len(header))]
        pairs = zip(names, values, strict=False)
        yield "; ".join(f"{name}: {value}" if name else value for name, value in pairs if value)
    if header is not None and not others:
        yield "; ".join(filter(None, header))


def load_csv(file: Path, data: bytes, encoding: str, limits: ParseLimits) -> Loaded:
    """One document. In a `.tsv` columns are separated by tabs; else the separator is found in the first rows."""
    text = decode(file, data, encoding)
    delimiter = "\t" if file.suffix.lower() == ".tsv" else _delimiter(text)
    with parsing(file, "a table"):
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        lines = "\n".join(lines_of(_counted(file, rows, limits)))
    if not lines:
        raise DocumentError(f"{file} holds no values. Remove it, or skip what cannot be read.")
    yield document_of(file, lines, {})


def _counted(file: Path, rows: Iterable[list[str]], limits: ParseLimits) -> Iterator[list[str]]:
    for number, row in enumerate(rows, start=1):
        limits.check("lines", number, f"{file}: the number of rows")
        yield row


def _delimiter(text: str) -> str:
    try:
        return csv.Sniffer().sniff(text[:SAMPLE_CHARS], DELIMITERS).delimiter
    except csv.Error:  # one column, or no regular table
        return ","
