"""ResultTable: answers to lines of batches, and deaths of engines and servers with lines, in an SQLite file.

A line has one answer, the first to arrive.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import NamedTuple

RESULTS = """
CREATE TABLE IF NOT EXISTS results (
    batch TEXT NOT NULL, line INTEGER NOT NULL, failed INTEGER NOT NULL, row BLOB NOT NULL, PRIMARY KEY (batch, line)
) WITHOUT ROWID
"""
DEATHS = """
CREATE TABLE deaths (
    batch TEXT NOT NULL, line INTEGER NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (batch, line)
) WITHOUT ROWID
"""


class LineChange(NamedTuple):
    """A change of one line: its answer `row`, or, without an answer, the number of deaths with it."""

    batch: str
    line: int
    deaths: int = 0
    row: bytes | None = None
    failed: bool = False


class ResultTable:
    """The tables in a connection whose database has them. Each change is a transaction."""

    def __init__(self, rows: sqlite3.Connection) -> None:
        self._rows = rows

    def write_changes(self, changes: Sequence[LineChange]) -> None:
        """Store changes. A line keeps its first answer, which deletes its deaths."""
        with self._rows:
            for batch, line, deaths, row, failed in changes:
                if row is None:
                    self._rows.execute("INSERT OR REPLACE INTO deaths VALUES (?, ?, ?)", (batch, line, deaths))
                    continue
                self._rows.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", (batch, line, failed, row))
                self._rows.execute("DELETE FROM deaths WHERE batch = ? AND line = ?", (batch, line))

    def deaths(self, batch: str) -> dict[int, int]:
        """Number of deaths with each line of a batch that has no answer, if there were any."""
        return dict(self._rows.execute("SELECT line, number FROM deaths WHERE batch = ? AND number > 0", (batch,)))

    def forget(self, batch: str) -> None:
        """Delete the answers and deaths of a batch, in the open transaction."""
        self._rows.execute("DELETE FROM results WHERE batch = ?", (batch,))
        self._rows.execute("DELETE FROM deaths WHERE batch = ?", (batch,))

    def answered(self, batch: str) -> set[int]:
        """The lines of a batch that have answers."""
        rows = self._rows.execute("SELECT line FROM results WHERE batch = ?", (batch,))
        return {line for (line,) in rows}

    def rows(self, batch: str, *, failed: bool) -> Iterator[tuple[int, bytes]]:
        """Lines and answers of a batch, in order of its lines."""
        query = "SELECT line, row FROM results WHERE batch = ? AND failed = ? ORDER BY line"
        yield from self._rows.execute(query, (batch, failed))

    def counts(self, batch: str) -> tuple[int, int]:
        """Number of answers of a batch, and number of errors."""
        query = "SELECT failed, count(*) FROM results WHERE batch = ? GROUP BY failed"
        counts = dict(self._rows.execute(query, (batch,)))
        return counts.get(0, 0), counts.get(1, 0)
