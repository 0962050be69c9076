"""The store of files and batches on the disk: crashes, full disks, limits, and stores of earlier versions."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pure.api.test_batches import URL, add_bytes, add_lines, client, ended, rows_of
from tests.pure.commands import HERE
from tests.pure.http.test_connections import post, refusal
from tests.pure.servers import weft_server
from tests.pure.worlds import World, refused
from tests.refusals import refuses
from weft.api.batches import store as store_module
from weft.api.batches.contents import Contents
from weft.api.batches.store import MIGRATIONS, PART_S, Page, Store
from weft.api.batches.types import BatchObject
from weft.api.offline.journal import Journal
from weft.errors import ConfigError
from weft.http.errors import HttpError
from weft.machine.sqlite_files import copy_path

STORES = Path(__file__).parents[2] / "data" / "stores"


def contents(folder: Path) -> set[str]:
    return {path.name for path in (folder / "contents").iterdir()}


def ids(store: Store, owner: str = "") -> set[str]:
    return {file.id for file in store.files(owner)}


# A crash, or a full disk, in the middle of a change

CRASH = """
import os, sys
from pathlib import Path
from weft.api.batches.contents import Contents
from weft.api.batches.store import Store

store = Store(Path(sys.argv[1]))
if sys.argv[2] == "add":
    install = Contents.install
    def crash(self, content, id):
        install(self, content, id)
        os.kill(os.getpid(), 9)
    Contents.install = crash
    with store.new_content() as content:
        content.write(b"x" * 1000)
        store.add_file("", content, "f", "batch")
else:
    Contents.remove = lambda self, id: os.kill(os.getpid(), 9)
    store.delete_file(sys.argv[3])
"""


@pytest.mark.parametrize("change", ["add", "delete"])
def test_a_crash_between_row_and_content_is_mended(tmp_path: Path, change: str) -> None:
    store = Store(tmp_path)
    add_bytes(store, "", 10)
    (id,) = ids(store)
    run = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), change, id], env=HERE, timeout=60)
    assert run.returncode == -9
    assert ids(store) == ({id} if change == "add" else set()) and contents(tmp_path) - ids(store)
    assert store.remove_expired(time.time(), 1.0) == (10 if change == "add" else 0)
    assert contents(tmp_path) - ids(store), "it may be on the way to its row"
    store.remove_expired(time.time() + PART_S + 10, 1.0)
    assert contents(tmp_path) == ids(store)
    store.close()


@pytest.mark.parametrize("at", ["install", "insert"])
def test_what_a_full_disk_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    store = Store(tmp_path)

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if at == "install":
            patch.setattr(Contents, "install", full)
        else:
            patch.setattr(store_module, "KEEP_FILE", "INSERT INTO no_table VALUES (?, ?, ?, ?, ?, ?)")
        with pytest.raises((OSError, sqlite3.Error)):
            add_bytes(store, "", 1000)
    assert not ids(store) and not contents(tmp_path) and store.used_bytes() == 0
    add_bytes(store, "", 10)
    assert store.used_bytes() == store.used_bytes("") == 10
    store.close()


def test_rows_without_contents_go_unless_a_batch_reads_them(tmp_path: Path) -> None:
    store = Store(tmp_path)
    add_lines(store, "a")
    (read,) = ids(store)
    add_bytes(store, "", 10)
    for path in (tmp_path / "contents").iterdir():
        path.unlink()
    store.close()
    store = Store(tmp_path)
    assert ids(store) == {read}
    store.close()


async def test_a_batch_whose_input_is_lost_fails(tmp_path: Path) -> None:
    store = Store(tmp_path)
    add_lines(store, "a")
    store.content(*ids(store)).unlink()
    store.close()
    async with client(World(storage_directory=str(tmp_path))) as api:
        batch = await ended(api, "batch_1")
        assert batch.status == "failed" and batch.errors.data[0].code == "missing_file"


async def test_a_full_disk_is_an_answer_and_no_answer_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An upload gets 503; the answer to a line is written once there is room, and the line is not asked again."""
    monkeypatch.setattr("weft.api.batches.store_thread.WRITE_AGAIN_S", 0.01)
    refusals = 3
    write_lines = Store.write_lines

    def full(*given: Any, **how: Any) -> Any:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise sqlite3.OperationalError("database or disk is full")
        return write_lines(*given, **how)

    monkeypatch.setattr(Store, "write_lines", full)
    store = Store(tmp_path)
    add_lines(store, "ab")
    world = World(storage_directory=str(tmp_path))
    async with client(world) as api:
        assert (await ended(api, "batch_1")).request_counts.completed == 2
        assert len(world.engine.requests) == 2 and not refusals
        monkeypatch.setattr(Contents, "install", full)
        refusals = 1
        body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nabc\r\n--x\r\n'
        body += b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        answer = await world.client.post("/v1/files", content=body, headers=headers)
        assert "disk is full" in refused(answer, 503, code="storage_failed")
    assert len([record for record in caplog.records if "disk is full" in record.getMessage()]) == 1
    store.close()


# Locks


def test_locks_of_batches_that_have_ended_are_removed(tmp_path: Path) -> None:
    store, other = Store(tmp_path), Store(tmp_path)
    add_lines(store, "a")
    with store.claim("batch_1") as claimed, other.claim("batch_1") as also, store.claim("batch_gone") as gone:
        assert (claimed, also, gone) == (True, False, True)
        other.remove_expired(time.time(), 1.0)
        assert {path.name for path in (tmp_path / "locks").iterdir()} == {"batch_1", "batch_gone"}, "they are held"
    store.change_batch("batch_1", lambda row: setattr(row, "status", "completed"))
    store.remove_expired(time.time(), 0.0)
    assert not list((tmp_path / "locks").iterdir())
    with store.claim("batch_1") as claimed:
        assert claimed
    store.close()
    other.close()


def test_a_lock_that_is_removed_while_it_is_taken_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, taken = Contents(tmp_path), []

    def take(lock: Any) -> bool:
        taken.append(lock)
        if len(taken) == 1:
            (tmp_path / "locks" / "batch_1").unlink()
        return True

    monkeypatch.setattr("weft.api.batches.contents.try_lock", take)
    with folder.claim("batch_1") as claimed:
        assert claimed and len(taken) == 2
        assert os.path.samestat(os.fstat(taken[1].fileno()), (tmp_path / "locks" / "batch_1").stat())


# Limits


def test_an_owner_has_so_many_files_and_the_others_are_not_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_FILES", 3)
    store = Store(tmp_path)
    for _ in range(3):
        add_bytes(store, "a", 0)
    with refuses(HttpError, "too-many-files", "3"):
        add_bytes(store, "a", 0)
    add_bytes(store, "b", 0)
    add_bytes(store, "a", 1, id="file-of-a-batch")
    store.delete_file(next(iter(ids(store, "b"))))
    for id in ids(store, "a"):
        store.delete_file(id)
    add_bytes(store, "a", 0)
    store.close()


def test_an_owner_has_so_many_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_BATCHES", 2)
    store = Store(tmp_path)
    add_lines(store, "a")
    (input_file,) = ids(store)
    fields: dict[str, Any] = {"endpoint": URL, "completion_window": "1h", "created_at": 0, "expires_at": 2**40}

    def add(id: str) -> None:
        assert store.add_batch("", BatchObject(id=id, input_file_id=input_file, **fields))

    add("batch_2")
    with refuses(HttpError, "too-many-batches", "2"):
        add("batch_3")
    store.change_batch("batch_1", lambda row: setattr(row, "status", "completed"))
    add("batch_3")  # in the place of the one that has ended
    assert [batch.id for batch in store.batches("")] == ["batch_3", "batch_2"]
    store.close()


def test_no_query_of_an_upload_reads_all_rows(tmp_path: Path) -> None:
    """SQLite's own plan of each: a search by an index, never a scan."""
    store = Store(tmp_path)
    add_lines(store, "a")
    asked: list[str] = []
    store._rows.set_trace_callback(asked.append)
    add_bytes(store, "a", 1)
    store.delete_expired(time.time())
    store.files("a", Page(2, "file-x", newest_first=True), "batch", time.time())
    store.batches("a", Page(2))
    store.unfinished()
    store._rows.set_trace_callback(None)
    plans = [
        (query, [row[3] for row in store._rows.execute(f"EXPLAIN QUERY PLAN {query}")])
        for query in map(str.strip, asked)
        if query.startswith(("SELECT", "INSERT", "DELETE", "UPDATE"))
    ]
    assert len(plans) >= 6
    assert not [(query, plan) for query, plan in plans if any("SCAN" in step for step in plan)]
    store.close()


def test_pages_of_lists(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in range(5):
        add_bytes(store, "a", number)
        add_bytes(store, "b", 100)
    sizes = [file.bytes for file in store.files("a", Page(3))]
    last = store.files("a", Page(3))[-1].id
    assert sizes == [0, 1, 2]
    assert [file.bytes for file in store.files("a", Page(3, last))] == [3, 4]
    assert [file.bytes for file in store.files("a", Page(1, last, newest_first=True))] == [1]
    assert not store.files("a", Page(3, "file-nobody-has"))
    store.close()


def upload(size: int, *lines: str, promised: int = 0) -> tuple[bytes, bytes]:
    """Head and body of an upload over a raw connection; the head may promise more."""
    part = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    body = part + part.replace(b'"purpose"', b'"file"; filename="f"').replace(b"batch", bytes(size)) + b"--x--\r\n"
    fields = ["Content-Type: multipart/form-data; boundary=x", f"Content-Length: {promised or len(body)}", *lines]
    return "\r\n".join(["POST /v1/files HTTP/1.1", "Host: x", *fields, "", ""]).encode(), body


async def test_bytes_of_an_upload_that_are_on_the_disk_hold_no_memory(tmp_path: Path) -> None:
    """Two at once, each of which is four times what all connections may hold."""
    world = World(storage_directory=str(tmp_path))
    async with weft_server(world, held_bytes=1_000_000) as live:
        clients = [await live.connect() for _ in range(2)]
        head, body = upload(4_000_000)
        for one in clients:
            await one.send(head)
        for at in range(0, len(body), 100_000):
            for one in clients:
                await one.send(body[at : at + 100_000])
        assert [(await one.answer())[0] for one in clients] == [200, 200]
        half = await live.connect()
        await half.send(post(b" " * 900_000, length=1_000_000))
        beside = await live.connect()
        await beside.send(post(b" " * 900_000, length=1_000_000))
        refusal(await half.rest(), 503, "too_many_unfinished")


async def test_unfinished_uploads_need_room_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner fills it neither with files nor with uploads that never end."""
    monkeypatch.setattr(store_module, "MAX_STORED_BYTES", 10_000_000)
    world = World(storage_directory=str(tmp_path))
    async with weft_server(world) as live:
        head, body = upload(1_500_000, promised=4_000_000)
        stuck = [await live.connect() for _ in range(2)]
        await stuck[0].send(head + body)
        while not any(path.stat().st_size > 1_000_000 for path in tmp_path.glob("contents/*")):
            await asyncio.sleep(0.01)
        await stuck[1].send(head + body)
        assert (await stuck[1].answer())[0] == 413
        stuck[0].writer.transport.abort()
        while contents(tmp_path):
            await asyncio.sleep(0.01)
        after = await live.connect()
        await after.send(b"".join(upload(1_500_000)))
        assert (await after.answer())[0] == 200


async def test_names_of_files_are_bounded(tmp_path: Path) -> None:
    world = World(storage_directory=str(tmp_path))
    for length, status in ((255, 200), (256, 400)):
        files = {"file": ("x" * length, b"a"), "purpose": (None, "batch")}
        answer = await world.client.post("/v1/files", files=files)
        assert answer.status_code == status
    assert not [name for name in contents(tmp_path) if name.endswith(".part")]


# Modes


def test_only_the_owner_of_the_server_reads_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = Store(tmp_path / "store")
        add_bytes(store, "", 1)
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").rglob("*")}
    assert modes.pop("contents") == modes.pop("locks") == 0o700 and set(modes.values()) == {0o600} and len(modes) >= 3
    store.close()


# Stores of earlier versions


async def test_the_store_of_the_first_version_goes_on(tmp_path: Path) -> None:
    """It was made with the code of 93539c4e, and has a batch with one of four answers, and one that has ended."""
    folder = tmp_path / "store"
    shutil.copytree(STORES / "first", folder, ignore=shutil.ignore_patterns("*.progress"))
    (folder / "store.sqlite").chmod(0o644)
    before = (folder / "store.sqlite").read_bytes()
    store = Store(folder)
    assert (store.used_bytes(""), store.used_bytes("ab12"), store.used_bytes()) == (572, 120, 692)
    assert [file.bytes for file in store.files("ab12")] == [100, 10, 10]
    assert [batch.id for batch in store.unfinished()] == ["batch_open"]
    assert stat.S_IMODE((folder / "store.sqlite").stat().st_mode) == 0o600
    kept = copy_path(folder / "store.sqlite", 0)
    with sqlite3.connect(kept) as copy:
        assert copy.execute("SELECT count(*), max(rowid) FROM files").fetchone() == (4, 4)
    copy.close()
    assert before and stat.S_IMODE(kept.stat().st_mode) == 0o600
    store.delete_expired(2**40)
    assert store.used_bytes() == 592, "the one that expires"
    store.close()
    world = World(storage_directory=str(folder))
    async with client(world) as api:
        batch = await ended(api, "batch_open")
        assert (batch.request_counts.completed, len(world.engine.requests)) == (4, 3)
        rows = await rows_of(api, batch.output_file_id)
        assert [row["custom_id"] for row in rows] == list("abcd") and rows[0]["response"]["body"] == {"kept": True}


def test_the_store_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    rows = sqlite3.connect(tmp_path / "store.sqlite")
    rows.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    rows.close()
    with refuses(ConfigError, "file-too-new", "newer version"):
        Store(tmp_path)


def test_the_journal_of_the_first_version_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.progress"
    shutil.copy(STORES / "first" / "out.jsonl.progress", path)
    journal = Journal(path, {"model": "tiny"})
    assert journal.answered() == {2} and [json.loads(row) for _, row in journal.rows(failed=False)] == [
        {"generated_text": "kept"}
    ]
    assert copy_path(path, 0).exists()
    journal.remove()
    assert not list(tmp_path.iterdir())
