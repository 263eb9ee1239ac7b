"""Excel: every sheet under its name as a heading; each row is a line that names its columns.

openpyxl's parser of a sheet gives rows as the file has them. openpyxl's worksheets are not used,
because they fill the gaps between rows. A file of 1 KB can have a thousand million such rows.
Hidden parts are left out and reported. Rows that a filter hides are data and are read.
"""

import io
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ragkv.runtime import counted

from ..marks import Part, Place, joined, struck
from ..reading import FileContent, Loaded, Once, part
from ..tables import SAMPLE_ROWS, Row, table_lines
from .archives import CORE, EXTRA, opened_archive, title_in, unpacked_bytes
from .number_formats import shown

# How often the text of merged cells is repeated, in relation to the cells of the sheet.
MERGED_SHARE = 4
PLACES = {"superscript": Place.RAISED, "subscript": Place.LOWERED}
FIRST_OWN_FORMAT = 164  # Formats below are built in.


def load_xlsx(content: FileContent) -> Loaded:
    """One document. Formulas have the values that were stored with them."""
    content.need("openpyxl", "openpyxl", EXTRA)
    lost = list[str]()
    with content.parsing("XLSX"):
        archive = opened_archive(content, by_expat=True)
        texts = content.bounded(_sheet_texts(_book(content.data), lost), unpacked_bytes(archive))
        text = "".join(texts).strip()
        title = title_in(archive, CORE)
    yield content.document(text, {"format": "markdown", "title": title}, lost)


def _book(data: bytes) -> Any:
    """A workbook of openpyxl. The charts of a sheet of charts are not looked at: openpyxl refuses
    the file if there are none.
    """
    from openpyxl.chartsheet import Chartsheet
    from openpyxl.reader.excel import ExcelReader

    class Reader(ExcelReader):  # type: ignore[misc]
        def read_chartsheet(self, sheet: Any, rel: Any) -> None:
            charts = Chartsheet()
            charts._parent = self.wb
            charts.title = sheet.name
            self.wb._add_sheet(charts)

    reader = Reader(
        io.BytesIO(data), read_only=True, data_only=True, keep_links=False, rich_text=True
    )
    reader.read()
    return reader.wb


def _sheet_texts(book: Any, lost: list[str]) -> Iterator[str]:
    once = Once(lost)
    for sheet in book.worksheets:
        if sheet.sheet_state != "visible":
            lost.append(f"sheet {sheet.title}, which is hidden")
            continue
        if once.was_read(sheet._worksheet_path, f"sheet {sheet.title}"):
            continue
        with part(lost, f"sheet {sheet.title}"):
            heading = f"\n\n# {sheet.title}\n"
            for line in _sheet_lines(sheet, lost):
                yield f"{heading}\n{line}"
                heading = ""


def _sheet_lines(sheet: Any, lost: list[str]) -> Iterator[str]:
    with sheet._get_source() as source:
        found = _read(sheet, source)
    if found.hidden_rows:
        rows = counted(found.hidden_rows, "hidden row")
        lost.append(f"sheet {sheet.title}: {rows}")
    if found.hidden_columns:
        columns = counted(len(found.hidden_columns), "hidden column")
        lost.append(f"sheet {sheet.title}: {columns}")
    if found.formulas:
        lost.append(
            f"sheet {sheet.title}: the values of {counted(found.formulas, 'formula')}, which the file does "
            "not hold; open and save it in a spreadsheet"
        )
    _merge(found)
    places = list(_with_gaps(sorted(found.rows)))
    yield from table_lines(
        (dict(sorted(found.rows.get(place, {}).items())) for place in places),
        lambda taken: [_over_merged(found, places[number]) for number in taken],
    )


@dataclass(slots=True)
class _Cells:
    """The texts of a sheet by their row and column, from 0."""

    rows: dict[int, dict[int, str]] = field(default_factory=dict)
    merged: list[tuple[int, int, int, int]] = field(default_factory=list)
    hidden_rows: int = 0
    hidden_columns: frozenset[int] = frozenset()
    formulas: int = 0  # without a stored value
    # row -> its cells that are merged to the right: first and last column, text
    wide: dict[int, list[tuple[int, int, str]]] = field(default_factory=dict)
    repeats: int = 0  # how often the texts of merged cells may still be repeated

    def count(self) -> int:
        """How many cells have a text."""
        return sum(map(len, self.rows.values()))


def _read(sheet: Any, source: Any) -> _Cells:
    cells = _Cells()
    codes = dict[int, str]()  # formats by styles
    parser = _parser_of(sheet, source, cells)
    for number, row in parser.parse():
        texts = dict[int, str]()
        for cell in row:
            style = cell["style_id"]
            if style not in codes:
                codes[style] = _format_of(sheet.parent, style)
            value = cell["value"]
            text = _rich_text(value) if isinstance(value, list) else shown(value, codes[style])
            if text := " ".join(text.split()):
                texts[cell["column"] - 1] = text
        if texts:
            cells.rows.setdefault(number - 1, {}).update(sorted(texts.items()))
    if not getattr(getattr(parser, "auto_filter", None), "filterColumn", None):
        hidden = (int(number) - 1 for number, row in parser.row_dimensions.items() if _hides(row))
        cells.hidden_rows = sum(cells.rows.pop(number, None) is not None for number in hidden)
    _leave_out_columns(cells, parser.column_dimensions.values())
    if parser.merged_cells is not None:
        cells.merged = [
            (one.min_row - 1, one.max_row - 1, one.min_col - 1, one.max_col - 1)
            for one in parser.merged_cells.mergeCell
        ]
    return cells


def _rich_text(parts: list[Any]) -> str:
    """A text of several looks, of which some are raised, lowered or struck out."""
    found = list[Part]()
    for one in parts:
        font = getattr(one, "font", None)
        text = struck(str(one)) if font is not None and font.strike else str(one)
        found.append((text, PLACES.get(str(getattr(font, "vertAlign", "")), Place.LINE)))
    return joined(found)


def _parser_of(sheet: Any, source: Any, cells: _Cells) -> Any:
    """openpyxl's parser of a sheet, which gives a formula without a value as the formula."""
    from openpyxl.worksheet._reader import FORMULA_TAG, WorkSheetParser

    class Parser(WorkSheetParser):  # type: ignore[misc]
        def parse_cell(self, element: Any) -> Any:
            cell = super().parse_cell(element)
            formula = element.find(FORMULA_TAG)
            is_empty_text = element.get("t") == "str"  # its value is stored, and is ""
            if cell["value"] is None and formula is not None and not is_empty_text:
                cell["value"] = f"={formula.text}" if formula.text else None
                cells.formulas += 1
            return cell

    book = sheet.parent
    return Parser(
        source,
        sheet._shared_strings,
        data_only=True,
        epoch=book.epoch,
        rich_text=True,
        date_formats=book._date_formats,
        timedelta_formats=book._timedelta_formats,
    )


def _format_of(book: Any, style: int) -> str:
    """The code of a style's number format."""
    from openpyxl.styles.numbers import BUILTIN_FORMATS

    number = book._cell_styles[style].numFmtId if style < len(book._cell_styles) else 0
    if number < FIRST_OWN_FORMAT:
        return str(BUILTIN_FORMATS.get(number, "General"))
    return str(book._number_formats[number - FIRST_OWN_FORMAT])


def _hides(attributes: Any) -> bool:
    return attributes.get("hidden") in ("1", "true")


def _leave_out_columns(cells: _Cells, dimensions: Any) -> None:
    """Delete the texts of hidden columns."""
    ranges = [(int(one["min"]) - 1, int(one["max"]) - 1) for one in dimensions if _hides(one)]
    if not ranges:
        return
    used = sorted({column for row in cells.rows.values() for column in row})
    hidden = set[int]()
    covered = -1
    for low, high in sorted(ranges):
        hidden.update(used[bisect_left(used, max(low, covered + 1)) : bisect_right(used, high)])
        covered = max(covered, high)
    for row in cells.rows.values():
        for column in hidden & row.keys():
            del row[column]
    cells.rows = {number: row for number, row in cells.rows.items() if row}
    cells.hidden_columns = frozenset(hidden)


def _merge(cells: _Cells) -> None:
    """Put the text of cells that are merged downwards into each of their rows, and note those that
    are merged to the right.
    """
    numbers = sorted(cells.rows)
    cells.repeats = MERGED_SHARE * cells.count()
    for top, bottom, left, right in cells.merged:
        name = cells.rows.get(top, {}).get(left)
        if name is None:
            continue
        for number in numbers[bisect_left(numbers, top) : bisect_right(numbers, bottom)]:
            if cells.repeats <= 0:
                return
            cells.repeats -= 1
            cells.rows[number].setdefault(left, name)
            if right > left:
                cells.wide.setdefault(number, []).append((left, right, name))


def _over_merged(cells: _Cells, number: int) -> Row:
    """A row of names, with the name of merged cells in each of their columns."""
    row = dict(cells.rows[number])
    below = range(number, number + SAMPLE_ROWS)
    columns = sorted({column for one in below for column in cells.rows.get(one, ())})
    for left, right, name in cells.wide.get(number, ()):
        covered = columns[bisect_left(columns, left) : bisect_right(columns, right)]
        cells.repeats -= len(covered)
        if cells.repeats > 0:
            row.update((column, name) for column in covered if column not in row)
    return row


def _with_gaps(numbers: Iterable[int]) -> Iterator[int]:
    """The numbers of rows, and one of a blank row for each gap between them."""
    before: int | None = None
    for number in numbers:
        if before is not None and number > before + 1:
            yield before + 1
        yield number
        before = number
