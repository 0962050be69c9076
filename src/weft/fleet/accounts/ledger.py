"""Ledger: tokens and dollars of requests in an SQLite file, which survives the death of the gateway."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

from weft.errors import ConfigError, error_reason
from weft.logs import event_fields
from weft.machine.sqlite_files import Migration, OpenFile, make_private_file, migrate, path_of

log = logging.getLogger("weft.gateway")

HOUR_S, DAY_HOURS = 3600, 24
KEPT_HOURS = 5 * 7 * DAY_HOURS  # hours for which spent amounts are kept
# A clock that has moved by JUMP_HOURS or more since the last request may be wrong: the machine may have no clock
# battery, or a bad time server. Then nothing is removed until the clock has run steadily for STEADY_HOURS.
JUMP_HOURS, STEADY_HOURS = 48, 24
MEMORY = ":memory:"
MOST = 10**15  # largest plausible tokens or dollars of an hour; more was written by a fault
# Conditions of a row of either table. SQLite itself accepts text and infinity in a column of numbers.
AMOUNTS = f"""
    typeof(hour) = 'integer' AND typeof(prompt_tokens) = 'integer' AND prompt_tokens BETWEEN 0 AND {MOST}
    AND typeof(completion_tokens) = 'integer' AND completion_tokens BETWEEN 0 AND {MOST}
    AND typeof(dollars) = 'real' AND dollars BETWEEN 0 AND {MOST}
"""
COUNTED = f"{AMOUNTS} AND typeof(requests) = 'integer' AND requests BETWEEN 0 AND {MOST}"
SPENT = f"""
CREATE TABLE spent (
    hour INTEGER, key TEXT, model TEXT, upstream TEXT, requests INTEGER, prompt_tokens INTEGER,
    completion_tokens INTEGER, dollars REAL, PRIMARY KEY (hour, key, model, upstream), CHECK ({COUNTED})
) WITHOUT ROWID
"""
RESERVED = f"""
CREATE TABLE reserved (
    id INTEGER PRIMARY KEY, hour INTEGER, key TEXT, model TEXT, upstream TEXT, prompt_tokens INTEGER,
    completion_tokens INTEGER, dollars REAL, CHECK ({AMOUNTS})
)
"""
TABLES = {"spent": (SPENT, COUNTED), "reserved": (RESERVED, AMOUNTS)}
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
    Amounts that were reserved when a gateway died count as spent in full, since the upstream may have spent them. Rows
    of the future, which a wrong clock has written, count as spent now. Raises ConfigError for a file that is no ledger,
    has invalid amounts, or was written by a newer version. A file belongs to one gateway.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = None if path == MEMORY else OpenFile(path)
        self._forgot = -1  # the hour in which old rows were removed
        try:
            if self._file is not None:
                _prepare(path)
            self._database = sqlite3.connect(path, isolation_level=None, timeout=1.0)
            # Before the first access, so that the lock of the first transaction stays until the file is closed.
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")  # the death of the process loses no committed data
            self._database.execute("BEGIN EXCLUSIVE")
            self._database.execute("COMMIT")
            migrate(self._database, MIGRATIONS)
            _refuse_nonsense(self._database)
            self._settle_left_over()
            newest = self._database.execute("SELECT MAX(hour) FROM spent").fetchone()[0]
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"cannot use the ledger {path}: {error_reason(error)}; give another file, or stop the gateway that "
                "uses it",
                code="cannot-use-ledger",
            ) from None
        self._seen = self._hour() if newest is None else newest  # the hour of the last request
        self._steady_since = self._seen - STEADY_HOURS

    def reserve(self, key: str, model: str, upstream: str, most: Amount) -> Reservation:
        """Reserve the most that a request can take."""
        self._check_file()
        hour = self._hour()
        if hour != self._forgot:
            self._forget_old(hour)
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
        """Tokens of a key in the last `hours` hours, the current hour and reservations included."""
        return int(self._sum("prompt_tokens + completion_tokens", "key = ?", hours, key))

    def dollars(self, hours: int) -> float:
        """Dollars in the last `hours` hours, the current hour and reservations included."""
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
        self._check_file()
        first = self._hour() - hours
        total = 0.0
        for table in ("spent", "reserved"):
            cursor = self._database.execute(
                f"SELECT TOTAL({column}) FROM {table} WHERE hour > ? AND {condition}", (first, *given)
            )
            total += cursor.fetchone()[0]
        return total

    def _forget_old(self, hour: int) -> None:
        """Remove the rows of more than five weeks ago, if the clock can be trusted."""
        self._forgot = hour
        if abs(hour - self._seen) >= JUMP_HOURS:
            log.warning(
                "the clock is %d hours from the last request; the ledger forgets nothing for %d hours",
                hour - self._seen,
                STEADY_HOURS,
                extra=event_fields("clock-jumped"),
            )
            self._steady_since = hour
        self._seen = hour
        if hour >= self._steady_since + STEADY_HOURS:
            self._database.execute("DELETE FROM spent WHERE hour <= ?", (hour - KEPT_HOURS,))

    def _check_file(self) -> None:
        """Raise sqlite3.OperationalError if the file has been removed: its rows would be lost."""
        if self._file is not None and (fault := self._file.fault()):
            raise sqlite3.OperationalError(f"its file {fault}; put it back, or start the gateway again")

    def _settle_left_over(self) -> None:
        """Settle the reservations of a gateway that died."""
        columns = "id, hour, key, model, upstream, prompt_tokens, completion_tokens, dollars"
        left = self._database.execute(f"SELECT {columns} FROM reserved").fetchall()
        for id, hour, key, model, upstream, *amount in left:
            most = Amount(*amount)
            self.settle(Reservation(id, hour, key, model, upstream, most), most)

    def _hour(self) -> int:
        return int(self._clock()) // HOUR_S


def _prepare(path: str) -> None:
    """Create a missing file, and migrate a file of an older version. Raises OSError, sqlite3.Error, ConfigError.

    It opens its own connection: the ledger's connection would lock out the connection that makes the copy.
    """
    make_private_file(path)
    with closing(sqlite3.connect(path, isolation_level=None, timeout=1.0)) as database:
        migrate(database, MIGRATIONS)


def _check_amounts(database: sqlite3.Connection) -> None:
    """Replace tables without checks by tables with checks. Raises ConfigError for rows that fail them."""
    _refuse_nonsense(database)
    for table, (definition, _) in TABLES.items():
        old = _has_table(database, table)
        if old:
            database.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
        database.execute(definition)
        if old:
            database.execute(f"INSERT INTO {table} SELECT * FROM old_{table}")
            database.execute(f"DROP TABLE old_{table}")


MIGRATIONS: tuple[Migration, ...] = (_check_amounts,)


def _refuse_nonsense(database: sqlite3.Connection) -> None:
    """Raise ConfigError for a row with invalid amounts: with them, a budget would not hold."""
    for table, (_, condition) in TABLES.items():
        if not _has_table(database, table):
            continue
        # `NOT` would miss a condition that is NULL.
        row = database.execute(
            f"SELECT hour, key, prompt_tokens, completion_tokens, dollars FROM {table} WHERE ({condition}) IS NOT TRUE"
        ).fetchone()
        if row is not None:
            raise ConfigError(
                f"the ledger {path_of(database)} has a row in {table} with invalid amounts: hour, key, prompt tokens, "
                f"completion tokens and dollars are {row!r:.200}; correct or delete it with sqlite3, or give another "
                "file",
                code="damaged-ledger",
            )


def _has_table(database: sqlite3.Connection, name: str) -> bool:
    return database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone() is not None
