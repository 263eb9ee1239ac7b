"""CSV and TSV, read by the standard library. If the first lines do not show what separates the
columns, clevercsv chooses the separator that makes the most regular table.
"""

import csv
import io
import re
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

from .reading import FileContent, Loaded
from .tables import Row, is_words, row_of, table_lines

DELIMITERS = ",;\t|"
# The separator of columns is looked for in the first `SAMPLE_LINES` lines of a file, and clevercsv
# gets `SAMPLE_CHARS`.
SAMPLE_LINES = 12
SAMPLE_CHARS = 16 * 1024


def load_csv(content: FileContent) -> Loaded:
    """One document. A line "sep=;" names the separator, as Excel writes it; in a `.tsv` it is a
    tab.
    """
    text = content.text(of_program=True)
    lost = list[str]()
    if named := re.match(r"sep=(.)\n", text):
        delimiter = named.group(1)
        text = text[named.end() :]
    else:
        delimiter = (
            "\t" if content.path.suffix.lower() in (".tsv", ".tab") else _delimiter(text.lstrip())
        )
    titles = _titles(text, delimiter)
    with content.parsing("a table"):
        # of the process; a file has a limit of its own
        csv.field_size_limit(max(csv.field_size_limit(), len(text)))
        source = io.StringIO(text, newline="")
        above = [{0: source.readline().strip()} for _ in range(titles)]
        rows = csv.reader(source, delimiter=delimiter, skipinitialspace=True)
        below = _counted(rows, lost, titles, text.count('"') % 2 == 1)
        lines = "\n".join(content.bounded(table_lines(chain(above, below))))
    yield content.document(lines, {}, lost)


def _counted(rows: Any, lost: list[str], titles: int, is_odd: bool) -> Iterator[Row]:
    """The rows below `titles` lines. If a quote is never closed, the last "row" has all lines
    behind it, and this is told.
    """
    before = 0
    for row in rows:
        first = titles + before + 1
        before = rows.line_num
        yield row_of(row)
    if is_odd and titles + before > first:
        lost.append(
            f"the columns from line {first} on, where a quote is never closed; their text is kept"
        )


def _titles(text: str, delimiter: str) -> int:
    """How many lines above the table are sentences: there a blank follows each comma, and in the
    table none does.
    """
    head = text.split("\n", SAMPLE_LINES)[:SAMPLE_LINES]
    lines = [(number, line) for number, line in enumerate(head, 1) if delimiter in line]
    titles = 0
    for (number, line), (_, names), (_, data) in zip(lines, lines[1:], lines[2:], strict=False):
        is_prose = line.count(delimiter) == line.count(f"{delimiter} ")
        if not is_prose or '"' in line:
            break
        is_wider = names.count(delimiter) > line.count(delimiter)
        is_named = is_words(names.split(delimiter)) and not is_words(data.split(delimiter))
        if f"{delimiter} " not in names and (is_wider or is_named):
            titles = number
    return titles


def _delimiter(text: str) -> str:
    """The character that separates columns: the only candidate that two lines in a row have, or the
    one that makes a regular table.

    Comments ("# ...") and a title above the table say nothing about it.
    """
    head = "\n".join(text.split("\n", SAMPLE_LINES)[:SAMPLE_LINES])
    unquoted = re.sub('"[^"]*"', "", head)
    lines = [line for line in unquoted.split("\n") if line.strip() and not line.startswith("# ")]
    candidates = "".join(one for one in DELIMITERS if one in head)
    for line, following in pairwise([*lines, lines[-1] if lines else ""]):
        if shared := "".join(one for one in DELIMITERS if one in line and one in following):
            candidates = shared
            break
    if len(candidates) <= 1:
        return candidates or ","
    import clevercsv  # takes a tenth of a second

    try:
        found = clevercsv.Sniffer().sniff(text[:SAMPLE_CHARS], delimiters=candidates)
    except clevercsv.exceptions.Error:  # one column, or no regular table
        return ","
    return (found and found.delimiter) or ","
