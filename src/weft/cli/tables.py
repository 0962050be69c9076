"""Tables of figures for a person, and what they are printed on."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE = 120  # columns of a pipe, which has no width of its own
NARROW = 80  # columns in which figures are whole; a terminal with fewer breaks the lines


def console(out: TextIO | None = None, *, pipe: int = WIDE) -> Console:
    """On `out`, by default standard output: as wide as the terminal, and `pipe` columns where it is none. What is
    printed stays as it is written."""
    from weft.cli.plain_console import PlainConsole  # not for --help

    out = out or sys.stdout
    return PlainConsole(out, width=None if out.isatty() else pipe)


def table(*columns: str, title: str = "") -> Table:
    """The first column words, which are broken where the room is short, the others figures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD)
    for number, name in enumerate(columns):
        made.add_column(name, justify="right" if number else "left", no_wrap=bool(number), overflow="fold")
    return made
