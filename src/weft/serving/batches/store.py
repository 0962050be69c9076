"""Store: files and batches on disk, in one directory, which several servers of a machine may share.

Rows are in SQLite, contents of files beside it. Each change is one transaction: after a kill the store is as before the
change or as after it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from weft.cache import make_private, try_lock
from weft.errors import ConfigError, error_reason
from weft.serving.batches import results
from weft.serving.batches.types import BATCH, FILE, BatchObject, FileObject
from weft.serving.errors import HttpError

BUSY_S = 30.0  # seconds to wait for another server's transaction
PIECE_BYTES = 2**20  # bytes of a file that are read at once
MAX_STORED_BYTES = 20 * 2**30  # bytes of all files
PART_S = 24 * 3600.0  # seconds after which an upload without a name is nobody's any more
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, owner TEXT NOT NULL, row BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, status TEXT NOT NULL, input TEXT NOT NULL, row BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batch_keys (batch TEXT PRIMARY KEY, key TEXT NOT NULL) WITHOUT ROWID;
"""
# The parameters are the statuses of unfinished batches and the latest creation.
REMOVE_BATCHES = """
DELETE FROM batches WHERE status NOT IN (?, ?, ?, ?) AND json_extract(CAST(row AS TEXT), '$.created_at') <= ?
AND NOT EXISTS (
    SELECT 1 FROM files WHERE files.id IN (
        batches.input,
        json_extract(CAST(batches.row AS TEXT), '$.output_file_id'),
        json_extract(CAST(batches.row AS TEXT), '$.error_file_id')
    )
)
"""


class UnfinishedBatch(NamedTuple):
    """A batch, its owner, and the digest of its client's key; "" if it came without, or to an earlier version."""

    id: str
    owner: str
    key: str


class Store:
    """The files and batches in `folder`. Its methods block, and one thread at a time may call them.

    `owner` tells clients with different keys apart: each sees only its own.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the directory cannot be used."""
        self.folder = folder
        try:
            for part in (folder, folder / "contents", folder / "locks"):
                make_private(part)
            self._rows = sqlite3.connect(folder / "store.sqlite", timeout=BUSY_S, check_same_thread=False)
            self._rows.execute("PRAGMA journal_mode = WAL")
            self._rows.executescript(SCHEMA + results.SCHEMA)
            self._results = results.ResultTable(self._rows)
            self._remove_parts()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"cannot keep files in {folder}: {error_reason(error)}; give another --storage-directory",
                code="cannot-open-storage",
            ) from error

    def _remove_parts(self) -> None:
        """Remove uploads that killed servers have left; younger ones may be another server's."""
        for path in (self.folder / "contents").glob("*.part"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - PART_S:
                    path.unlink()

    def close(self) -> None:
        self._rows.close()

    # Files

    def content(self, id: str) -> Path:
        """Path of the bytes of a file."""
        return self.folder / "contents" / id

    @contextlib.contextmanager
    def new_content(self) -> Iterator[BinaryIO]:
        """A new file for bytes that have no name yet. `keep` gives it one; otherwise it is removed."""
        path = self.content(f"{new_id('part-')}.part")
        try:
            with path.open("w+b") as file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def add_file(
        self,
        owner: str,
        content: BinaryIO,
        filename: str,
        purpose: str,
        id: str = "",
        lifetime_s: int | None = None,
    ) -> FileObject:
        """Keep what `new_content` gave as a file; with the `id` of another, in its place.

        It expires `lifetime_s` after its creation; None: never.

        Raises HttpError 413 for a file without `id` that exceeds the owner's share of the store.
        """
        content.flush()
        os.fsync(content.fileno())
        size = os.fstat(content.fileno()).st_size
        if not id:
            self.check_room(owner, size)
        id = id or new_id("file-")
        created_at = int(time.time())
        file = FileObject(
            id=id,
            bytes=size,
            created_at=created_at,
            filename=filename,
            purpose=purpose,
            expires_at=None if lifetime_s is None else created_at + lifetime_s,
        )
        os.replace(content.name, self.content(id))
        with self._rows:
            self._rows.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (id, owner, msgspec.json.encode(file)))
        return file

    def file(self, owner: str, id: str) -> FileObject | None:
        stored = self._rows.execute("SELECT row FROM files WHERE id = ? AND owner = ?", (id, owner)).fetchone()
        return FILE.decode(stored[0]) if stored else None

    def files(self, owner: str) -> list[FileObject]:
        """The files of an owner, the oldest first."""
        rows = self._rows.execute("SELECT row FROM files WHERE owner = ? ORDER BY rowid", (owner,))
        return [FILE.decode(row[0]) for row in rows]

    def remove_expired(self, now: float, kept_s: float) -> int:
        """Remove what has expired, of all owners; return the bytes of the files that stay.

        A file that an unfinished batch reads stays until that has ended. A finished batch goes once it is older than
        `kept_s` seconds and none of its files is left; with 0 it stays.
        """
        query = "SELECT id FROM files WHERE json_extract(CAST(row AS TEXT), '$.expires_at') <= ?"
        for (id,) in self._rows.execute(query, (now,)).fetchall():
            self.delete_file(id)
        if kept_s:
            with self._rows:
                self._rows.execute(REMOVE_BATCHES, (*UNFINISHED, now - kept_s))
                self._rows.execute("DELETE FROM batch_keys WHERE batch NOT IN (SELECT id FROM batches)")
        return self.used_bytes()

    def check_room(self, owner: str, size: int) -> None:
        """Raise HttpError 413 unless the files of an owner may grow by `size` bytes.

        They may come to as much as stays free for all others: no owner fills the store, and a new one has room.
        """
        own = self.used_bytes(owner) + size
        free = MAX_STORED_BYTES - self.used_bytes() - size
        if own > free:
            raise HttpError(
                413,
                f"your files would come to {own:,} bytes, and of the {MAX_STORED_BYTES:,} bytes for all clients "
                f"{max(0, free):,} would be left, the most that one may have; delete some files first",
                code="storage-full",
            )

    def used_bytes(self, owner: str | None = None) -> int:
        """Bytes of all files of an owner; None for all owners."""
        query = (
            "SELECT coalesce(sum(json_extract(CAST(row AS TEXT), '$.bytes')), 0) FROM files "
            "WHERE owner = coalesce(?, owner)"
        )
        return int(self._rows.execute(query, (owner,)).fetchone()[0])

    def delete_file(self, id: str) -> bool:
        """Delete a file; return False, and keep it, if an unfinished batch reads it."""
        with self._rows:
            self._rows.execute("BEGIN IMMEDIATE")
            if self.is_read(id):
                return False
            self._rows.execute("DELETE FROM files WHERE id = ?", (id,))
        self.content(id).unlink(missing_ok=True)
        return True

    def is_read(self, id: str) -> bool:
        """Return True if an unfinished batch reads a file."""
        query = f"SELECT 1 FROM batches WHERE input = ? AND status IN ({_marks(UNFINISHED)})"
        return self._rows.execute(query, (id, *UNFINISHED)).fetchone() is not None

    # Batches

    def add_batch(self, owner: str, batch: BatchObject, key: str = "") -> bool:
        """Keep a new batch and the digest of its client's key; return False if its input file is not there any more."""
        values = (batch.id, owner, batch.status, batch.input_file_id, msgspec.json.encode(batch))
        with self._rows:
            self._rows.execute("BEGIN IMMEDIATE")
            if self.file(owner, batch.input_file_id) is None:
                return False
            self._rows.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?)", values)
            self._rows.execute("INSERT INTO batch_keys VALUES (?, ?)", (batch.id, key))
        return True

    def change_batch(self, id: str, change: Callable[[BatchObject], None]) -> BatchObject:
        """Let `change` alter a batch, while nobody else does; return it as it is then.

        The answers of a batch that ends are forgotten but for their number: its output files have them.
        """
        with self._rows:
            self._rows.execute("BEGIN IMMEDIATE")
            row = self._rows.execute("SELECT row FROM batches WHERE id = ?", (id,)).fetchone()[0]
            batch = self._counted(row)
            change(batch)
            values = (batch.status, msgspec.json.encode(batch), id)
            self._rows.execute("UPDATE batches SET status = ?, row = ? WHERE id = ?", values)
            if batch.status not in UNFINISHED:
                self._rows.execute("DELETE FROM results WHERE batch = ?", (id,))
        return batch

    def batch(self, owner: str, id: str) -> BatchObject | None:
        """A batch with the number of its results up to now."""
        stored = self._rows.execute("SELECT row FROM batches WHERE id = ? AND owner = ?", (id, owner)).fetchone()
        return self._counted(stored[0]) if stored else None

    def batches(self, owner: str) -> list[BatchObject]:
        """The batches of an owner, the newest first."""
        rows = self._rows.execute("SELECT row FROM batches WHERE owner = ? ORDER BY rowid DESC", (owner,))
        return [self._counted(row[0]) for row in rows.fetchall()]

    def unfinished(self) -> list[UnfinishedBatch]:
        """All batches that are not finished, the oldest first."""
        query = (
            "SELECT id, owner, coalesce(key, '') FROM batches LEFT JOIN batch_keys ON batch_keys.batch = batches.id "
            f"WHERE status IN ({_marks(UNFINISHED)}) ORDER BY batches.rowid"
        )
        return [UnfinishedBatch(*row) for row in self._rows.execute(query, UNFINISHED)]

    def status(self, id: str) -> str:
        stored = self._rows.execute("SELECT status FROM batches WHERE id = ?", (id,)).fetchone()
        return str(stored[0]) if stored else ""

    def add_result(self, batch: str, line: int, row: bytes, *, failed: bool) -> str:
        """Keep the answer to a line, unless there is one; return the batch's status."""
        self._results.add(batch, line, row, failed=failed)
        return self.status(batch)

    def answered(self, batch: str) -> set[int]:
        """The lines of a batch that have answers."""
        return self._results.answered(batch)

    def results(self, batch: str, *, failed: bool) -> Iterator[bytes]:
        """The answers of a batch, in order of its lines."""
        return (row for _, row in self._results.rows(batch, failed=failed))

    @contextlib.contextmanager
    def claim(self, batch: str) -> Iterator[bool]:
        """Hold a batch while the block runs, True, or False if another server has it. A killed server lets go."""
        with (self.folder / "locks" / batch).open("a") as lock:
            yield try_lock(lock)

    def _counted(self, row: bytes) -> BatchObject:
        batch = BATCH.decode(row)
        counts = batch.request_counts
        if batch.status in UNFINISHED:
            counts.completed, counts.failed = self._results.counts(batch.id)
        elif not counts.completed + counts.failed:
            # Earlier versions kept no numbers of batches that have ended.
            counts.completed, counts.failed = (
                self._line_count(id) for id in (batch.output_file_id, batch.error_file_id)
            )
        return batch

    def _line_count(self, id: str | None) -> int:
        """Number of lines of a file; 0 for one that is not there."""
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


def _marks(values: tuple[str, ...]) -> str:
    return ", ".join("?" * len(values))
