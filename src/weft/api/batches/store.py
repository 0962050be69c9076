"""Store: files and batches on disk, in one directory, which several servers of a machine may share.

Rows are in SQLite, contents of files next to it. Each change is one transaction: a kill leaves the state before or
after the change. A content without a row is removed by a later sweep. MIGRATIONS lead from each version of the tables
to the next.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from weft.api.batches import results
from weft.api.batches.contents import Contents
from weft.api.batches.types import BATCH, FILE, BatchObject, FileObject
from weft.errors import ConfigError, error_reason
from weft.http.errors import HttpError
from weft.machine.sqlite_files import Migration, make_private_file, migrate, statements

BUSY_S = 30.0  # seconds to wait for another server's transaction
PIECE_BYTES = 2**20  # bytes of a file that are read at once
MAX_STORED_BYTES = 20 * 2**30  # bytes of all files
MAX_FILES = 10_000  # files of an owner: as many fit into one list, and a program that forgets to delete stops here
MAX_BATCHES = 10_000  # batches of an owner; the oldest ended batch is deleted for a new one
PART_S = 24 * 3600.0  # seconds after which a content without a row belongs to no server
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
UNFINISHED_MARKS = ", ".join("?" * len(UNFINISHED))
# The parameters are the statuses of unfinished batches and the latest creation.
REMOVE_BATCHES = f"""
DELETE FROM batches WHERE status NOT IN ({UNFINISHED_MARKS}) AND created_at <= ?
AND NOT EXISTS (
    SELECT 1 FROM files WHERE files.id IN (
        batches.input,
        json_extract(CAST(batches.row AS TEXT), '$.output_file_id'),
        json_extract(CAST(batches.row AS TEXT), '$.error_file_id')
    )
)
"""
# A file that is written again keeps its place in the order of the files.
KEEP_FILE = """
INSERT INTO files (id, owner, row, bytes, purpose, expires_at) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET row = excluded.row, bytes = excluded.bytes, expires_at = excluded.expires_at
"""
ALL = "*"  # stands for all owners in `usage`; an owner is "" or hexadecimal
# The sums of `usage` are kept by the database itself, whatever changes a row.
COUNT = """
CREATE TRIGGER {table}_{event} AFTER {event} ON {table} BEGIN
    INSERT OR IGNORE INTO usage VALUES ({row}.owner, 0, 0, 0);
    UPDATE usage SET {changes} WHERE owner IN ({row}.owner, '*');
END
"""
COUNTS = (
    COUNT.format(table="files", event="INSERT", row="new", changes="files = files + 1, bytes = bytes + new.bytes"),
    COUNT.format(table="files", event="DELETE", row="old", changes="files = files - 1, bytes = bytes - old.bytes"),
    COUNT.format(table="files", event="UPDATE", row="new", changes="bytes = bytes + new.bytes - old.bytes"),
    COUNT.format(table="batches", event="INSERT", row="new", changes="batches = batches + 1"),
    COUNT.format(table="batches", event="DELETE", row="old", changes="batches = batches - 1"),
)
FILES = "CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, owner TEXT NOT NULL, row BLOB NOT NULL)"
BATCHES = """
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, status TEXT NOT NULL, input TEXT NOT NULL, row BLOB NOT NULL
)
"""
BATCH_KEYS = "CREATE TABLE IF NOT EXISTS batch_keys (batch TEXT PRIMARY KEY, key TEXT NOT NULL) WITHOUT ROWID"
# Columns and indexes for every search: the work for a request does not grow with the number of rows.
COLUMNS = (
    "ALTER TABLE files ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE files ADD COLUMN purpose TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE files ADD COLUMN expires_at INTEGER",
    "UPDATE files SET bytes = json_extract(CAST(row AS TEXT), '$.bytes'), "
    "purpose = json_extract(CAST(row AS TEXT), '$.purpose'), "
    "expires_at = json_extract(CAST(row AS TEXT), '$.expires_at')",
    "ALTER TABLE batches ADD COLUMN created_at INTEGER NOT NULL DEFAULT 0",
    "UPDATE batches SET created_at = json_extract(CAST(row AS TEXT), '$.created_at')",
    "CREATE INDEX files_of_owner ON files (owner)",
    "CREATE INDEX files_that_expire ON files (expires_at) WHERE expires_at IS NOT NULL",
    "CREATE INDEX batches_of_owner ON batches (owner)",
    "CREATE INDEX batches_by_status ON batches (status, created_at)",
    "CREATE INDEX batches_by_input ON batches (input)",
)
USAGE = (
    "CREATE TABLE usage (owner TEXT PRIMARY KEY, files INTEGER NOT NULL, bytes INTEGER NOT NULL, "
    "batches INTEGER NOT NULL) WITHOUT ROWID",
    "INSERT INTO usage SELECT owner, sum(file), sum(bytes), sum(batch) FROM ("
    "SELECT owner, 1 AS file, bytes, 0 AS batch FROM files UNION ALL SELECT owner, 0, 0, 1 FROM batches"
    ") GROUP BY owner",
    "INSERT INTO usage SELECT '*', coalesce(sum(files), 0), coalesce(sum(bytes), 0), coalesce(sum(batches), 0) "
    "FROM usage",
)
MIGRATIONS: tuple[Migration, ...] = (
    statements(FILES, BATCHES, BATCH_KEYS, results.RESULTS),
    statements(*COLUMNS, *USAGE, *COUNTS, results.DEATHS),
)


class UnfinishedBatch(NamedTuple):
    """A batch, its owner, and the digest of its client's key; "" without a key, or from an earlier version."""

    id: str
    owner: str
    key: str


class Page(NamedTuple):
    """A part of a list: at most `limit` rows (-1: all) after the row with the id `after`."""

    limit: int = -1
    after: str | None = None
    newest_first: bool = False

    def query(self, table: str, condition: str = "1") -> str:
        """Query of the rows of an owner. Its parameters: those in `condition`, the owner, `after` twice, the limit."""
        order, beyond = ("DESC", "<") if self.newest_first else ("ASC", ">")
        return (
            f"SELECT row FROM {table} WHERE {condition} AND owner = ? "
            f"AND (? IS NULL OR rowid {beyond} (SELECT rowid FROM {table} WHERE id = ?)) ORDER BY rowid {order} LIMIT ?"
        )

    def parameters(self, owner: str) -> tuple[str | int | None, ...]:
        return owner, self.after, self.after, self.limit


OLDEST_FIRST, NEWEST_FIRST = Page(), Page(newest_first=True)


class Store:
    """The files and batches in `folder`. Its methods block, and one thread at a time may call them.

    `owner` distinguishes clients with different keys: each sees only its own.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the directory cannot be used, or has been used by a newer version."""
        self.folder = folder
        try:
            self._contents = Contents(folder)
            make_private_file(folder / "store.sqlite")
            self._rows = sqlite3.connect(folder / "store.sqlite", timeout=BUSY_S, check_same_thread=False)
            self._rows.execute("PRAGMA journal_mode = WAL")
            migrate(self._rows, MIGRATIONS)
            self._results = results.ResultTable(self._rows)
            self._contents.make_private()
            self._sweep(time.time())
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"cannot keep files in {folder}: {error_reason(error)}; give another --storage-directory",
                code="cannot-open-storage",
            ) from error

    def close(self) -> None:
        self._rows.close()

    # Files

    def content(self, id: str) -> Path:
        """Path of the bytes of a file."""
        return self._contents.path(id)

    def new_content(self) -> contextlib.AbstractContextManager[BinaryIO]:
        """A temporary file for the bytes of a new file. It is removed unless `add_file` keeps it."""
        return self._contents.new(new_id("part-"))

    def add_file(
        self,
        owner: str,
        content: BinaryIO,
        filename: str,
        purpose: str,
        id: str = "",
        lifetime_s: int | None = None,
    ) -> FileObject:
        """Store the temporary file of `new_content` as a file; with the `id` of another file, in its place.

        It expires `lifetime_s` after its creation; None: never.

        Raises HttpError 413 for a file without `id` that exceeds the owner's share of the store. Whatever is raised,
        nothing is left of the file.
        """
        content.flush()
        size, is_new = os.fstat(content.fileno()).st_size, not id
        created_at = int(time.time())
        file = FileObject(
            id=id or new_id("file-"),
            bytes=size,
            created_at=created_at,
            filename=filename,
            purpose=purpose,
            expires_at=None if lifetime_s is None else created_at + lifetime_s,
        )
        values = (file.id, owner, msgspec.json.encode(file), size, purpose, file.expires_at)
        try:
            with self._rows:
                self._rows.execute("BEGIN IMMEDIATE")
                if is_new:
                    self.check_room(owner, size)
                self._rows.execute(KEEP_FILE, values)
                self._contents.install(content, file.id)
        except BaseException:
            if is_new:
                self._contents.remove(file.id)
            raise
        return file

    def file(self, owner: str, id: str) -> FileObject | None:
        stored = self._rows.execute("SELECT row FROM files WHERE id = ? AND owner = ?", (id, owner)).fetchone()
        return FILE.decode(stored[0]) if stored else None

    def files(
        self, owner: str, page: Page = OLDEST_FIRST, purpose: str | None = None, now: float = 0
    ) -> list[FileObject]:
        """The files of an owner that have not expired at `now`; with a purpose, only files with this purpose."""
        query = page.query("files", "coalesce(expires_at > ?, 1) AND purpose = coalesce(?, purpose)")
        rows = self._rows.execute(query, (now, purpose, *page.parameters(owner)))
        return [FILE.decode(row[0]) for row in rows]

    def check_room(self, owner: str, size: int, others: int = 0) -> None:
        """Raise HttpError 413 unless the files of an owner may grow by a file of `size` bytes.

        Their sum may be at most the bytes that stay free for all others: no owner fills the store, and a new owner
        finds space. `others` are bytes that other owners are about to store.
        """
        used, files = self._usage(owner)[:2]
        if files >= MAX_FILES:
            raise HttpError(
                413,
                f"you have {files:,} files; at most {MAX_FILES:,} are kept: delete some first",
                code="too-many-files",
            )
        free = MAX_STORED_BYTES - self.used_bytes() - size - others
        if used + size > free:
            raise HttpError(
                413,
                f"your files would come to {used + size:,} bytes, and of the {MAX_STORED_BYTES:,} bytes for all "
                f"clients {max(0, free):,} would be left, the most that one may have; delete some files first",
                code="storage-full",
            )

    def used_bytes(self, owner: str = ALL) -> int:
        """Bytes of all files of an owner."""
        return self._usage(owner)[0]

    def _usage(self, owner: str) -> tuple[int, int, int]:
        """Bytes and number of an owner's files, and number of its batches."""
        query = "SELECT bytes, files, batches FROM usage WHERE owner = ?"
        return self._rows.execute(query, (owner,)).fetchone() or (0, 0, 0)

    def delete_file(self, id: str) -> bool:
        """Delete a file; return False, and keep it, if an unfinished batch reads it."""
        with self._rows:
            self._rows.execute("BEGIN IMMEDIATE")
            if self.is_read(id):
                return False
            self._rows.execute("DELETE FROM files WHERE id = ?", (id,))
        self._contents.remove(id)
        return True

    def is_read(self, id: str) -> bool:
        """Return True if an unfinished batch reads a file."""
        query = f"SELECT 1 FROM batches WHERE input = ? AND status IN ({UNFINISHED_MARKS})"
        return self._rows.execute(query, (id, *UNFINISHED)).fetchone() is not None

    # Cleaning

    def delete_expired(self, now: float) -> None:
        """Delete the files that have expired, except files that an unfinished batch reads."""
        query = "SELECT id FROM files WHERE expires_at <= ?"
        for (id,) in self._rows.execute(query, (now,)).fetchall():
            self.delete_file(id)

    def remove_expired(self, now: float, kept_s: float) -> int:
        """Remove what has expired, of all owners; return the bytes of the files that stay.

        A file that an unfinished batch reads stays until that has ended. A finished batch is deleted once it is older
        than `kept_s` seconds and has no files left; with 0 it stays.
        """
        self.delete_expired(now)
        if kept_s:
            with self._rows:
                self._rows.execute(REMOVE_BATCHES, (*UNFINISHED, now - kept_s))
        with self._rows:
            self._rows.execute("DELETE FROM batch_keys WHERE batch NOT IN (SELECT id FROM batches)")
            self._rows.execute("DELETE FROM usage WHERE files + batches = 0 AND owner != ?", (ALL,))
        self._sweep(now)
        return self.used_bytes()

    def _sweep(self, now: float) -> None:
        """Make rows and folders consistent: a killed server leaves uploads and contents without rows, and locks.

        Younger contents may be another server's, whose rows are not yet written.
        """
        known = {id for (id,) in self._rows.execute("SELECT id FROM files")}
        for name in self._contents.left(now - PART_S):
            if name not in known:
                self._contents.remove(name)
        for id in known - {*self._contents.left(float("inf"))}:
            self.delete_file(id)
        self._contents.remove_locks(batch for batch in self._contents.locked() if self.status(batch) not in UNFINISHED)

    # Batches

    def add_batch(self, owner: str, batch: BatchObject, key: str = "") -> bool:
        """Store a new batch and the digest of its client's key; return False if its input file was deleted.

        Raises HttpError 429 if the owner has too many unfinished batches.
        """
        values = (batch.id, owner, batch.status, batch.input_file_id, msgspec.json.encode(batch), batch.created_at)
        with self._rows:
            self._rows.execute("BEGIN IMMEDIATE")
            if self.file(owner, batch.input_file_id) is None:
                return False
            self._make_room_for_batch(owner)
            self._rows.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)", values)
            self._rows.execute("INSERT INTO batch_keys VALUES (?, ?)", (batch.id, key))
        return True

    def _make_room_for_batch(self, owner: str) -> None:
        """Delete the oldest ended batch of an owner that has the largest number of batches."""
        if self._usage(owner)[2] < MAX_BATCHES:
            return
        oldest = f"SELECT id FROM batches WHERE owner = ? AND status NOT IN ({UNFINISHED_MARKS}) ORDER BY rowid LIMIT 1"
        if not self._rows.execute(f"DELETE FROM batches WHERE id = ({oldest})", (owner, *UNFINISHED)).rowcount:
            raise HttpError(
                429,
                f"{MAX_BATCHES:,} batches are not finished yet, the most that one client may have; cancel some",
                code="too-many-batches",
                retry_after_s=60,
            )

    def change_batch(self, id: str, change: Callable[[BatchObject], None]) -> BatchObject:
        """Apply `change` to a batch in a transaction; return the changed batch.

        The answers of a batch that ends are deleted except for their number: its output files have them.
        """
        with self._rows:
            self._rows.execute("BEGIN IMMEDIATE")
            row = self._rows.execute("SELECT row FROM batches WHERE id = ?", (id,)).fetchone()[0]
            batch = self._counted(row)
            change(batch)
            values = (batch.status, msgspec.json.encode(batch), id)
            self._rows.execute("UPDATE batches SET status = ?, row = ? WHERE id = ?", values)
            if batch.status not in UNFINISHED:
                self._results.forget(id)
        return batch

    def batch(self, owner: str, id: str) -> BatchObject | None:
        """A batch with the number of its results up to now."""
        stored = self._rows.execute("SELECT row FROM batches WHERE id = ? AND owner = ?", (id, owner)).fetchone()
        return self._counted(stored[0]) if stored else None

    def batches(self, owner: str, page: Page = NEWEST_FIRST) -> list[BatchObject]:
        """The batches of an owner."""
        rows = self._rows.execute(page.query("batches"), page.parameters(owner))
        return [self._counted(row[0]) for row in rows.fetchall()]

    def unfinished(self) -> list[UnfinishedBatch]:
        """All batches that are not finished, the oldest first."""
        query = (
            "SELECT id, owner, coalesce(key, '') FROM batches LEFT JOIN batch_keys ON batch_keys.batch = batches.id "
            f"WHERE status IN ({UNFINISHED_MARKS}) ORDER BY batches.rowid"
        )
        return [UnfinishedBatch(*row) for row in self._rows.execute(query, UNFINISHED)]

    def status(self, id: str) -> str:
        stored = self._rows.execute("SELECT status FROM batches WHERE id = ?", (id,)).fetchone()
        return str(stored[0]) if stored else ""

    def write_lines(self, changes: Sequence[results.LineChange]) -> list[str]:
        """Store changes of lines, in one transaction; return the status of each line's batch."""
        self._results.write_changes(changes)
        return [self.status(change.batch) for change in changes]

    def add_result(self, batch: str, line: int, row: bytes, *, failed: bool) -> str:
        """Store the answer to a line, unless it has an answer; return the batch's status."""
        return self.write_lines([results.LineChange(batch, line, row=row, failed=failed)])[0]

    def answered(self, batch: str) -> set[int]:
        """The lines of a batch that have answers."""
        return self._results.answered(batch)

    def results(self, batch: str, *, failed: bool) -> Iterator[bytes]:
        """The answers of a batch, in order of its lines."""
        return (row for _, row in self._results.rows(batch, failed=failed))

    def deaths(self, batch: str) -> dict[int, int]:
        """Number of deaths with each line of a batch that has no answer, if there were any."""
        return self._results.deaths(batch)

    def claim(self, batch: str) -> contextlib.AbstractContextManager[bool]:
        """Hold a batch while the block runs, True, or False if another server has it. A killed server lets go."""
        return self._contents.claim(batch)

    def _counted(self, row: bytes) -> BatchObject:
        batch = BATCH.decode(row)
        counts = batch.request_counts
        if batch.status in UNFINISHED:
            counts.completed, counts.failed = self._results.counts(batch.id)
        elif not counts.completed + counts.failed:
            # Earlier versions stored no numbers of ended batches.
            counts.completed, counts.failed = (
                self._line_count(id) for id in (batch.output_file_id, batch.error_file_id)
            )
        return batch

    def _line_count(self, id: str | None) -> int:
        """Number of lines of a file; 0 for a missing file."""
        if id is None:
            return 0
        try:
            with self.content(id).open("rb") as file:
                return sum(piece.count(b"\n") for piece in iter(lambda: file.read(PIECE_BYTES), b""))
        except FileNotFoundError:
            return 0


def new_id(prefix: str) -> str:
    """A random id that begins with `prefix`."""
    return prefix + secrets.token_hex(12)
