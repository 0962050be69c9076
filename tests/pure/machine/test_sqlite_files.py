"""SQLite files: modes, versions, and the copy that is kept of an old one."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.machine.sqlite_files import copy_path, make_private_file, migrate, statements, version_of

FIRST = statements("CREATE TABLE IF NOT EXISTS rows (id INTEGER PRIMARY KEY, name TEXT)")
SECOND = statements("ALTER TABLE rows ADD COLUMN size INTEGER", "UPDATE rows SET size = length(name)")


def open_file(path: Path) -> sqlite3.Connection:
    make_private_file(path)
    return sqlite3.connect(path, isolation_level=None)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_an_empty_file_is_private_and_has_the_newest_version_without_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with closing(open_file(path)) as database:
        migrate(database, [FIRST, SECOND])
        migrate(database, [FIRST, SECOND])
        assert version_of(database) == 2
        assert database.execute("SELECT id, name, size FROM rows").fetchall() == []
    assert mode_of(path) == 0o600 and os.listdir(tmp_path) == ["x.sqlite"]


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_an_old_file_is_migrated_and_a_copy_is_kept(tmp_path: Path, journal: str) -> None:
    path = tmp_path / "x.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA journal_mode = {journal}")
        database.executescript("CREATE TABLE rows (id INTEGER PRIMARY KEY, name TEXT)")
        database.execute("INSERT INTO rows VALUES (1, 'abc')")
        database.commit()
    path.chmod(0o644)
    with closing(open_file(path)) as database:
        migrate(database, [FIRST, SECOND])
        assert database.execute("SELECT * FROM rows").fetchall() == [(1, "abc", 3)]
    assert mode_of(path) == 0o600
    kept = copy_path(path, 0)
    assert sorted(os.listdir(tmp_path)) == ["x.sqlite", kept.name] and mode_of(kept) == 0o600
    with closing(sqlite3.connect(kept)) as copy:
        assert copy.execute("SELECT * FROM rows").fetchall() == [(1, "abc")] and version_of(copy) == 0


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with closing(open_file(path)) as database:
        migrate(database, [FIRST])
        with pytest.raises(sqlite3.OperationalError):
            migrate(database, [FIRST, statements("INSERT INTO rows VALUES (1, 'a')", "no SQL")])
        assert version_of(database) == 1 and database.execute("SELECT * FROM rows").fetchall() == []
        assert not database.in_transaction


def test_a_file_of_a_newer_program_is_refused_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with closing(open_file(path)) as database:
        migrate(database, [FIRST, SECOND])
        with pytest.raises(ConfigError) as refusal:
            migrate(database, [FIRST])
        assert refusal.value.code == "file-too-new" and version_of(database) == 2


def test_a_pipe_is_no_database(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):
        make_private_file(tmp_path / "pipe")


def test_a_database_in_memory_has_no_copy() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        database.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, name TEXT)")
        migrate(database, [FIRST, SECOND])
        assert version_of(database) == 2
