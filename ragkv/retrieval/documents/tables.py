"""Rows to text, for the tables of every format: each row is a line that names its columns, so a
passage from the middle of a table makes sense.

A row is a dict from the number of a column to its text, without blank cells: a cell far to the
right costs no more than one at the left.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[int, str]

# The names of columns are looked for in the first `SAMPLE_ROWS` rows.
SAMPLE_ROWS = 12
# A name is repeated in each row, so of a longer one the beginning is.
NAME_CHARS = 60
# A longer row becomes several lines, and each begins with the first column of the row.
LINE_CHARS = 400
# A row of names fills at least this share of the columns, a title above the table at most the next.
MOST_COLUMNS = 0.6
FEW_COLUMNS = 0.5
# Numbers with a unit, and dates: rows of data have them, heads of columns seldom do.
_NUMBER = re.compile(r"(?<!\W)\W*+\d[\d.,:/\s'-]*+(?:%|[^\W\d]{1,3})?\W*+")


@dataclass(frozen=True, slots=True)
class Header:
    """Where the names of columns stand in the first rows of a table."""

    titles: int  # rows above the names, which are text
    names: int  # rows that name the columns together


def row_of(values: Iterable[str]) -> dict[int, str]:
    """A row of values that stand in columns 0, 1, ...; white space is reduced."""
    cleaned = ((column, " ".join(value.split())) for column, value in enumerate(values))
    return {column: value for column, value in cleaned if value}


def named_lines(
    rows: Iterable[Row], header: Header | None = None, groups: Iterable[Row] = ()
) -> Iterator[str]:
    """The lines of a table: titles as they are, then each row as "name: value; name: value".

    Without a `header` it is looked for. `groups` are the rows of the header in which each name
    stands in all columns that it spans, if that is known. A table of one row has its values alone.
    """
    filled = (row for row in rows if row)
    sample = list(itertools.islice(filled, SAMPLE_ROWS))
    header = header or find_header(sample)
    for title in sample[: header.titles]:
        yield "; ".join(title.values()).removeprefix("# ")
    named = sample[header.titles : header.titles + header.names]
    data = sample[header.titles + header.names :]
    if not data:
        yield from ("; ".join(row.values()) for row in named)
        return
    names = column_names(list(groups) or _spread(named))
    for row in itertools.chain(data, filled):
        yield from row_lines(row, names)


def row_lines(row: Row, names: Mapping[int, str]) -> Iterator[str]:
    """A row as lines of about `LINE_CHARS` characters; each names the row by its first column."""
    line: list[str] = []
    key = ""
    chars = 0
    for column, value in row.items():
        name = names.get(column, "")
        pair = f"{name}: {value}" if name else value
        if line and chars + len(pair) > LINE_CHARS:
            yield "; ".join(line)
            line = [key]
            chars = len(key)
        key = key or (pair if len(pair) <= 2 * NAME_CHARS else f"{pair[: 2 * NAME_CHARS]}...")
        line.append(pair)
        chars += len(pair) + 2
    if line:
        yield "; ".join(line)


def column_names(named: Sequence[Row]) -> dict[int, str]:
    """The name of each column from the rows of a header, as in "2024 / pieces"."""
    names: dict[int, list[str]] = {}
    for row in named:
        for column, name in row.items():
            above = names.setdefault(column, [])
            if name not in above:
                above.append(name)
    return {column: _shortened(" / ".join(parts)) for column, parts in names.items()}


def find_header(rows: Sequence[Row]) -> Header:
    """Where the names of columns stand. Without any sign of it the first row has them."""
    width = Counter(len(row) for row in rows).most_common(1)[0][0] if rows else 0
    width = max(width, *(len(row) for row in rows[:3])) if rows else 0
    titles = 0
    for number, row in enumerate(rows[:-1]):
        is_comment = next(iter(row.values())).startswith("# ")
        if not is_comment and len(row) >= 2 and len(row) >= MOST_COLUMNS * width and _is_text(row):
            titles = number
            break
        if not is_comment and _is_group(rows, number):
            titles = number
            break
        if not is_comment and len(row) > max(1, FEW_COLUMNS * width):
            break
    return Header(titles, 2 if _is_group(rows, titles) else 1)


def _is_group(rows: Sequence[Row], at: int) -> bool:
    """Whether the row at `at` has names over several columns of the next row of names."""
    if len(rows) < at + 3:
        return False
    above, below, data = rows[at : at + 3]
    columns = above.keys() | below.keys()
    gaps = columns - above.keys()
    is_a_pair = {0, 1} <= above.keys() and 0 in below  # "Author: Ada" over the names
    has_one_title = len(above) < 2 and 0 in above
    if is_a_pair or has_one_title or not gaps <= below.keys() or max(gaps, default=0) < min(above):
        return False
    if not gaps or len(below) < 2 or len(data) < len(columns) * MOST_COLUMNS:
        return False
    if len(set(below.values())) < len(below):  # the same names under each group
        return True
    has_numbers = any(_NUMBER.fullmatch(data.get(column, "")) for column in below)
    return _is_text(above) and _is_text(below) and has_numbers


def _spread(named: Sequence[Row]) -> list[Row]:
    """Rows of a header, each but the last with its names in the columns up to the next name."""
    if len(named) < 2:
        return list(named)
    last = named[-1]
    spread: list[Row] = []
    for row in named[:-1]:
        full = dict(row)
        name = ""
        for column in sorted({*row, *last}):
            name = row.get(column, name if column in last else "")
            if name:
                full[column] = name
        spread.append(full)
    return [*spread, last]


def _is_text(row: Row) -> bool:
    return not any(_NUMBER.fullmatch(value) for value in row.values())


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_CHARS else f"{name[:NAME_CHARS].rstrip()}..."
