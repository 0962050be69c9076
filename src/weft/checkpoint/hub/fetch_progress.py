"""Progress of files that are fetched: a bar per file and one for the whole on a terminal, else lines of the log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from weft.formatting import format_bytes

logger = logging.getLogger("weft")

LINE_S = 10.0  # seconds between two lines of the log


class FetchProgress(AbstractContextManager["FetchProgress"]):
    """Bytes that came of the files of a repository, by file, and of all of them. Threads may use it at the same time.

    `sizes` are in bytes.
    """

    def __init__(self, repository: str, sizes: Mapping[str, int]) -> None:
        self._repository, self._sizes = repository, dict(sizes)
        self._done = dict.fromkeys(sizes, 0)
        self._resumed = 0  # bytes that were here before
        self._is_stopped = False
        self._lock = threading.Lock()
        self._began = self._shown = time.monotonic()
        self._bars = Bars(repository, self._sizes) if sys.stderr.isatty() else None

    def bar_of(self, file: str) -> Callable[..., FileBar]:
        """A stand-in for tqdm's class, whose bars count the bytes of one file."""

        def create(*_: Any, initial: float = 0, **__: Any) -> FileBar:
            with self._lock:
                self._resumed += int(initial)
            self.add(file, int(initial) - self._done[file])
            return FileBar(self, file)

        return create

    def stop(self) -> None:
        """End what threads fetch: the next piece that comes raises an error there."""
        self._is_stopped = True

    def add(self, file: str, nbytes: int) -> None:
        """Count bytes of a file. Raises CancelledError after `stop`."""
        if self._is_stopped:
            raise CancelledError
        with self._lock:
            self._done[file] += nbytes
            if self._bars:
                self._bars.show(file, self._done[file], sum(self._done.values()))
            elif time.monotonic() - self._shown >= LINE_S:
                self._shown = time.monotonic()
                logger.info("%s", self._state())

    def finish(self, file: str) -> None:
        """Note that all of a file is here."""
        self.add(file, self._sizes[file] - self._done[file])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.close()
        if error is None:
            logger.info("%s", self._state())

    def _state(self) -> str:
        done, total = sum(self._done.values()), sum(self._sizes.values())
        whole = sum(self._done[file] >= size for file, size in self._sizes.items())
        seconds = max(time.monotonic() - self._began, 1e-3)
        return (
            f"{self._repository}: {format_bytes(done)} of {format_bytes(total)} fetched, {whole} of "
            f"{len(self._sizes)} files, {(done - self._resumed) / seconds / 1e6:.0f} MB/s"
        )


class FileBar:
    """The methods of tqdm's bars that huggingface_hub calls while it fetches a file."""

    def __init__(self, progress: FetchProgress, file: str) -> None:
        self._progress, self._file = progress, file

    def update(self, n: float | None = 1) -> None:
        self._progress.add(self._file, int(n or 0))

    def update_transfer(self, n: float | None = 1) -> None: ...

    def set_postfix_str(self, *_: Any, **__: Any) -> None: ...

    def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> FileBar:
        return self

    def __exit__(self, *_: object) -> None: ...


class Bars:
    """Bars on a terminal, drawn by rich: one for each file while it comes, and one for all files."""

    def __init__(self, repository: str, sizes: Mapping[str, int]) -> None:
        # Imported here, because that takes a tenth of a second and most programs show no bar.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._sizes, self._tasks = sizes, dict[str, Any]()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._whole = self._progress.add_task(repository, total=sum(sizes.values()))
        self._progress.start()

    def show(self, file: str, done: int, whole: int) -> None:
        """Show the bytes of a file and of all files that are here."""
        if file not in self._tasks:
            self._tasks[file] = self._progress.add_task(file, total=self._sizes[file])
        self._progress.update(self._tasks[file], completed=done, visible=done < self._sizes[file])
        self._progress.update(self._whole, completed=whole)

    def close(self) -> None:
        self._progress.stop()
