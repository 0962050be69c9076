"""Progress: a bar on standard error with the number of finished prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

DESCRIPTION = "Processed prompts"


class Bar(Protocol):
    """The methods of tqdm's bars that are used here."""

    def update(self, n: int) -> Any: ...

    def close(self) -> Any: ...


class Progress(AbstractContextManager["Progress"]):
    """A bar for `total` prompts.

    If `bar` is True, the bar is shown if standard error is a terminal. `bar` may be a function with tqdm's
    arguments, such as tqdm itself; its bar is shown wherever that function shows it.
    """

    def __init__(self, total: int, bar: bool | Callable[..., Bar]) -> None:
        self._bar: Bar | None = None
        if callable(bar):
            self._bar = bar(total=total, desc=DESCRIPTION)
        elif bar and sys.stderr.isatty():
            self._bar = RichBar(total)

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


class RichBar:
    """Weft's own bar, drawn by rich."""

    def __init__(self, total: int) -> None:
        # Imported here, because that takes a tenth of a second and most programs show no bar.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._progress = RichProgress(
            f"{DESCRIPTION}:",
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(DESCRIPTION, total=total)
        self._progress.start()

    def update(self, n: int) -> None:
        self._progress.advance(self._task, n)

    def close(self) -> None:
        self._progress.stop()
