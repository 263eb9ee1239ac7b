"""Tables of HTML, into which tables of Word files and slides are turned, too. Handles cells over
several columns and rows, and finds the header.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .tables import NAME_CHARS, Header, Row, find_header, named_lines

# A cell reaches over at most `MAX_SPAN` columns or rows.
MAX_SPAN = 100
# Rows above which the first row has the names, in a table without a declared header.
# Tables of two columns are often pairs of a name and a value.
ROWS_OF_PAIRS = 12
ROWS_OF_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table, and how many columns and rows it reaches over."""

    text: str
    columns: int = 1
    rows: int = 1
    names: bool = False  # it is declared to be the name of its column (or its row)


@dataclass(slots=True)
class TableCells:
    """A table that is being read, row by row."""

    rows: list[dict[int, Cell]] = field(default_factory=list)  # by column; those with a text
    _numbers: list[int] = field(default_factory=list)  # of `rows`, the blank ones counted, too
    _row: dict[int, Cell] = field(default_factory=dict)
    _number: int = 0
    _column: int = 0
    _reaching: dict[int, int] = field(default_factory=dict)  # column -> the last row of its cell

    def add(self, cell: Cell) -> None:
        """The next cell of the row, in the first column that no cell above reaches into."""
        while self._reaching.get(self._column, -1) >= self._number:
            self._column += 1
        self._row[self._column] = cell
        self._column += cell.columns

    def end_row(self) -> None:
        """The row is complete."""
        for column, cell in self._row.items():
            if cell.rows > 1 and column < MAX_SPAN:
                for reached in range(column, column + cell.columns):
                    self._reaching[reached] = self._number + cell.rows - 1
        if any(cell.text for cell in self._row.values()):
            self.rows.append(self._row)
            self._numbers.append(self._number)
        self._number += 1
        self._row = {}
        self._column = 0

    def lines(self) -> Iterator[str]:
        """The rows: with the names of the columns where they are known, else with tabs between the
        cells.
        """
        header = self._header()
        if header is None:
            yield from map(tabbed, self.rows)
        else:
            named = self.rows[header.titles : header.titles + header.names]
            yield from named_lines(self._filled(), header, list(map(_over_its_columns, named)))

    def _header(self) -> Header | None:
        declared = 0
        while declared < len(self.rows) and _names_columns(self.rows[declared]):
            declared += 1
        if declared == len(self.rows):
            return None
        if declared:
            titles = 0
            while titles < declared - 1 and len(self.rows[titles]) == 1:
                titles += 1
            return Header(titles, declared - titles)
        texts = [_texts(row) for row in self.rows]
        found = find_header(texts)
        first = texts[found.titles]
        width = max(map(len, texts))
        if any(row[min(row)].names for row in self.rows) or len(first) < max(2, width):
            return None  # rows that are named by their first cell
        least = ROWS_OF_PAIRS if width == 2 else ROWS_OF_COLUMNS
        return found if len(texts) > least and len(set(first.values())) == len(first) else None

    def _filled(self) -> Iterator[Row]:
        """The texts of the rows; a short text that reaches down stands in each row."""
        reaching: dict[int, tuple[int, str]] = {}  # column -> the last row of its cell, its text
        for number, row in zip(self._numbers, self.rows, strict=True):
            texts = _texts(row)
            for column, (last, text) in list(reaching.items()):
                if last < number:
                    del reaching[column]
                else:
                    texts.setdefault(column, text)
            for column, cell in row.items():
                if cell.rows > 1 and column < MAX_SPAN and len(cell.text) <= 2 * NAME_CHARS:
                    reaching[column] = (number + cell.rows - 1, texts.get(column, ""))
            yield {column: text for column, text in sorted(texts.items()) if text}


def tabbed(row: dict[int, Cell]) -> str:
    """A row as one line, each cell in its column."""
    parts = list[str]()
    for column, cell in row.items():
        parts += [""] * (column - len(parts))
        parts.append(" ".join(cell.text.split()))
    return "\t".join(parts).rstrip("\t")


def is_layout(cells: Iterable[Cell]) -> bool:
    """Whether a row is for layout: a cell has several paragraphs, a heading or code."""
    return any("\n\n" in cell.text or cell.text.startswith(("#", "```", "~~~")) for cell in cells)


def _names_columns(row: dict[int, Cell]) -> bool:
    cells = [cell for cell in row.values() if cell.text]
    is_title = len(row) == 1 or any(cell.columns > 1 for cell in cells)
    return all(cell.names for cell in cells) and (len(cells) > 1 or is_title)


def _texts(row: dict[int, Cell]) -> dict[int, str]:
    return {column: " ".join(cell.text.split()) for column, cell in row.items() if cell.text}


def _over_its_columns(row: dict[int, Cell]) -> Row:
    return {
        reached: " ".join(cell.text.split())
        for column, cell in row.items()
        if cell.text
        for reached in range(column, column + cell.columns)
    }


def table_of(rows: Sequence[Sequence[Cell]]) -> TableCells:
    """A table of rows of cells, in which no cell is left out."""
    table = TableCells()
    for row in rows:
        for cell in row:
            table.add(cell)
        table.end_row()
    return table
