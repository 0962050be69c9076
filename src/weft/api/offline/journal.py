"""Journal: the answers of a batch so far, in an SQLite file next to its output, so that it continues after a kill."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from weft.api.batches import results
from weft.api.batches.attempts import Attempts
from weft.api.batches.results import LineChange
from weft.api.offline.answering import AnsweredRow
from weft.errors import ConfigError, error_reason
from weft.machine.sqlite_files import BESIDE, Migration, copy_path, make_private_file, migrate, statements

ABOUT = "CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL)"
MIGRATIONS: tuple[Migration, ...] = (statements(ABOUT, results.RESULTS), statements(results.DEATHS))
BATCH = ""  # id of the only batch of the file


class Journal:
    """The answers to the rows of one input. One process at a time has it; a killed process releases it.

    Its methods raise ConfigError if the file cannot be written, as on a full disk.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        """`about`: the values that answers depend on. Raises ConfigError for a journal of another batch, or in use."""
        self.path = path
        with self._writing():
            make_private_file(path)
            self._rows = sqlite3.connect(path, timeout=0, check_same_thread=False)
        try:
            with self._writing():
                self._rows.execute("PRAGMA journal_mode = WAL")
                self._rows.execute("PRAGMA synchronous = NORMAL")
                migrate(self._rows, MIGRATIONS)  # before the lock, which would keep out its copy
                self._rows.execute("PRAGMA locking_mode = EXCLUSIVE")
                self._check(about)
        except BaseException:
            self._rows.close()
            raise
        self._results = results.ResultTable(self._rows)
        self._deaths = self._results.deaths(BATCH)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise _refused(self.path, error) from None

    def _check(self, about: Mapping[str, str]) -> None:
        """Store the values that the answers depend on. Raises ConfigError if the file has others."""
        with self._rows:
            for name, value in about.items():
                self._rows.execute("INSERT OR IGNORE INTO about VALUES (?, ?)", (name, value))
        kept = dict(self._rows.execute("SELECT name, value FROM about"))
        other = next((name for name, value in about.items() if kept[name] != value), None)
        if other is not None:
            raise ConfigError(
                f"{self.path} has answers of another batch: its {other} is {kept[other]:.100}, and not "
                f"{about[other]:.100}; remove it to begin again, or write to another file",
                code="other-batch",
            )

    def add(self, answered: AnsweredRow) -> None:
        """Store the answer to a row, unless it has an answer."""
        with self._writing():
            self._results.write_changes([LineChange(BATCH, answered.number, row=answered.row, failed=answered.failed)])

    def attempts(self, number: int) -> Attempts:
        """The attempts to answer a row, including attempts of killed processes."""

        async def note(deaths: int) -> None:
            with self._writing():
                self._results.write_changes([LineChange(BATCH, number, deaths)])

        return Attempts(self._deaths.get(number, 0), note)

    def answered(self) -> set[int]:
        """Numbers of the rows that have answers."""
        return self._results.answered(BATCH)

    def counts(self) -> tuple[int, int]:
        """Number of rows with answers, and number of rows with errors."""
        return self._results.counts(BATCH)

    def rows(self, *, failed: bool) -> Iterator[tuple[int, bytes]]:
        """Numbers and answers, or errors, in order."""
        return self._results.rows(BATCH, failed=failed)

    def close(self) -> None:
        self._rows.close()

    def remove(self) -> None:
        """Forget all answers."""
        self._rows.close()
        for end in BESIDE:
            Path(f"{self.path}{end}").unlink(missing_ok=True)
        for version in range(len(MIGRATIONS)):
            copy_path(self.path, version).unlink(missing_ok=True)


def _refused(path: Path, error: sqlite3.Error | OSError) -> ConfigError:
    if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
        return ConfigError(f"another weft batch writes {path}; wait for it", code="batch-in-use")
    return ConfigError(
        f"cannot keep answers in {path}: {error_reason(error)}; what is there stays, and with room the same command "
        "goes on",
        code="cannot-keep",
    )
