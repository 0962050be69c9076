"""Tables of figures for a person, and the console that they are printed on."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE = 120  # columns of a pipe, which has no width of its own
NARROW = 80  # columns in which figures are whole; a terminal with fewer breaks the lines


def console(out: TextIO | None = None, *, pipe: int = WIDE) -> Console:
    """A console on `out` (default: standard output) that prints text unchanged.

    It is as wide as the terminal, or `pipe` columns if `out` is not a terminal.
    """
    from weft.cli.plain_console import PlainConsole  # not for --help

    out = out or sys.stdout
    return PlainConsole(out, width=None if out.isatty() else pipe)


def figures_table(*columns: str, title: str = "") -> Table:
    """An empty table: words in the first column, which may be broken, and figures in the others, which may not."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=bool(number), overflow="fold")
    return table
