"""Rows to text, for the tables of every format: each row is a line that names its columns, so a
passage from the middle of a table makes sense.

A row is a dict from the number of a column to its text, without blank cells: a cell far to the
right costs no more than one at the left.
"""

import functools
import itertools
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Row = Mapping[int, str]
# The rows of a header, by their numbers, with each name in all columns that it spans.
Spread = Callable[[Sequence[int]], Sequence[Row]]

# The names of columns are looked for in the first `SAMPLE_ROWS` rows.
SAMPLE_ROWS = 12
# A name is repeated in each row, so of a longer one the beginning is.
NAME_CHARS = 60
# A longer row becomes several lines, and each begins with the first column of the row. A digit may
# be a token, and a letter of some scripts three: so a line fits into a passage of 256 tokens.
LINE_BYTES = 240
# A longer value, which is prose of three letters a token and more, is cut into several lines, too.
VALUE_BYTES = 700
# A row of names fills at least this share of the columns, a title above the table at most the next.
MOST_COLUMNS = 0.6
FEW_COLUMNS = 0.5
# So many rows of two cells may be said about a table above it, as in "Author: Ada".
FEW_ROWS = 4
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


def named_lines(rows: Iterable[Row], header: Header, groups: Iterable[Row] = ()) -> Iterator[str]:
    """The lines of a table: titles as they are, then each row as "name: value; name: value".

    `groups` are the rows of the header in which each name stands in all columns that it spans, if
    that is known. A table of one row has its values alone.
    """
    filled = (row for row in rows if row)
    yield from _titles(itertools.islice(filled, header.titles))
    named = list(itertools.islice(filled, header.names))
    first = next(filled, None)
    if first is None:
        yield from map(_values, named)
        return
    names = column_names(list(groups) or _spread(named))
    for row in itertools.chain([first], filled):
        yield from row_lines(row, names)


def table_lines(rows: Iterable[Row], spread: Spread | None = None) -> Iterator[str]:
    """The lines of one or several tables, in which a blank row has no cells: as `named_lines`, and
    a table below another one, behind a blank row, has its own names.

    `spread` gives the rows of a header as `groups` of `named_lines`, if that is known.
    """
    ahead = _Ahead(rows)
    names: dict[int, str] = {}
    numeric = frozenset[int]()
    is_first = True
    while block := ahead.block():
        texts = [row for _, row in block]
        if is_first and not _is_table(texts):  # a title may stand behind a blank row, too
            block = ahead.rows()
            texts = [row for _, row in block]
        if is_first or _begins_table(texts, names, numeric):
            header = find_header(texts)
            yield from _titles(row for _, row in ahead.take(header.titles))
            taken = ahead.take(header.names)
            named = [row for _, row in taken]
            if not ahead.rows():
                yield from map(_values, named)
                return
            numeric = _numeric_columns([row for _, row in ahead.block()])
            numbers = [number for number, _ in taken]
            names = column_names(spread(numbers) if spread else _spread(named))
        elif all(map(_is_remark, texts)) and len(names) > 1:
            yield from (_values(row) for _, row in ahead.take(len(texts)))
        is_first = False
        for row in ahead.rest_of_block():
            yield from row_lines(row, names)


class _Ahead:
    """Numbered rows that can be looked at before they are taken."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = enumerate(rows)
        self._seen: deque[tuple[int, Row]] = deque()

    def block(self) -> list[tuple[int, Row]]:
        """The next rows up to a blank one, at most `SAMPLE_ROWS`; blank rows before them go."""
        while self._look(1) and not self._seen[0][1]:
            self._seen.popleft()
        found = list[tuple[int, Row]]()
        while len(found) < SAMPLE_ROWS and self._look(len(found) + 1) and self._seen[len(found)][1]:
            found.append(self._seen[len(found)])
        return found

    def rows(self) -> list[tuple[int, Row]]:
        """The next rows that are not blank, at most `SAMPLE_ROWS`."""
        count = SAMPLE_ROWS
        while sum(1 for _, row in self._seen if row) < SAMPLE_ROWS and self._look(count):
            count += 1
        return [(number, row) for number, row in self._seen if row][:SAMPLE_ROWS]

    def take(self, count: int) -> list[tuple[int, Row]]:
        """The next rows that are not blank, as many as `count`."""
        taken = list[tuple[int, Row]]()
        while len(taken) < count and self._look(1):
            number, row = self._seen.popleft()
            if row:
                taken.append((number, row))
        return taken

    def rest_of_block(self) -> Iterator[Row]:
        """The rows up to the next blank one, which goes."""
        while self._look(1):
            _, row = self._seen.popleft()
            if not row:
                return
            yield row

    def _look(self, count: int) -> bool:
        """Whether there are so many rows."""
        while len(self._seen) < count:
            if (following := next(self._rows, None)) is None:
                return False
            if following[1] or not self._seen or self._seen[-1][1]:  # of blank rows the first
                self._seen.append(following)
        return True


def _titles(rows: Iterable[Row]) -> Iterator[str]:
    """Rows above the names as text; one that is merged downwards is there once."""
    before = ""
    for row in rows:
        if (title := _values(row).removeprefix("# ")) != before:
            yield title
        before = title


def _values(row: Row) -> str:
    return "; ".join(row.values())


def _is_table(rows: Sequence[Row]) -> bool:
    """Whether the first block of rows is surely a table of its own, and no title of the next."""
    header = find_header(rows)
    names = rows[header.titles]
    data = len(rows) - header.titles - header.names
    is_large = len(names) > 2 or len(rows) > FEW_ROWS or (header.titles > 0 and data > 1)
    return is_large and _contrasts(rows, header) and not next(iter(names.values())).endswith(":")


def _begins_table(rows: Sequence[Row], names: Mapping[int, str], numeric: Set[int]) -> bool:
    """Whether rows behind a blank one are a table with names of its own. Otherwise they are more
    rows of the table above, which has these `names`, and numbers in the columns `numeric`.
    """
    header = find_header(rows)
    first = rows[header.titles]
    data = rows[header.titles + header.names :]
    if not data or len(first) < 2 or not _is_text(first):
        return False
    is_same = [*first.values()] == [*names.values()]
    is_repeated = any(row.get(column) == value for row in data for column, value in first.items())
    has_texts = any(
        not is_repeated and all(row.get(column) and is_words([row[column]]) for row in rows)
        for column in numeric & first.keys()
    )
    more = len(first.keys() - names.keys())
    return is_same or more > 1 or has_texts or _contrasts(rows, header)


def _contrasts(rows: Sequence[Row], header: Header) -> bool:
    """Whether a column has numbers alone below a name that is none, and all columns have names."""
    last = rows[header.titles + header.names - 1]
    data = rows[header.titles + header.names :]
    is_full = len(last) >= max(2, *map(len, data), 0)
    return is_full and _is_text(last) and not _numeric_columns(data).isdisjoint(last)


def _numeric_columns(rows: Sequence[Row]) -> frozenset[int]:
    """The columns in which these rows have numbers alone."""
    texts = {column for row in rows for column, value in row.items() if is_words([value])}
    return frozenset(column for row in rows for column in row) - texts


def _is_remark(row: Row) -> bool:
    return len(row) == 1 and 0 in row and _is_text(row)


def row_lines(row: Row, names: Mapping[int, str]) -> Iterator[str]:
    """A row as lines of about `LINE_BYTES`; each names the row by its first column."""
    line: list[str] = []
    key = ""
    size = 0
    for column, value in row.items():
        name = names.get(column, "")
        for part in _parts_of(value):
            pair = f"{name}: {part}" if name else part
            if line and size + len(pair.encode()) > LINE_BYTES:
                yield "; ".join(line)
                line = [key]
                size = len(key.encode())
            key = key or (pair if len(pair) <= 2 * NAME_CHARS else f"{pair[: 2 * NAME_CHARS]}...")
            line.append(pair)
            size += len(pair.encode()) + 2
    if line:
        yield "; ".join(line)


def _parts_of(value: str) -> list[str]:
    """A value in parts of at most `VALUE_BYTES`, of whole sentences if they fit."""
    return [value] if len(value.encode()) <= VALUE_BYTES else _value_cutter().split_text(value)


@functools.cache
def _value_cutter() -> Any:
    from langchain_text_splitters import RecursiveCharacterTextSplitter  # takes half a second

    return RecursiveCharacterTextSplitter(
        separators=[r"(?<=[.!?])\s+", r"(?<=[。！？；])", r"\s+", ""],
        is_separator_regex=True,
        keep_separator="start",
        chunk_size=VALUE_BYTES,
        chunk_overlap=0,
        length_function=lambda text: len(text.encode()),
    )


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
        if not is_comment and not _is_group(rows, number) and _is_above_names(rows, number):
            continue
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
    # "Author: Ada" over the names; a name that is merged downwards is no such pair
    is_a_pair = {0, 1} <= above.keys() and below.get(0, above[0]) != above[0]
    has_one_title = len(above) < 2 and 0 in above
    if is_a_pair or has_one_title or not gaps <= below.keys() or max(gaps, default=0) < min(above):
        return False
    if not gaps or len(below) < 2 or len(data) < len(columns) * MOST_COLUMNS:
        return False
    if len(set(below.values())) < len(below):  # the same names under each group
        return True
    has_numbers = any(_NUMBER.fullmatch(data.get(column, "")) for column in below)
    return _is_text(above) and _is_text(below) and has_numbers


def _is_above_names(rows: Sequence[Row], at: int) -> bool:
    """Whether the row at `at` has fewer cells than one of the next two, which has names over
    numbers, as in "Deliveries, by quay".
    """
    above = rows[at]
    for names, data in pairwise(rows[at + 1 : at + 4]):
        if len(names) <= len(above):
            continue
        return (
            above.keys() < names.keys()
            and _is_text(names)
            and any(_NUMBER.fullmatch(data.get(column, "")) for column in names)
        )
    return False


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


def is_words(values: Iterable[str]) -> bool:
    """Whether no value is a number."""
    return not any(map(_NUMBER.fullmatch, values))


def _is_text(row: Row) -> bool:
    return is_words(row.values())


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_CHARS else f"{name[:NAME_CHARS].rstrip()}..."
