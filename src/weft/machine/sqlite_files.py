"""SQLite files that outlive a version of the program: private ones, which a newer program migrates."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.errors import ConfigError

PRIVATE_FILE = 0o600  # names of keys, addresses and spending are in these files
BESIDE = ("", "-wal", "-shm", "-journal")  # ends of the names of the files that SQLite has for one database

Migration = Callable[[sqlite3.Connection], None]


def statements(*lines: str) -> Migration:
    """Return a migration that executes SQL statements. (`executescript` would end the transaction.)"""

    def run(database: sqlite3.Connection) -> None:
        for line in lines:
            database.execute(line)

    return run


def make_private_file(path: str | Path) -> None:
    """Create a database's file for its owner alone, or correct the mode of an older version's file. Raises OSError.

    SQLite gives its other files the mode of this one. A file of another owner keeps its mode.
    """
    # One that is there is not opened: to close it would give up this process's locks on it, see fcntl(2).
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{path} is no regular file")
    for end in BESIDE:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if stat.S_IMODE(os.stat(f"{path}{end}").st_mode) != PRIVATE_FILE:
                os.chmod(f"{path}{end}", PRIVATE_FILE)


class OpenFile:
    """A database's file by its path, from its opening on.

    SQLite goes on with the file that it has opened, also if it has another name by then, or none: what is written is
    lost with the process.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._opened: os.stat_result | None = None

    def fault(self) -> str:
        """Words for a change of the file since the first call; "" if it is still the same. Costs one system call."""
        try:
            status = os.stat(self._path)
        except OSError:
            return "is gone"
        opened, self._opened = self._opened, self._opened or status
        if opened is None:
            return ""
        if (status.st_ino, status.st_dev) != (opened.st_ino, opened.st_dev):
            return "has been replaced by another"
        # Without a vacuum, which these databases have not, a file only grows.
        return "has been overwritten" if status.st_size < opened.st_size else ""


def migrate(database: sqlite3.Connection, migrations: Sequence[Migration]) -> None:
    """Bring a database to the version `len(migrations)`, in one transaction: it is changed whole or not at all.

    `migrations[n]` makes version n + 1 of version n, and the version is SQLite's `user_version`. An empty file has
    version 0, and so has one of the programs that knew of no versions: the first migration gets both. A copy of an old
    version that has tables is kept next to the file. Other processes may migrate the file at the same time. Raises
    ConfigError for a file of a newer program, and sqlite3.Error.
    """
    newest = len(migrations)
    if version_of(database) == newest:
        return
    database.execute("BEGIN IMMEDIATE")  # readers go on, the copy among them
    try:
        version = version_of(database)  # another process may have been first
        if version > newest:
            raise ConfigError(
                f"{path_of(database)} was written by a newer version of Weft (version {version} of the file; this one "
                f"knows {newest}); start that version, or give another file",
                code="file-too-new",
            )
        if version < newest:
            _keep_copy(database, version)
            for migration in migrations[version:]:
                migration(database)
            database.execute(f"PRAGMA user_version = {newest}")
        database.execute("COMMIT")
    except BaseException:
        database.execute("ROLLBACK")
        raise


def version_of(database: sqlite3.Connection) -> int:
    """Version of a database; 0 for an empty one."""
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def copy_path(path: str | Path, version: int) -> Path:
    """Path of the copy that is kept of an old version."""
    return Path(f"{path}.version-{version}")


def path_of(database: sqlite3.Connection) -> str:
    """The path of a database's file; "" for a database in memory."""
    return str(database.execute("PRAGMA database_list").fetchone()[2])


def _keep_copy(database: sqlite3.Connection, version: int) -> None:
    """Keep a copy of a database that has tables. After a crash either all of it is there or none."""
    path = path_of(database)
    if not path or database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0:
        return
    kept = copy_path(path, version)
    part = Path(f"{kept}.part")
    part.unlink(missing_ok=True)
    make_private_file(part)
    # Over a connection of its own, which sees what is committed: `database` is in a transaction.
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(part)) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # no files next to it
    os.replace(part, kept)
