"""/v1/files and /v1/batches: OpenAI's client, servers that are killed, and servers that share a store."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.pure.clients import openai_client
from tests.pure.commands import HERE
from tests.pure.worlds import DEAD, HELLO, FakeEngine, World, dying, endless, refused
from tests.refusals import refuses
from weft.api.batches import answers, lines, uploads
from weft.api.batches.attempts import Attempts, LinePlaces
from weft.api.batches.keeper import BatchKeeper
from weft.api.batches.results import LineChange
from weft.api.batches.store import Store
from weft.api.batches.types import BatchLine, BatchObject
from weft.engine.core.request import Output, Request
from weft.engine.replicas.suspects import LOST
from weft.errors import NoEngineError
from weft.http.errors import HttpError
from weft.logs import request_id

URL = "/v1/chat/completions"


def line(name: str, url: str = URL, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": name}]
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "tiny", "messages": messages} | fields}


def jsonl(rows: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@asynccontextmanager
async def client(world: World, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of a server that goes on with what it finds in its store."""
    keeper: BatchKeeper = world.app.state.batches
    async with openai_client(world, key) as api:
        keeper.resume()
        yield api
        await keeper.close()


async def begin(api: openai.AsyncOpenAI, rows: Iterable[Any], **fields: Any) -> str:
    file = await api.files.create(file=("in.jsonl", jsonl(rows)), purpose="batch")
    options = {"endpoint": URL, "completion_window": "24h"} | fields
    return (await api.batches.create(input_file_id=file.id, **options)).id


async def ended(api: openai.AsyncOpenAI, id: str, *states: str) -> Any:
    """The batch, once it has one of these states."""
    while True:
        batch = await api.batches.retrieve(id)
        if batch.status in (states or ("completed", "failed", "expired", "cancelled")):
            return batch
        await asyncio.sleep(0.01)


async def rows_of(api: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    if file is None:
        return []
    text = (await api.files.content(file)).text
    return [json.loads(row) for row in text.splitlines()]


async def test_lines_are_not_of_the_request_that_woke_the_server(tmp_path: Path) -> None:
    """Neither in the log nor in traces."""
    ids: list[str] = []

    def noting(request: Request) -> Iterable[Output]:
        ids.append(request_id.get())
        return HELLO(request)

    of = World(FakeEngine(noting), enable_request_id_headers=True, storage_directory=str(tmp_path))
    async with client(of) as api:
        await ended(api, await begin(api, [line("a")]))
    assert ids == [""]


async def test_files_with_the_official_client(tmp_path: Path) -> None:
    async with client(World(storage_directory=str(tmp_path))) as api:
        content = jsonl([line("a")]) + b"\r\n--nearly a boundary\r\n"
        file = await api.files.create(file=("mine.jsonl", content), purpose="batch")
        assert (file.bytes, file.filename, file.purpose) == (len(content), "mine.jsonl", "batch")
        assert (await api.files.retrieve(file.id)) == file
        assert (await api.files.content(file.id)).content == content
        other = await api.files.create(file=("other.jsonl", b"x"), purpose="batch")
        assert [row.id async for row in api.files.list(limit=1)] == [other.id, file.id]
        assert [row.id async for row in api.files.list(order="asc")] == [file.id, other.id]
        assert (await api.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await api.files.retrieve(file.id)
        assert len(list((tmp_path / "contents").iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"--x\r\n\r\n--x--\r\n", b"\r\n" * 1000])
async def test_files_of_any_bytes_come_back(tmp_path: Path, content: bytes) -> None:
    async with client(World(storage_directory=str(tmp_path))) as api:
        file = await api.files.create(file=("f", content), purpose="batch")
        assert (await api.files.content(file.id)).content == content


FORM = {"Content-Type": "multipart/form-data; boundary=x"}
PART = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nabc\r\n'


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (b"{}", {"Content-Type": "application/json"}, "invalid_value"),
        (b"", FORM, "invalid_value"),
        (b"--x\r\n", FORM, "invalid_value"),
        (PART, FORM, "invalid_value"),
        (PART + b"--x--\r\n", FORM, "invalid_value"),
        (b"--x\r\nno head--x--", FORM, "invalid_value"),
        (b"--x--", FORM, "invalid_value"),
        (b"--x\r\n" * 100, FORM, "invalid_value"),
    ],
)
async def test_bodies_that_are_no_upload(tmp_path: Path, body: bytes, headers: dict[str, str], code: str) -> None:
    world = World(storage_directory=str(tmp_path))
    refused(await world.client.post("/v1/files", content=body, headers=headers), 400, code=code)
    assert not list((tmp_path / "contents").iterdir()) if (tmp_path / "contents").exists() else True


async def test_other_purposes_are_refused(tmp_path: Path) -> None:
    async with client(World(storage_directory=str(tmp_path))) as api:
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await api.files.create(file=("f", b"x"), purpose="fine-tune")


async def test_a_batch_with_the_official_client(tmp_path: Path) -> None:
    async with client(World(storage_directory=str(tmp_path))) as api:
        names = [f"line-{number}" for number in range(20)]
        id = await begin(api, [line(name) for name in names], metadata={"team": "blue"})
        batch = await ended(api, id)
        assert batch.status == "completed" and batch.metadata == {"team": "blue"} and batch.model == "tiny"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (20, 20, 0) and batch.error_file_id is None
        rows = await rows_of(api, batch.output_file_id)
        assert [row["custom_id"] for row in rows] == names  # in the order of the lines
        body = rows[0]["response"]["body"]
        assert rows[0]["response"]["status_code"] == 200 and body["choices"][0]["message"]["content"] == "hello"
        assert [row.id async for row in api.batches.list()] == [id]
        outputs = await api.files.list(purpose="batch_output")
        assert [file.id for file in outputs.data] == [batch.output_file_id]


async def test_lines_that_fail_are_told_apart(tmp_path: Path) -> None:
    async with client(World(storage_directory=str(tmp_path))) as api:
        rows = [line("good"), line("bad", temperature=-1), line("unknown", model="other")]
        batch = await ended(api, await begin(api, rows))
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 2)
        failed = {row["custom_id"]: row["response"] for row in await rows_of(api, batch.error_file_id)}
        assert {name: row["status_code"] for name, row in failed.items()} == {"bad": 400, "unknown": 404}
        assert failed["bad"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("content", "code", "at"),
    [
        (b"", "empty_file", None),
        (b"{", "invalid_json_line", 1),
        (jsonl([line("a")]).decode().encode("utf-16"), "invalid_encoding", None),
        (b"\xef\xbb\xbf" + jsonl([line("a"), line("a")]), "duplicate_custom_id", 2),
        (jsonl([line("a"), line("b", more="x" * 20_000)]), "invalid_json_line", 2),
        (jsonl([line("a", more=[[]] * 100_000), line("b")]), "invalid_json_line", 1),
        (jsonl([line("a"), line("a")]), "duplicate_custom_id", 2),
        (jsonl([line("a", url="/v1/completions")]), "invalid_url", 1),
        (jsonl([line("a") | {"method": "GET"}]), "invalid_method", 1),
        (jsonl([line("a"), line("b", stream=True)]), "invalid_request", 2),
    ],
)
async def test_a_file_that_is_no_batch_fails_with_the_line(
    tmp_path: Path, content: bytes, code: str, at: int | None
) -> None:
    limit = 20_000 if at == 2 else 0  # a body's
    world = World(storage_directory=str(tmp_path), **({"max_body_bytes": limit} if limit else {}))
    async with client(world) as api:
        file = await api.files.create(file=("in.jsonl", content), purpose="batch")
        id = (await api.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")).id
        batch = await ended(api, id)
        assert batch.status == "failed" and batch.errors and batch.errors.data
        assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, at)
        assert not world.engine.requests


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoint": "/v1/embed"},
        {"completion_window": "soon"},
        {"completion_window": "0h"},
        {"metadata": {"a" * 65: "b"}},
    ],
    ids=str,
)
async def test_batches_that_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with client(World(storage_directory=str(tmp_path))) as api:
        with pytest.raises(openai.BadRequestError, match=next(iter(fields))):
            await begin(api, [line("a")], **fields)


async def test_a_batch_is_cancelled(tmp_path: Path) -> None:
    def script(request: Request) -> Iterable[Output]:
        return (HELLO if bytes(t for t in request.prompt if t < 256).startswith(b"user:a") else endless)(request)

    world = World(FakeEngine(script), storage_directory=str(tmp_path))
    async with client(world) as api:
        id = await begin(api, [line("a"), *(line(f"b{number}") for number in range(20))])
        while (await api.batches.retrieve(id)).request_counts.completed == 0:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        file = (await api.batches.retrieve(id)).input_file_id
        with pytest.raises(openai.ConflictError):
            await api.files.delete(file)
        assert (await api.batches.cancel(id)).status == "cancelling"
        batch = await ended(api, id)
        assert batch.status == "cancelled" and batch.request_counts.completed == 1
        assert [row["custom_id"] for row in await rows_of(api, batch.output_file_id)] == ["a"]
        assert not world.engine.open  # nothing runs on
        with pytest.raises(openai.ConflictError):
            await api.batches.cancel(id)
        await api.files.delete(file)


async def test_a_batch_expires(tmp_path: Path) -> None:
    world = World(FakeEngine(endless), storage_directory=str(tmp_path))
    async with client(world) as api:
        file = await api.files.create(file=("in.jsonl", jsonl([line("a")])), purpose="batch")
        row = BatchObject(
            id="batch_late", endpoint=URL, input_file_id=file.id, completion_window="1h", created_at=0, expires_at=1
        )
        keeper: BatchKeeper = world.app.state.batches
        await keeper.store.call(lambda store: store.add_batch("", row))
        keeper.start()
        batch = await ended(api, "batch_late")
        assert batch.status == "expired" and batch.expired_at
        (error,) = await rows_of(api, batch.error_file_id)
        assert error["error"]["code"] == "batch_expired" and error["response"] is None


async def test_a_batch_of_another_model_expires_too(tmp_path: Path) -> None:
    first = World(FakeEngine(endless), storage_directory=str(tmp_path))
    async with client(first) as api:
        id = await begin(api, [line("a")])
        await ended(api, id, "in_progress")
    store = Store(tmp_path)
    store.change_batch(id, lambda row: setattr(row, "expires_at", 1))
    store.close()
    other = World(storage_directory=str(tmp_path), served_model_name=("other",))
    async with client(other) as api:
        batch = await ended(api, id)
        assert batch.status == "expired" and not other.engine.requests
        assert [row["custom_id"] for row in await rows_of(api, batch.error_file_id)] == ["a"]


async def test_a_line_that_only_an_earlier_server_read_is_an_error(tmp_path: Path) -> None:
    async with client(World(FakeEngine(endless), storage_directory=str(tmp_path))) as api:
        id = await begin(api, [line("a"), line("b", more="x" * 20_000)])
        await ended(api, id, "in_progress")
    async with client(World(storage_directory=str(tmp_path), max_body_bytes=10_000)) as api:
        batch = await ended(api, id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        (error,) = await rows_of(api, batch.error_file_id)
        assert error["error"]["code"] == "invalid_json_line"


async def test_lines_wait_while_engines_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.batches.answers.RETRY_S", 0.01)
    monkeypatch.setattr(FakeEngine, "outage", "no replica runs: they start")
    world = World(FakeEngine(dying), storage_directory=str(tmp_path))
    async with client(world) as api:
        id = await begin(api, [line("a")])
        while len(world.engine.requests) < LOST:
            await asyncio.sleep(0.01)
        world.engine.script = HELLO
        batch = await ended(api, id)
        assert (batch.request_counts.completed, batch.error_file_id) == (1, None)


async def test_a_line_that_kills_engines_is_an_error_and_the_others_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked alone once LOST engines have died with it, and no more after that."""
    monkeypatch.setattr("weft.api.batches.answers.RETRY_S", 0.01)
    beside: list[int] = []

    def script(request: Request) -> Iterable[Output]:
        if b"killer" not in bytes(token for token in request.prompt if token < 256):
            return HELLO(request)
        beside.append(len(world.engine.open) - 1)
        return dying(request)

    world = World(FakeEngine(script), storage_directory=str(tmp_path))
    async with client(world) as api:
        names = [*"abcd", "killer", *"efgh"]
        batch = await ended(api, await begin(api, [line(name) for name in names]))
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 8, 1)
        (error,) = await rows_of(api, batch.error_file_id)
        assert error["custom_id"] == "killer" and error["response"]["status_code"] == 422
        assert error["response"]["body"]["error"]["code"] == "request_ends_engines"
    assert len(beside) == LOST + 1 and beside[-1] == 0


async def test_the_wait_for_an_engine_is_no_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may take longer to start than a request waits for it, again and again."""
    monkeypatch.setattr("weft.api.batches.answers.RETRY_S", 0.01)

    def absent(request: Request) -> Iterable[Output]:
        raise NoEngineError(DEAD.cause)

    world = World(FakeEngine(absent), storage_directory=str(tmp_path))
    async with client(world) as api:
        id = await begin(api, [line("a")])
        while len(world.engine.requests) < 3 * LOST:
            await asyncio.sleep(0.01)
        world.engine.script = HELLO
        assert (await ended(api, id)).request_counts.completed == 1


async def test_an_endpoint_that_always_loses_its_engine_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.batches.answers.RETRY_S", 0)
    asked = 0

    async def endpoint(request: Any) -> Any:
        nonlocal asked
        asked += 1
        raise HttpError(503, "the engine has started again", code="engine-restarts", retry_after_s=5)

    status, body = await answers.answer(World().service, endpoint, BatchLine(**line("a")))
    assert (asked, status) == (LOST + 1, 422) and b"request_ends_engines" in body


def test_deaths_are_kept_before_a_line_is_asked_and_forgotten_with_its_answer(tmp_path: Path) -> None:
    kept: list[int] = []

    async def note(number: int) -> None:
        kept.append(number)

    async def run() -> None:
        attempts = Attempts(1, note)
        await attempts.begin()
        assert kept == [2], "as if it had killed: then nobody could count"
        await attempts.settle(died=False)
        await attempts.begin()
        await attempts.settle(died=True)
        assert (kept, attempts.alone, attempts.spent) == ([2, 1, 2], True, False)

    asyncio.run(run())
    store = Store(tmp_path)
    store.write_lines([LineChange("batch_1", 3, 2), LineChange("batch_1", 4, 0)])
    assert store.deaths("batch_1") == {3: 2}
    store.add_result("batch_1", 3, b"{}", failed=False)
    assert not store.deaths("batch_1")
    store.close()


async def test_a_line_that_is_asked_alone_waits_for_all_places() -> None:
    places, log = LinePlaces(3), list[str]()
    go_on = asyncio.Event()

    async def hold(name: str, *, alone: bool = False) -> None:
        async with places.take(alone=alone):
            log.append(name)
            await go_on.wait()
            log.append(f"end {name}")

    async with asyncio.TaskGroup() as group:
        for name in "ab":
            group.create_task(hold(name))
        await asyncio.sleep(0)
        group.create_task(hold("alone", alone=True))
        group.create_task(hold("c"))
        gone = group.create_task(hold("gone", alone=True))
        for _ in range(5):
            await asyncio.sleep(0)
        assert log == ["a", "b"]
        gone.cancel()
        go_on.set()
    assert log.index("end alone") == log.index("alone") + 1 and len(log) == 8


def test_a_file_and_the_batch_that_reads_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.new_content() as content:
        content.write(jsonl([line("a")]))
        file = store.add_file("", content, "in.jsonl", "batch")
    fields: dict[str, Any] = {"endpoint": URL, "completion_window": "1h", "created_at": 0, "expires_at": 2**40}
    assert store.add_batch("", BatchObject(id="batch_1", input_file_id=file.id, **fields))
    assert not store.delete_file(file.id) and store.content(file.id).exists()
    store.change_batch("batch_1", lambda row: setattr(row, "status", "completed"))
    assert store.delete_file(file.id) and not store.content(file.id).exists()
    assert not store.add_batch("", BatchObject(id="batch_2", input_file_id=file.id, **fields))
    assert not store.unfinished()
    store.close()


async def test_a_full_store_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.batches.store.MAX_STORED_BYTES", 10)
    async with client(World(storage_directory=str(tmp_path))) as api:
        first = await api.files.create(file=("f", b"12345"), purpose="batch")
        with pytest.raises(openai.APIStatusError) as caught:
            await api.files.create(file=("f", b"x"), purpose="batch")
        assert (caught.value.status_code, caught.value.code) == (413, "storage_full")
        await api.files.delete(first.id)
        await api.files.create(file=("f", b"x"), purpose="batch")


def add_bytes(store: Store, owner: str, size: int, id: str = "") -> None:
    with store.new_content() as content:
        content.write(bytes(size))
        store.add_file(owner, content, "f", "batch", id)


def test_no_owner_fills_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.batches.store.MAX_STORED_BYTES", 100)
    store = Store(tmp_path)
    add_bytes(store, "a", 50)
    for size in (1, 60):
        with refuses(HttpError, "storage-full"):
            add_bytes(store, "a", size)
    assert len(list((tmp_path / "contents").iterdir())) == 1, "nothing is left of files that are refused"
    add_bytes(store, "b", 25)
    with refuses(HttpError, "storage-full"):
        add_bytes(store, "b", 1)
    add_bytes(store, "c", 12)
    add_bytes(store, "a", 500, id="file-of-a-batch")
    assert store.used_bytes("a") == 550 and store.used_bytes() == 587
    store.close()


def test_numbers_of_batches_that_ended_under_an_earlier_version(tmp_path: Path) -> None:
    store = Store(tmp_path)
    add_bytes(store, "", 1, "file-in")
    with store.new_content() as content:
        content.write(b"{}\n" * 3)
        store.add_file("", content, "f", "batch_output", "file-out")
    batch = BatchObject(
        id="batch_1",
        endpoint=URL,
        input_file_id="file-in",
        output_file_id="file-out",
        error_file_id="file-gone",
        status="completed",
        completion_window="1h",
        created_at=0,
        expires_at=1,
    )
    assert store.add_batch("", batch)
    read = store.batch("", "batch_1")
    assert read is not None and (read.request_counts.completed, read.request_counts.failed) == (3, 0)
    store.close()


@pytest.mark.parametrize(
    ("options", "origin", "status"),
    [
        ({}, "http://elsewhere", 403),
        ({}, "http://[", 403),
        ({"allowed_origins": ("http://elsewhere",)}, "http://elsewhere", 400),
        ({}, None, 400),
    ],
    ids=str,
)
async def test_pages_of_other_servers_upload_nothing(
    tmp_path: Path, options: dict[str, Any], origin: str | None, status: int
) -> None:
    world = World(storage_directory=str(tmp_path), **options)
    headers = {"Origin": origin} if origin else {}
    answer = await world.client.post("/v1/files", content=b"", headers=headers)
    assert answer.status_code == status


def test_uploads_that_a_killed_server_left_are_removed(tmp_path: Path) -> None:
    Store(tmp_path).close()
    old, new = (tmp_path / "contents" / name for name in ("part-1.part", "part-2.part"))
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    Store(tmp_path).close()
    assert not old.exists() and new.exists()


@pytest.mark.parametrize("limit", ["0", "x", "9" * 4400, "10001"])
async def test_limits_of_lists_that_are_none(tmp_path: Path, limit: str) -> None:
    world = World(storage_directory=str(tmp_path))
    refused(await world.client.get("/v1/files", params={"limit": limit}), 400, param="limit")


async def test_other_clients_requests_find_a_place(tmp_path: Path) -> None:
    world = World(FakeEngine(endless), storage_directory=str(tmp_path))
    async with client(world) as api:
        id = await begin(api, [line(f"{number}") for number in range(30)])
        while len(world.engine.requests) < 4:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert len(world.engine.requests) == 4  # of 8 that can run
        await api.batches.cancel(id)
        await ended(api, id)


async def test_a_full_server_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.batches.answers.RETRY_S", 0.01)
    world = World(storage_directory=str(tmp_path))
    world.engine.full = True
    async with client(world) as api:
        id = await begin(api, [line("a"), line("b")])
        await ended(api, id, "in_progress")
        await asyncio.sleep(0.05)
        world.engine.full = False
        batch = await ended(api, id)
        assert (batch.status, batch.request_counts.completed, batch.error_file_id) == ("completed", 2, None)


async def test_clients_with_other_keys_do_not_see_it(tmp_path: Path) -> None:
    world = World(storage_directory=str(tmp_path), api_key=("blue", "red"))
    async with client(world, "blue") as api:
        id = await begin(api, [line("a")])
        batch = await ended(api, id)
        other = api.with_options(api_key="red")
        assert not (await other.files.list()).data and not (await other.batches.list()).data
        for call in (other.batches.retrieve(id), other.files.content(batch.output_file_id), other.batches.cancel(id)):
            with pytest.raises(openai.NotFoundError):
                await call


async def test_a_later_server_goes_on(tmp_path: Path) -> None:
    """A server that is shut down answers what it has begun, and the next one the rest."""
    first = World(storage_directory=str(tmp_path))
    async with client(first) as api:
        id = await begin(api, [line(f"{number}") for number in range(60)])
        while len(first.engine.requests) < 10:
            await asyncio.sleep(0.001)
        first.service.draining = True
        await first.service.idle.wait()
    second = World(storage_directory=str(tmp_path))
    async with client(second) as api:
        batch = await ended(api, id)
        rows = await rows_of(api, batch.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"{number}" for number in range(60)]
    asked = len(first.engine.requests) + len(second.engine.requests)
    assert asked == 60 and second.engine.requests


async def test_a_batch_waits_for_a_server_of_its_model(tmp_path: Path) -> None:
    first = World(FakeEngine(endless), storage_directory=str(tmp_path))
    async with client(first) as api:
        id = await begin(api, [line("a")])
        await ended(api, id, "in_progress")
    other = World(storage_directory=str(tmp_path), served_model_name=("other",))
    async with client(other) as api:
        await asyncio.sleep(0.1)
        assert (await api.batches.retrieve(id)).status == "in_progress" and not other.engine.requests
    async with client(World(storage_directory=str(tmp_path))) as api:
        assert (await ended(api, id)).request_counts.completed == 1


async def test_two_servers_share_a_store(tmp_path: Path) -> None:
    worlds = [World(storage_directory=str(tmp_path)) for _ in range(2)]
    async with client(worlds[0]) as first, client(worlds[1]) as second:
        ids = [await begin(api, [line(f"{number}") for number in range(10)]) for api in (first, second)]
        for id in ids:
            batch = await ended(second, id)
            assert len(await rows_of(first, batch.output_file_id)) == 10
    assert sum(len(world.engine.requests) for world in worlds) == 20  # no line is answered twice


KILLER = """
import asyncio, os, sys
from tests.pure.worlds import World, FakeEngine, HELLO

async def main(folder):
    def script(request):
        text = bytes(token for token in request.prompt if token < 256)
        if b"killer" in text:
            with open(folder + "/beside", "a") as log:
                log.write(f"{len(world.engine.open) - 1} ")
            os.kill(os.getpid(), 9)
        return HELLO(request)
    world = World(FakeEngine(script), storage_directory=folder)
    keeper = world.app.state.batches
    keeper.resume()
    while (await keeper.store.call(lambda store: store.status("batch_1"))) != "completed":
        await asyncio.sleep(0.002)

asyncio.run(main(sys.argv[1]))
"""


def add_lines(store: Store, names: Iterable[str]) -> None:
    """A batch with the id batch_1."""
    with store.new_content() as content:
        content.write(jsonl([line(name) for name in names]))
        file = store.add_file("", content, "in.jsonl", "batch")
    fields: dict[str, Any] = {"endpoint": URL, "completion_window": "24h", "created_at": 0, "expires_at": 2**40}
    assert store.add_batch("", BatchObject(id="batch_1", input_file_id=file.id, **fields))


def test_a_line_that_kills_the_server_is_an_error_row_at_last(tmp_path: Path) -> None:
    store = Store(tmp_path)
    names = [*"ab", "killer", *"cdefgh"]
    add_lines(store, names)
    statuses = []
    while not statuses or statuses[-1]:
        run = subprocess.run([sys.executable, "-c", KILLER, str(tmp_path)], env=HERE, timeout=600)
        statuses.append(run.returncode)
    assert statuses == [-9] * (LOST + 1) + [0]
    assert (tmp_path / "beside").read_text().split()[-1] == "0", "the last time it was asked alone"
    batch = store.batch("", "batch_1")
    assert batch and (batch.request_counts.completed, batch.request_counts.failed) == (len(names) - 1, 1)
    (error,) = [json.loads(row) for row in store.content(batch.error_file_id or "").read_text().splitlines()]
    assert (error["custom_id"], error["response"]["body"]["error"]["code"]) == ("killer", "request_ends_engines")
    store.close()


KILLED = """
import asyncio, os, sys
from tests.pure.worlds import World, FakeEngine, HELLO

async def main(folder, survives):
    asked = 0
    def script(request):
        global asked
        with open(folder + "/asked", "a") as log:
            log.write("x")
        return HELLO(request)
    world = World(FakeEngine(script), storage_directory=folder)
    keeper = world.app.state.batches
    keeper.resume()
    kept = 0
    while True:
        done = await keeper.store.call(lambda store: store.batch("", "batch_1"))
        if done.status == "completed":
            return
        if done.request_counts.completed >= survives:
            os.kill(os.getpid(), 9)
        await asyncio.sleep(0.002)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_kill_9_loses_nothing_and_does_nothing_twice(tmp_path: Path) -> None:
    """A server that is killed again and again leaves one answer to each line."""
    store, lines = Store(tmp_path), 60
    add_lines(store, [f"{number}" for number in range(lines)])
    statuses = []
    for survives in (1, 30, lines + 1):
        run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(survives)], env=HERE, timeout=600)
        statuses.append(run.returncode)
    assert statuses == [-9, -9, 0]
    batch = store.batch("", "batch_1")
    assert batch and batch.request_counts.completed == lines and batch.output_file_id
    rows = [json.loads(row) for row in store.content(batch.output_file_id).read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [f"{number}" for number in range(lines)]
    # What ran when the server was killed is asked again: at most as many lines as run at a time.
    asked = (tmp_path / "asked").stat().st_size
    assert lines <= asked <= lines + 2 * 4
    store.close()


# Expiry


async def test_files_and_results_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    async with client(World(storage_directory=str(tmp_path))) as api:
        soon: Any = {"anchor": "created_at", "seconds": 3600}
        short = await api.files.create(file=("f", jsonl([line("a")])), purpose="batch", expires_after=soon)
        usual = await api.files.create(file=("g", jsonl([line("b")])), purpose="batch")
        assert short.expires_at == short.created_at + 3600
        assert usual.expires_at == usual.created_at + 30 * 24 * 3600
        made = await api.batches.create(
            input_file_id=short.id, endpoint=URL, completion_window="24h", output_expires_after=soon
        )
        batch = await ended(api, made.id)
        output = await api.files.retrieve(batch.output_file_id)
        assert output.expires_at == output.created_at + 3600
        store = Store(tmp_path)
        assert not store.answered(batch.id)  # the output file has the answers
        monkeypatch.setattr(time, "time", lambda: now + 3700)
        with pytest.raises(openai.NotFoundError):
            await api.files.content(short.id)
        assert [file.id async for file in api.files.list()] == [usual.id]
        await api.files.create(file=("h", b"x"), purpose="batch")  # which makes room first
        names = {path.name for path in (tmp_path / "contents").iterdir()}
        assert short.id not in names and output.id not in names and usual.id in names
        assert (await api.batches.retrieve(batch.id)).request_counts.completed == 1
        monkeypatch.setattr(time, "time", lambda: now + 31 * 24 * 3600)
        assert store.remove_expired(time.time(), 30 * 24 * 3600.0) == 0
        with pytest.raises(openai.NotFoundError):
            await api.batches.retrieve(batch.id)
        store.close()


async def test_what_an_unfinished_batch_reads_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.new_content() as content:
        content.write(jsonl([line("a")]))
        file = store.add_file("", content, "f", "batch", lifetime_s=1)
    after = file.created_at + 2.0
    fields: dict[str, Any] = {"endpoint": URL, "completion_window": "1h", "created_at": 0, "expires_at": 2**40}
    store.add_batch("", BatchObject(id="batch_1", input_file_id=file.id, **fields))
    assert store.remove_expired(after, 1.0) == file.bytes and store.batch("", "batch_1")
    store.change_batch("batch_1", lambda row: setattr(row, "status", "failed"))
    assert store.remove_expired(after, 0.0) == 0 and store.batch("", "batch_1")
    assert store.remove_expired(after, 1.0) == 0 and store.batch("", "batch_1") is None
    store.close()


async def test_files_are_kept_for_ever_if_the_operator_says_so(tmp_path: Path) -> None:
    async with client(World(storage_directory=str(tmp_path), storage_days=0)) as api:
        assert (await api.files.create(file=("f", b"x"), purpose="batch")).expires_at is None


@pytest.mark.parametrize("given", [{"seconds": 10}, {"seconds": 10**8}, {"anchor": "now"}, {"seconds": "x"}], ids=str)
async def test_expiries_that_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    async with client(World(storage_directory=str(tmp_path))) as api:
        expiry: Any = {"anchor": "created_at", "seconds": 3600, **given}
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            await api.files.create(file=("f", b"x"), purpose="batch", expires_after=expiry)
        file = await api.files.create(file=("f", b"x"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="output_expires_after"):
            await api.batches.create(
                input_file_id=file.id, endpoint=URL, completion_window="24h", output_expires_after=expiry
            )


@pytest.mark.parametrize("size", [0, 1, 17, 50, 51, 52, 53, 200])
def test_a_boundary_is_found_wherever_a_window_ends(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 16 bytes, and contents that hold most of a boundary."""
    monkeypatch.setattr(uploads, "WINDOW", 16)
    content = (b"\r\n--abc" * 30)[:size]
    head = b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    path = tmp_path / "body"
    path.write_bytes(b"--abcdef\r\n" + head + content + b"\r\n--abcdef--\r\n")
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        form = uploads.read_form(file, b"--abcdef")
    assert path.read_bytes()[form.start : form.end] == content


def test_a_file_of_blank_lines_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINES", 10)
    path = tmp_path / "lines"
    path.write_bytes(jsonl([line("a")]) + b"\n" * 11 + jsonl([line("b")]))
    total, _, errors = lines.check_lines(path, URL, lines.LineLimits(1000, 1000))
    assert total == 1 and [error.code for error in errors] == ["too_many_lines"]
    path.write_bytes(jsonl([line("a")]) + b"\n" * 10 + jsonl([line("b")]))
    assert lines.check_lines(path, URL, lines.LineLimits(1000, 1000)) == (2, "tiny", [])
