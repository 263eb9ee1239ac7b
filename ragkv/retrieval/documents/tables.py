"""Rows to text: each row is one line that names its columns, so a passage from the middle of a
table makes sense.

Where the first line does not say what separates the columns, clevercsv finds it, by how regular the
table becomes; the standard library's reader reads it.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .reading import FileContent, Loaded

DELIMITERS = ",;\t|"
# The separator of columns is found in the first `SAMPLE_CHARS` of a file.
SAMPLE_CHARS = 16 * 1024


def lines_of(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Each row after the first as "column: value; column: value". The first row has the names of
    the columns.

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


def load_csv(content: FileContent) -> Loaded:
    """One document. A line "sep=;" names the separator, as Excel writes it; in a `.tsv` it is a
    tab.
    """
    text = content.text()
    lost = list[str]()
    if named := re.match(r"sep=(.)\n", text):
        delimiter = named.group(1)
        text = text[named.end() :]
    else:
        delimiter = (
            "\t"
            if content.path.suffix.lower() == ".tsv"
            else _delimiter(text[:SAMPLE_CHARS].lstrip())
        )
    with content.parsing("a table"):
        # of the process; a file has a limit of its own
        csv.field_size_limit(max(csv.field_size_limit(), len(text)))
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
        lines = "\n".join(lines_of(_counted(rows, lost, text.count('"') % 2 == 1)))
    yield content.document(lines, {}, lost)


def _counted(rows: Any, lost: list[str], is_odd: bool) -> Iterator[list[str]]:
    """The rows. If a quote is never closed, the last "row" has all lines behind it, and this is
    told.
    """
    before = 0
    for row in rows:
        first = before + 1
        before = rows.line_num
        yield row
    if is_odd and before > first:
        lost.append(
            f"the columns from line {first} on, where a quote is never closed; their text is kept"
        )


def _delimiter(sample: str) -> str:
    """What separates columns: the one candidate that the names of the columns have, else what makes
    a regular table.
    """
    names = re.sub('"[^"]*"', "", sample.partition("\n")[0])
    candidates = "".join(candidate for candidate in DELIMITERS if candidate in names) or DELIMITERS
    if len(candidates) == 1:
        return candidates
    import clevercsv  # takes a tenth of a second

    try:
        found = clevercsv.Sniffer().sniff(sample, delimiters=candidates)
    except clevercsv.exceptions.Error:  # one column, or no regular table
        return ","
    return (found and found.delimiter) or ","
