"""Tables of figures for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 120  # columns of a pipe, which has no width of its own
NARROW = 80  # columns in which figures are whole; a terminal with fewer breaks the lines


def table(*columns: str, title: str = "") -> Table:
    """The first column words, which are broken where the room is short, the others figures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD)
    for number, name in enumerate(columns):
        made.add_column(name, justify="right" if number else "left", no_wrap=bool(number), overflow="fold")
    return made
