"""rich's console without its changes to the text."""

from __future__ import annotations

from typing import NoReturn, TextIO

from rich.console import Console


class PlainConsole(Console):
    """A console without highlighting, markup and emoji; raises BrokenPipeError if the reader has left."""

    def __init__(self, file: TextIO, width: int | None) -> None:
        super().__init__(file=file, width=width, highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> NoReturn:
        # rich's own ends the process with status 1, as if the command had failed.
        raise BrokenPipeError
