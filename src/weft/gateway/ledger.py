"""Ledger: tokens and dollars of requests in an SQLite file, which survives the death of the gateway."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import NamedTuple

from weft.errors import ConfigError

HOUR_S, DAY_HOURS = 3600, 24
KEPT_HOURS = 5 * 7 * DAY_HOURS  # hours for which spent amounts are kept
SCHEMA = """
CREATE TABLE IF NOT EXISTS spent (
    hour INTEGER, key TEXT, model TEXT, upstream TEXT, requests INTEGER, prompt_tokens INTEGER,
    completion_tokens INTEGER, dollars REAL, PRIMARY KEY (hour, key, model, upstream)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reserved (
    id INTEGER PRIMARY KEY, hour INTEGER, key TEXT, model TEXT, upstream TEXT, prompt_tokens INTEGER,
    completion_tokens INTEGER, dollars REAL
);
"""
ADD = """
INSERT INTO spent VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (hour, key, model, upstream) DO UPDATE SET
    requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens, dollars = dollars + excluded.dollars
"""


class Amount(NamedTuple):
    """Tokens and dollars of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    dollars: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Reservation(NamedTuple):
    """An amount that a running request may take, for `key`, the name of the sender's key."""

    id: int
    hour: int
    key: str
    model: str
    upstream: str
    amount: Amount


class Ledger:
    """Amounts that requests spent, by hour (UTC), key, model and upstream. `clock` reads seconds since 1970.

    Amounts are kept for five weeks. A request's amount is reserved before it is sent, and settled when it has ended.
    Amounts that were reserved when a gateway died count as spent in full: nobody knows how far the upstream came.
    Raises ConfigError for a file that is no ledger. A file belongs to one gateway.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._pruned = -1  # the hour
        try:
            self._database = sqlite3.connect(path, isolation_level=None, timeout=1.0)
            # Before the first access, so that the lock of the first transaction stays until the file is closed.
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")  # a dead process loses nothing that was committed
            self._database.execute("BEGIN EXCLUSIVE")
            self._database.execute("COMMIT")
            self._database.executescript(SCHEMA)
            self._settle_left_over()
        except sqlite3.Error as error:
            raise ConfigError(
                f"cannot use the ledger {path}: {error}; give another file, or end the gateway that has it",
                code="cannot-use-ledger",
            ) from None

    def reserve(self, key: str, model: str, upstream: str, most: Amount) -> Reservation:
        """Reserve the most that a request can take."""
        hour = self._hour()
        if hour != self._pruned:
            self._database.execute("DELETE FROM spent WHERE hour <= ?", (hour - KEPT_HOURS,))
            self._pruned = hour
        cursor = self._database.execute(
            "INSERT INTO reserved (hour, key, model, upstream, prompt_tokens, completion_tokens, dollars) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (hour, key, model, upstream, *most),
        )
        return Reservation(cursor.lastrowid or 0, hour, key, model, upstream, most)

    def settle(self, reservation: Reservation, amount: Amount, *, requests: int = 1) -> None:
        """Replace a reservation by the amount that the request spent."""
        with self._database:
            self._database.execute("BEGIN")
            self._database.execute("DELETE FROM reserved WHERE id = ?", (reservation.id,))
            if requests or any(amount):
                self._database.execute(ADD, (*reservation[1:5], requests, *amount))

    def tokens(self, key: str, hours: int) -> int:
        """Tokens of a key in the current hour and those before it, `hours` in all, reserved ones included."""
        return int(self._sum("prompt_tokens + completion_tokens", "key = ?", hours, key))

    def dollars(self, hours: int) -> float:
        """Dollars in the current hour and those before it, `hours` in all, reserved ones included."""
        return self._sum("dollars", "dollars > 0", hours)

    def rows(self, hours: int) -> list[dict[str, object]]:
        """Amounts spent in the last `hours` hours, by key, model and upstream."""
        names = ("key", "model", "upstream", "requests", "prompt_tokens", "completion_tokens", "dollars")
        spent = self._database.execute(
            "SELECT key, model, upstream, SUM(requests), SUM(prompt_tokens), SUM(completion_tokens), SUM(dollars) "
            "FROM spent WHERE hour > ? GROUP BY key, model, upstream ORDER BY key, model, upstream",
            (self._hour() - hours,),
        )
        return [dict(zip(names, row, strict=True)) for row in spent]

    def seconds_left(self) -> int:
        """Seconds until the next hour begins."""
        return HOUR_S - int(self._clock()) % HOUR_S

    def close(self) -> None:
        self._database.close()

    def _sum(self, column: str, condition: str, hours: int, *given: object) -> float:
        first = self._hour() - hours
        total = 0.0
        for table in ("spent", "reserved"):
            cursor = self._database.execute(
                f"SELECT TOTAL({column}) FROM {table} WHERE hour > ? AND {condition}", (first, *given)
            )
            total += cursor.fetchone()[0]
        return total

    def _settle_left_over(self) -> None:
        """Settle the reservations of a gateway that died."""
        columns = "id, hour, key, model, upstream, prompt_tokens, completion_tokens, dollars"
        left = self._database.execute(f"SELECT {columns} FROM reserved").fetchall()
        for id, hour, key, model, upstream, *amount in left:
            most = Amount(*amount)
            self.settle(Reservation(id, hour, key, model, upstream, most), most)

    def _hour(self) -> int:
        return int(self._clock()) // HOUR_S
