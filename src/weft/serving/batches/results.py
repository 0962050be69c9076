"""ResultTable: answers to the lines of batches, in an SQLite file. A line has one answer, the first that comes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

SCHEMA = """
CREATE TABLE IF NOT EXISTS results (
    batch TEXT NOT NULL, line INTEGER NOT NULL, failed INTEGER NOT NULL, row BLOB NOT NULL, PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""


class ResultTable:
    """The table in a connection whose database has it. Each answer is a transaction."""

    def __init__(self, rows: sqlite3.Connection) -> None:
        self._rows = rows

    def add(self, batch: str, line: int, row: bytes, *, failed: bool) -> None:
        """Keep the answer to a line, unless there is one."""
        with self._rows:
            self._rows.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", (batch, line, failed, row))

    def answered(self, batch: str) -> set[int]:
        """The lines of a batch that have answers."""
        rows = self._rows.execute("SELECT line FROM results WHERE batch = ?", (batch,))
        return {line for (line,) in rows}

    def rows(self, batch: str, *, failed: bool) -> Iterator[tuple[int, bytes]]:
        """Lines and answers of a batch, in order of its lines."""
        query = "SELECT line, row FROM results WHERE batch = ? AND failed = ? ORDER BY line"
        yield from self._rows.execute(query, (batch, failed))

    def counts(self, batch: str) -> tuple[int, int]:
        """Number of the answers of a batch, and of its errors."""
        query = "SELECT failed, count(*) FROM results WHERE batch = ? GROUP BY failed"
        counts = dict(self._rows.execute(query, (batch,)))
        return counts.get(0, 0), counts.get(1, 0)
