"""Connections that are bounded: clients that send too much, too slowly, or never end, over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.log_events import logged
from tests.pure.servers import PATIENCE_S, weft_server
from tests.pure.worlds import FakeEngine, World, endless
from weft.http import admission
from weft.http.admission import ConnectionAdmission, ConnectionLimits
from weft.http.connection import Connection
from weft.http.flow import CycleWriter

GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


def post(body: bytes, *lines: str, path: str = "/v1/completions", version: str = "1.1", length: int = -1) -> bytes:
    """A request with a body, of which `length` bytes are promised if that is told."""
    promised = len(body) if length < 0 else length
    head = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {promised}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


def asking(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "ab", **fields}).encode()


def refusal(said: bytes, status: int, code: str) -> str:
    """The message of an error that is the last of its connection."""
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), said
    lines = head.lower().split(b"\r\n")
    assert b"connection: close" in lines and b"content-type: application/json" in lines
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code
    return str(error["message"])


# Streams


@pytest.mark.parametrize(
    ("state", "written", "taken"), [({}, 1, True), ({"ended": True}, 0, True), ({"full": True}, 0, False)]
)
def test_chunks_that_go_straight_to_the_connection(state: dict[str, bool], written: int, taken: bool) -> None:
    """None follows the end of its response: the client would take it for the beginning of the next one."""
    chunks: list[bytes] = []
    cycle = SimpleNamespace(
        disconnected=False,
        response_complete=state.get("ended", False),
        flow=SimpleNamespace(write_paused=state.get("full", False)),
        transport=SimpleNamespace(write=chunks.append),
    )
    assert CycleWriter(cast(Any, cycle)).write_now(b"data: 1\n\n") is taken
    assert chunks == [b"9\r\ndata: 1\n\n\r\n"] * written


@pytest.mark.parametrize("padding", [0, 200_000])
async def test_a_client_that_leaves_after_its_body(padding: int) -> None:
    """While the answer is computed the end of the connection is read, although a large body had paused reading."""
    world = World(FakeEngine(endless))
    async with weft_server(world) as live, asyncio.timeout(PATIENCE_S):
        client = await live.connect()
        await client.send(post(asking() + b" " * padding))
        while not world.engine.open:
            await asyncio.sleep(0.01)
        client.writer.close()
        while world.engine.open:
            await asyncio.sleep(0.01)
    assert world.engine.aborted


# One connection


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"a" * 5000, 414),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 5000, 431),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 1000, 431),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 30, 431),
        (b"\r\n" * 2500, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 5000 + b"\r\n\r\n", 431),
        (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;x=" + b"a" * 5000, 431),
        (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: " + b"a" * 9000, 431),
    ],
    ids=["url", "value", "fields", "number", "empty lines", "complete", "chunk extension", "trailer"],
)
@pytest.mark.parametrize("step", [10**6, 7])
async def test_a_head_that_is_too_long(sent: bytes, status: int, step: int) -> None:
    async with weft_server(World(), head_bytes=4096, header_fields=20) as live:
        client = await live.connect()
        for at in range(0, len(sent), step):
            await client.send(sent[at : at + step])
        assert "send" in refusal(await client.rest(), status, "header_too_large")


async def test_a_head_within_the_limit_in_any_pieces() -> None:
    async with weft_server(World(), head_bytes=4096, header_fields=20) as live:
        client = await live.connect()
        request = GET[:-2] + b"X: " + b"a" * (4096 - len(GET) - 5) + b"\r\n\r\n"
        for step in (1, 1000, len(request)):
            for at in range(0, len(request), step):
                await client.send(request[at : at + step])
            assert (await client.answer())[0] == 200


@pytest.mark.parametrize("sent", [b"\x16\x03\x01hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"NONSENSE\r\n\r\n"])
async def test_bytes_that_are_not_http_are_refused_as_json(sent: bytes) -> None:
    async with weft_server(World()) as live:
        client = await live.connect()
        await client.send(sent)
        refusal(await client.rest(), 400, "invalid_http")


async def test_an_upgrade_is_ignored_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async with weft_server(World()) as live:
        client = await live.connect()
        await client.send(GET[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + GET)
        assert [(await client.answer())[0] for _ in range(2)] == [200, 200]
    assert not caplog.records


UPGRADES = ("websocket", "h2c", "TLS/1.0", "websocket, h2c")
SMUGGLED = b"GET /v1/models?smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


def upgrading(protocol: str, version: str, body: bytes, framing: str) -> bytes:
    """A request that asks for another protocol, and has a body."""
    lines = ["Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAMAAABk", framing]
    return "\r\n".join([f"POST /v1/completions HTTP/{version}", "Host: x", *lines, "", ""]).encode() + body


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("protocol", UPGRADES)
@pytest.mark.parametrize("step", [0, 1, 7])
@pytest.mark.parametrize("as_chunks", [False, True])
async def test_the_body_of_an_upgrade_is_no_request(protocol: str, step: int, as_chunks: bool) -> None:
    """It is read by its length, in whatever pieces it comes; what follows it is the next request."""
    framing = "Transfer-Encoding: chunked" if as_chunks else f"Content-Length: {len(SMUGGLED)}"
    first = upgrading(protocol, "1.1", chunked(SMUGGLED, 20) if as_chunks else SMUGGLED, framing)
    good = asking(max_tokens=1)
    second = upgrading(protocol, "1.1", good, f"Content-Length: {len(good)}")
    sent = first + second + MODELS
    async with weft_server(World()) as live:
        client = await live.connect()
        for at in range(0, len(sent), step or len(sent)):
            await client.send(sent[at : at + (step or len(sent))])
        answers = [await client.answer() for _ in range(3)]
        assert [status for status, _, _ in answers] == [400, 200, 200]
        assert json.loads(answers[1][2])["object"] == "text_completion"
        client.writer.write_eof()
        assert not await client.rest()


@pytest.mark.parametrize("as_chunks", [False, True])
async def test_the_body_of_an_old_upgrade_is_no_request(as_chunks: bool) -> None:
    """HTTP/1.0 knows no upgrade, and the connection ends with the answer."""
    framing = "Transfer-Encoding: chunked" if as_chunks else f"Content-Length: {len(SMUGGLED)}"
    async with weft_server(World()) as live:
        client = await live.connect()
        body = chunked(SMUGGLED, 20) if as_chunks else SMUGGLED
        await client.send(upgrading("websocket", "1.0", body, framing) + MODELS)
        said = await client.rest()
    assert said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "sent",
    [
        upgrading("h2c", "1.1", SMUGGLED, "Transfer-Encoding: gzip"),
        upgrading("h2c", "1.1", SMUGGLED, f"Transfer-Encoding: chunked\r\nContent-Length: {len(SMUGGLED)}"),
        upgrading("h2c", "1.1", SMUGGLED, f"Content-Length: 1\r\nContent-Length: {len(SMUGGLED)}"),
        upgrading("h2c", "1.1", b"zz\r\n" + SMUGGLED, "Transfer-Encoding: chunked"),
        b"CONNECT example.com:80 HTTP/1.1\r\nHost: x\r\n\r\n" + SMUGGLED,
        b"CONNECT /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n" + SMUGGLED,
        b"CONNECT example.com:80 HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(SMUGGLED, 9),
    ],
)
async def test_what_leaves_the_end_of_a_body_open_ends_the_connection(sent: bytes) -> None:
    async with weft_server(World()) as live:
        client = await live.connect()
        await client.send(sent)
        refusal(await client.rest(), 400, "invalid_http")


class Counted(Connection):
    """Connections that remember how many requests have waited."""

    most = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        Counted.most = max(Counted.most, len(self.pipeline))


async def test_pipelined_requests_are_answered_in_order_and_few_are_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.http.server.Connection", Counted)
    monkeypatch.setattr(Counted, "most", 0)
    world = World()
    async with weft_server(world) as live:
        client = await live.connect()
        one = post(asking(max_tokens=1))
        sent = [*[GET] * 50, *[one, MODELS] * 50, GET]
        await client.send(b"".join(sent))
        answers = [await client.answer() for _ in sent]
    kinds = [json.loads(body).get("object", "health") for _, _, body in answers]
    assert kinds == [*["health"] * 50, *["text_completion", "list"] * 50, "health"]
    assert Counted.most == 8 and len(world.engine.requests) == 50


async def test_a_client_that_pipelines_and_reads_nothing_is_read_no_more() -> None:
    """However much it sends, what has been taken in is bounded; else this would never be stuck."""
    world = World()
    async with weft_server(world) as live:
        client = await live.connect()
        flood = GET * 20_000
        with pytest.raises(TimeoutError):
            for _ in range(200):
                await asyncio.wait_for(client.send(flood), 1)
        (connection,) = live.server.server_state.connections
        assert isinstance(connection, Connection) and len(connection.pipeline) <= 8
        assert connection.queue_full() and connection.flow.read_paused


async def test_a_client_that_pipelines_and_leaves_makes_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    """The request that was being answered learns of it, not only the newest."""
    world = World()
    world.engine.script = endless
    async with weft_server(world) as live:
        client = await live.connect()
        await client.send(post(asking(max_tokens=40, stream=True, ignore_eos=True)) + GET * 5)
        assert await client.reader.readuntil(b"data: ")
        client.writer.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            await world.service.idle.wait()
    assert not caplog.records


async def test_an_error_waits_for_the_answers_before_it() -> None:
    world = World()
    async with weft_server(world) as live:
        client = await live.connect()
        await client.send(post(asking()) + MODELS + b"NONSENSE\r\n\r\n" + GET)
        assert json.loads((await client.answer())[2])["object"] == "text_completion"
        assert json.loads((await client.answer())[2])["object"] == "list"
        refusal(await client.rest(), 400, "invalid_http")


async def test_a_body_that_breaks_behind_another_request() -> None:
    async with weft_server(World()) as live:
        client = await live.connect()
        chunked = b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        await client.send(post(asking()) + chunked + b"nonsense\r\n")
        assert (await client.answer())[0] == 200
        refusal(await client.rest(), 400, "invalid_http")


# Time


async def test_slow_heads_and_silent_clients_are_given_up() -> None:
    async with weft_server(World(), head_s=0.2, keepalive_s=0.3) as live:
        silent, slow, kept = [await live.connect() for _ in range(3)]
        await kept.send(GET)
        assert (await kept.answer())[0] == 200
        await kept.send(b"\r\n")  # which is no request, and does not buy time

        async def drip() -> None:
            with suppress(ConnectionError):
                for byte in GET[:-1]:
                    await slow.send(bytes([byte]))
                    await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert await silent.rest() == b""
        assert " 0.2 s" in refusal(await slow.rest(), 408, "request_timeout")
        assert await kept.rest() == b""
        await dripping


async def test_a_body_without_a_byte_is_given_up_and_a_slow_one_is_not() -> None:
    async with weft_server(World(), head_s=0.1, body_s=0.5) as live:
        stuck, slow = [await live.connect() for _ in range(2)]
        whole = post(asking(max_tokens=1))
        await stuck.send(whole[:-1])
        head, body = whole[:-50], whole[-50:]
        await slow.send(head)
        for byte in body:
            await slow.send(bytes([byte]))
            await asyncio.sleep(0.02)
        assert (await slow.answer())[0] == 200
        assert " 0.5 s" in refusal(await stuck.rest(), 408, "request_timeout")


async def test_a_long_answer_is_no_silence_of_the_client() -> None:
    async with weft_server(World(FakeEngine(endless), keepalive_interval=0.1), head_s=0.1, body_s=0.1) as live:
        client = await live.connect()
        await client.send(post(asking(stream=True)))
        for _ in range(4):
            await client.reader.readuntil(b": keepalive")


# Answers


async def test_a_stream_without_chunks_for_http_1_0() -> None:
    async with weft_server(World()) as live:
        client = await live.connect()
        await client.send(post(asking(stream=True), version="1.0"))
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
        assert body.startswith(b"data: {") and body.endswith(b"}\n\ndata: [DONE]\n\n")
        assert all(line.startswith(b"data: ") for line in body.split(b"\n") if line)
        whole = await live.connect()
        await whole.send(post(asking(), version="1.0"))
        assert b"text_completion" in await whole.rest()


async def test_a_json_answer_has_no_body_for_head() -> None:
    async with weft_server(World()) as live:
        client = await live.connect()
        await client.send(MODELS.replace(b"GET", b"HEAD") + MODELS)
        head = await client.reader.readuntil(b"\r\n\r\n")
        status, fields, body = await client.answer()
        assert status == 200 and json.loads(body)["object"] == "list"
        assert f"content-length: {len(body)}\r\n".encode() in head and fields["content-length"] == str(len(body))


async def test_a_client_that_still_writes_its_body_gets_the_refusal() -> None:
    size = 30 * 2**20  # more than the sockets hold, so that an early end would reset it
    async with weft_server(World(max_body_bytes=1000)) as live:
        for lines in ([], ["Transfer-Encoding: chunked"]):
            client = await live.connect()
            if lines:
                await client.send(b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
                await client.send(b"%x\r\n" % size + b" " * size)
            else:
                await client.send(post(b" " * size))
            assert "1000 bytes" in refusal(await client.rest(), 413, "body_too_large")


async def test_a_client_that_writes_for_ever_is_cut_off() -> None:
    async with weft_server(World(max_body_bytes=1000), linger_s=0.2) as live:
        client = await live.connect()
        with pytest.raises(ConnectionError):
            await client.send(post(b"", length=10**12))
            while True:
                await client.send(b" " * 2**16)
                await asyncio.sleep(0.01)


async def test_a_body_of_many_small_chunks_is_refused_and_one_of_large_chunks_is_not() -> None:
    begin = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = json.dumps({"prompt": "a" * 1000}).encode()
    async with weft_server(World(), chunks=20, chunk_bytes=16) as live:
        for size, status in ((1, 400), (32, 200)):
            client = await live.connect()
            pieces = [body[at : at + size] for at in range(0, len(body), size)]
            await client.send(begin + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces))
            await client.send(b"0\r\n\r\n")
            if status == 200:
                assert (await client.answer())[0] == 200
            else:
                assert "20 chunks" in refusal(await client.rest(), status, "too_many_chunks")


# All connections together


async def test_over_the_limit_only_probes_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with weft_server(World(), connections=2, spare=2) as live:
        held = [await live.connect() for _ in range(2)]
        for client in held:
            await client.send(GET)
            assert (await client.answer())[0] == 200
        waiting = [await live.connect() for _ in range(3)]
        assert await waiting[0].rest() == b""  # the oldest of them gives way
        for probe in ("/health/live", "/health/ready", "/health"):
            client = await live.connect()
            await client.send(f"GET {probe} HTTP/1.1\r\n\r\n".encode())
            assert (await client.rest()).startswith(b"HTTP/1.1 200 OK")
        other = await live.connect()
        await other.send(MODELS)
        refusal(await other.rest(), 503, "too_many_connections")
        await held[0].send(MODELS)
        assert (await held[0].answer())[0] == 200
        held[0].writer.close()
        status = 503
        async with asyncio.timeout(PATIENCE_S):
            while status == 503:  # until the server has seen that there is room
                again = await live.connect()
                await again.send(MODELS)
                status, _, _ = await again.answer()
        assert status == 200
    (event,) = logged(caplog, "too-many-connections")
    assert event["limit"] == 2 and event["refused"] >= 1


async def test_unfinished_bodies_are_bounded_together() -> None:
    world = World()
    async with weft_server(world, held_bytes=100_000) as live:
        half = post(b" " * 30_000, length=40_000)
        stuck = [await live.connect() for _ in range(4)]
        for client in stuck:
            await client.send(half)
        honest = await live.connect()
        await honest.send(post(asking(max_tokens=1, stop=["x" * 20_000])))
        assert (await honest.answer())[0] in (200, 400)
        assert "oldest" in refusal(await stuck[0].rest(), 503, "too_many_unfinished")
        await stuck[1].send(b" " * 10_000)
        assert (await stuck[1].answer())[0] == 400  # whole, and no JSON


async def test_memory_of_bodies_that_never_came_whole_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    released = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr("weft.engine.replicas.memory.QUIET_S", 0)
    monkeypatch.setattr("weft.engine.replicas.memory.release", lambda: loop.call_soon_threadsafe(released.set))
    world = World()
    async with weft_server(world) as live:
        client = await live.connect()
        await client.send(post(b" " * 100_000, length=200_000))
        await asyncio.sleep(0.1)
        assert not released.is_set()
        client.writer.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            await released.wait()


def test_bytes_that_are_held_are_given_back() -> None:
    class Holder:
        refused = unsent_bytes = 0

        def drop(self) -> None: ...

        def refuse(self, error: Exception) -> None:
            self.refused += 1

    pool = ConnectionAdmission(ConnectionLimits(held_bytes=100))
    holders = [Holder() for _ in range(50)]
    for holder in holders:
        pool.hold(holder, 2)
    pool.hold(holders[-1], 100)
    assert [holder.refused for holder in holders] == [1] * 49 + [0]
    pool.leave(holders[-1])
    pool.hold(holders[0], 100)
    assert holders[0].refused == 1


def test_a_client_that_takes_a_long_answer_slowly_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader:
        unsent_bytes = 1000

        def drop(self) -> None: ...

        def refuse(self, error: Exception) -> None: ...

    now = [0.0]
    monkeypatch.setattr(admission.time, "monotonic", lambda: now[0])
    pool = ConnectionAdmission(ConnectionLimits())
    slow, stalled = Reader(), Reader()
    for reader in (slow, stalled):
        pool.note_unread(reader, True)
    for now[0], slow.unsent_bytes in ((10.0, 900), (20.0, 800)):
        assert pool.unread_s() == [now[0], 0.0]
    now[0] = 25.0
    assert pool.unread_s() == [25.0, 5.0]
    pool.note_unread(stalled, False)
    assert pool.unread_s() == [5.0]


def test_connections_follow_from_the_files_that_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "open_files", lambda: 20)
    limits = ConnectionLimits(connections=1000, spare=16)
    assert admission.fit_to_files(limits, 65536) == limits
    assert admission.fit_to_files(limits, 128).connections == 128 - 20 - 16 - admission.RESERVED_FILES
    assert admission.fit_to_files(limits, 10).connections == 1


@pytest.mark.parametrize(
    ("soft", "hard", "now"),
    [(1024, 4096, 4096), (1024, 10**9, 65536), (70_000, 10**9, 70_000), (1024, resource.RLIM_INFINITY, 65536)],
)
def test_the_file_limit_is_raised(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, now: int) -> None:
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: changed.append(pair))
    assert admission.raise_file_limit() == now
    assert changed == ([(now, hard)] if now != soft else [])


def test_descriptors_are_counted() -> None:
    before = admission.open_files()
    with open(__file__):
        assert admission.open_files() == before + 1


# The end


async def test_half_a_body_at_the_end_is_told_so_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    async with weft_server(world) as live:
        client = await live.connect()
        await client.send(post(asking())[:-3])
        await asyncio.sleep(0.05)
        world.service.draining = True
        live.server.leave()
        refusal(await client.rest(), 503, "shutting_down")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text


async def test_a_request_that_outlasts_the_end_is_cancelled_without_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(FakeEngine(endless))
    async with weft_server(world) as live:
        live.server.config.timeout_graceful_shutdown = 0
        client = await live.connect()
        await client.send(post(asking()))
        while not world.engine.open:
            await asyncio.sleep(0.01)
        live.server.leave()
        refusal(await client.rest(), 503, "shutting_down")
    assert "Traceback" not in caplog.text
