"""The tables of the store, and the way from each of their versions to the next."""

from __future__ import annotations

from weft.api.batches import results
from weft.machine.sqlite_files import Migration, statements

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
