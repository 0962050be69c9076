"""Cells and styles that the tables of `weft top` share."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from weft.formatting import format_bytes

FULL, EMPTY = "█", "░"
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
