"""Cells and styles that the tables of `weft top` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from weft.formatting import format_bytes

FULL, EMPTY = "█", "░"
MEASURED = 1000  # columns of a page on which every table has room
FOLDED = 12  # least characters of a column whose words may be broken
FIRST = 8  # least characters of a table's first column
BAR = 10  # characters of a share's bar
UNKNOWN = "-"
SIGN = "▲ "  # before a finding, and before the rows that it names
WIDE, VERY_WIDE = 110, 132  # columns from which on there are bars, and sparklines
NEARLY_FULL, BUSY = 0.9, 0.7  # shares from which on a bar is red, and yellow
BAD, GOOD, WARN, FAINT = "bold red", "green", "bold yellow", "grey62"


def dense_table(*columns: str | Text) -> Table:
    """An empty table: words in the first column, which may be broken, and figures in the others, which may not."""
    table = Table(box=None, padding=(0, 1), header_style=FAINT)
    for number, name in enumerate(columns):
        table.add_column(
            name,
            justify="right" if number else "left",
            no_wrap=bool(number),
            overflow="fold",
            min_width=None if number else FIRST,
        )
    return table


def fitted(table: Table, width: int, dispensable: Sequence[str]) -> Table:
    """The table without the columns that find no room in `width`; the first dispensable columns go first.

    A cut head or figure would say something else. A table that leaves much room is as wide as the page.
    """
    for head in ("", *dispensable):
        if head:
            table = _without(table, head)
        if _least_width(table) <= width:
            break
    table.expand = width >= VERY_WIDE
    return table


def _least_width(table: Table) -> int:
    """Characters that a table needs: figures whole, and FOLDED of words that may be broken."""
    console = Console(width=MEASURED)
    needed = 0
    for column in table.columns:
        cells = (column.header, *column.cells)
        widest = max(Measurement.get(console, console.options, cell).maximum for cell in cells)
        needed += 2 + (widest if column.no_wrap else min(widest, FOLDED))
    return needed


def _without(table: Table, head: str) -> Table:
    """A copy of the table without the column of this head."""
    kept = [column for column in table.columns if str(column.header) != head]
    copy = Table(*(replace(column, _cells=[]) for column in kept), box=None, padding=(0, 1), header_style=FAINT)
    for cells in zip(*(column.cells for column in kept), strict=True):
        copy.add_row(*cells)
    copy.caption, copy.caption_justify, copy.caption_style = table.caption, table.caption_justify, table.caption_style
    return copy


def share(value: float | None, wide: bool, *, alarming: bool = True) -> Text:
    """A share in percent, with a bar if the page is wide; `alarming`: a high one is red."""
    if value is None:
        return Text(UNKNOWN)
    style = "" if not alarming or value < BUSY else "yellow" if value < NEARLY_FULL else BAD
    percent = Text(f"{value:4.0%}", style=style)
    if not wide:
        return percent
    full = min(BAR, max(0, round(BAR * value)))
    return Text.assemble((FULL * full, style or GOOD), (EMPTY * (BAR - full), FAINT), " ", percent)


def marked(name: str, faulty: bool, *, beside_faulty: bool) -> Text:
    """The first cell of a row, with a sign if a finding names the row.

    `beside_faulty`: another row of the table has the sign, for which this one leaves room.
    """
    if faulty:
        return Text(SIGN + name, style=WARN)
    return Text(" " * len(SIGN) + name if beside_faulty else name)


def used_of(used: float, size: float) -> str:
    """Bytes in use and in all, as "1.2 of 4.0 GB"."""
    (number, unit), whole = format_bytes(used).split(), format_bytes(size)
    return f"{number if whole.endswith(unit) else f'{number} {unit}'} of {whole}"
