"""Tables that are drawn in text: each row of a long one becomes a line that names its columns.

Three kinds are read: tables with bars (Markdown, Org, psql, AsciiDoc), grids (reStructuredText,
MySQL), and columns below rules (reStructuredText, Pandoc). They may be indented or in a quotation.
Tables that are drawn in another way are not changed.
"""

import re
from collections.abc import Callable, Iterator, Sequence

from .html_tables import ROWS_OF_COLUMNS
from .tables import Header, Row, is_words, named_lines, row_of

# The beginning of each line of a table that is indented or in a quotation.
_PREFIX = re.compile(r"[ \t]*+(?:>[ \t]*+)*+")
# A cell of the line between the names and the rows of a table.
_RULE = re.compile(r":?-+:?")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_BAR = re.compile(r"(?<!\\)\|")
_BORDER = re.compile(r"\+(?:[-=:]++\+)++")
_ASCIIDOC = "|==="
# A grid of so many borders, or fewer, has none between its rows.
OUTER_BORDERS = 3

Lines = Sequence[str]
Table = tuple[list[Row], int]  # the names and the rows; how many lines the table has


def with_named_rows(text: str, is_markdown: bool) -> Iterator[str]:
    """The lines of `text`, in which each row of a long table names its columns. In Markdown, what
    is code stays as it is.
    """
    lines = text.split("\n")
    fence = ""
    at = 0
    while at < len(lines):
        if is_markdown and (mark := _FENCE.match(lines[at])):
            fence = "" if fence and mark.group(1).startswith(fence) else fence or mark.group(1)
        table, prefix = (None, "") if fence else _table_at(lines, at)
        rows, count = table or ([], 1)
        if len(rows) > ROWS_OF_COLUMNS + 1:
            yield from (prefix + line for line in named_lines(rows, Header(0, 1)))
        else:
            yield from lines[at : at + count]
        at += count


def _table_at(lines: Lines, at: int) -> tuple[Table | None, str]:
    """The table that begins at a line, and what stands before each of its lines."""
    line = lines[at]
    prefix = _PREFIX.match(line)[0]  # type: ignore[index]
    first = line[len(prefix) :].rstrip()
    read: Callable[[Iterator[str]], Table | None] | None = None
    if _BORDER.fullmatch(first):
        read = _grid
    elif first == _ASCIIDOC:
        read = _cells_between_marks
    elif first.startswith("==") and _rules_columns(first):
        read = _columns
    elif first and at + 1 < len(lines):
        # names may be indented more than the rule below them
        under = _PREFIX.match(lines[at + 1])[0]  # type: ignore[index]
        prefix = under if prefix.startswith(under) else prefix
        below = lines[at + 1][len(prefix) :].strip()
        if "|" in first and _is_rule(below, first):
            read = _bars
        elif below.startswith("--") and _rules_columns(below):
            read = _columns
    return (read(_inner(lines, at, prefix)) if read is not None else None), prefix


def _rules_columns(line: str) -> bool:
    """Whether the line is a rule over or below columns that blanks separate."""
    cells = line.split(" ")
    marks = [cell for cell in cells if cell]
    return (
        bool(cells[0])
        and len(marks) > 1
        and all(len(one) > 1 for one in marks)
        and any(set(line) == {mark, " "} for mark in "=-")
    )


def _inner(lines: Lines, at: int, prefix: str) -> Iterator[str]:
    """The lines from `at` on, as long as they have the prefix, without it. A blank one may have
    less of it.
    """
    for number in range(at, len(lines)):
        line = lines[number]
        if not line.startswith(prefix) and line.rstrip() != prefix.rstrip():
            return
        yield line[len(prefix) :].rstrip()


def _bars(lines: Iterator[str]) -> Table | None:
    names = next(lines)
    next(lines)
    rows: list[Row] = [row_of(_cells(names))]
    count = 2
    for line in lines:
        if "|" not in line:
            if not re.fullmatch(r"\|?-[-+|]*", line):
                break
        elif not _is_rule(line, names):  # Org may have rules between rows
            rows.append(row_of(_cells(line)))
        count += 1
    return rows, count


def _cells_between_marks(lines: Iterator[str]) -> Table | None:
    """A table of AsciiDoc. Its first line has the names, if a blank one follows; a row may have
    several lines.
    """
    next(lines)
    cells = list[str]()
    width = 0
    named = False
    for count, line in enumerate(lines, 2):
        if line == _ASCIIDOC:
            if not named or width < 2 or len(cells) % width:
                return [], count
            return [row_of(cells[at : at + width]) for at in range(0, len(cells), width)], count
        if line.startswith("|"):
            cells += [cell.replace("\\|", "|") for cell in _BAR.split(line[1:])]
            width = width or len(cells)
        elif line and cells:
            cells[-1] += f" {line}"
        named = named or (not line and len(cells) == width)
    return None


def _is_rule(line: str, names: str) -> bool:
    cells = _cells(line.replace("+", "|"))
    return all(map(_RULE.fullmatch, cells)) and len(cells) == len(_cells(names)) > 1


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|")
    if inner.endswith("|") and not inner.endswith("\\|"):
        inner = inner[:-1]
    return [cell.strip().replace("\\|", "|") for cell in _BAR.split(inner)]


def _grid(lines: Iterator[str]) -> Table | None:
    """A table in a frame. One with cells over several columns or rows is none."""
    border = next(lines)
    width = border.count("+") - 1
    bands: list[list[list[str]]] = [[]]  # the lines between two borders
    count = 1
    is_ruled = False
    for line in lines:
        if _BORDER.fullmatch(line) and line.count("+") == width + 1:
            is_ruled = is_ruled or "=" in line
            bands.append([])
        elif line.startswith("|") and len(cells := _cells(line)) == width:
            bands[-1].append(cells)
        else:
            break
        count += 1
    bands = [band for band in bands if band]
    if len(bands) < 2 or width < 2:
        return [], count
    is_open = len(bands) < OUTER_BORDERS and all(cells[0] for cells in bands[1])
    named = _joined(bands[0])
    body = bands[1] if is_open else [_joined(band) for band in bands[1:]]
    if not is_ruled and not is_open and not is_words(named):
        return [], count
    return [row_of(named), *map(row_of, body)], count


def _joined(band: list[list[str]]) -> list[str]:
    """A row that is written in several lines."""
    return [" ".join(filter(None, cells)) for cells in zip(*band, strict=True)]


def _columns(lines: Iterator[str]) -> Table | None:
    """A table whose columns are told by a rule of dashes below the names, or by three of equal
    signs.
    """
    first = next(lines)
    is_framed = first.startswith("==") and _rules_columns(first)
    named = [] if is_framed else [first]
    rule = first if is_framed else next(lines)
    starts = [found.start() for found in re.finditer(r"[=-]+", rule)]
    rules = 1
    rows: list[list[str]] = []
    count = 1 if is_framed else 2
    for line in lines:
        if not line and not is_framed:
            break
        count += 1
        inner = line.strip()
        if inner.startswith(rule.strip()[:2]) and _rules_columns(inner):
            rules += 1
            if rules > is_framed + 1:
                break
        elif is_framed and rules == 1:
            named.append(line)
        elif line and not set(line) <= {"-", " "}:  # rules below names over several columns
            cells = _cut(line, starts)
            if cells[0] or not rows:
                rows.append(cells)
            else:
                rows[-1] = _joined([rows[-1], cells])
    if is_framed and rules < OUTER_BORDERS:
        return None
    names = _joined([_cut(line, starts) for line in named if not set(line) <= {"-", " "}] or [[""]])
    return [row_of(names), *map(row_of, rows)], count


def _cut(line: str, starts: Sequence[int]) -> list[str]:
    """The cells of a line: between wide gaps, or else where the columns begin."""
    parts = re.split(r" {2,}", line.strip())
    if len(parts) == len(starts) and not line.startswith(" "):
        return parts
    return [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
