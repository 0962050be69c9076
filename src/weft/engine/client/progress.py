"""ProgressBar: a bar on standard error with the number of finished prompts, or of other parts of a long task."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from weft.engine.executors.start_phases import in_notebook

DESCRIPTION = "Processed prompts"


class Bar(Protocol):
    """The methods of tqdm's bars that are used here."""

    def update(self, n: int) -> Any: ...

    def close(self) -> Any: ...


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A bar for `total` prompts, or for parts of a task that `description` names.

    If `bar` is True, the bar is shown on a terminal and in a notebook. `bar` may be a function with tqdm's
    arguments, such as tqdm itself; its bar is shown wherever that function shows it. A bar that is not `animated` is
    drawn between two parts only: nothing else of this process runs while they are measured.
    """

    def __init__(
        self,
        total: int,
        bar: bool | Callable[..., Bar],
        description: str = DESCRIPTION,
        *,
        animated: bool = True,
    ) -> None:
        self._bar: Bar | None = None
        if callable(bar):
            self._bar = bar(total=total, desc=description)
        elif bar and (sys.stderr.isatty() or in_notebook()):
            self._bar = RichBar(total, description, animated=animated)

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def describe(self, description: str) -> None:
        """Change the words before Weft's own bar."""
        if isinstance(self._bar, RichBar):
            self._bar.describe(description)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


class RichBar:
    """Weft's own bar, drawn by rich."""

    def __init__(self, total: int, description: str, *, animated: bool) -> None:
        # Imported here, because that takes a tenth of a second and most programs show no bar.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._progress = RichProgress(
            "{task.description}:",
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=animated,
        )
        self._animated = animated
        self._task = self._progress.add_task(description, total=total)
        self._progress.start()

    def update(self, n: int) -> None:
        self._progress.advance(self._task, n)
        if not self._animated:
            self._progress.refresh()

    def describe(self, description: str) -> None:
        self._progress.update(self._task, description=description)

    def close(self) -> None:
        self._progress.stop()
