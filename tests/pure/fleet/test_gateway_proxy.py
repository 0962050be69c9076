"""The gateway's proxy: what passes, what is tried again, what ends visibly."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from tests.pure.gateways import (
    CHAT,
    answer_events,
    answer_json,
    answer_status,
    gateway,
    hang_up,
    never,
    upstream,
)
from tests.pure.servers import PATIENCE_S, Exchange
from tests.pure.worlds import refused
from weft.fleet.upstreams import replica
from weft.fleet.upstreams.config import UpstreamConfig
from weft.fleet.upstreams.upstream import HEAD_BYTES, HIGH_WATER

TRACE = f"00-{'ab' * 16}-{'cd' * 8}-01"


async def until(condition: Callable[[], object]) -> None:
    """Wait until `condition` is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def post(body: bytes = json.dumps(CHAT).encode()) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


# Passing on


async def test_request_and_response_pass_unchanged() -> None:
    async with upstream() as one, gateway(f"{one.url}/base/v1") as live:
        headers = {"X-Custom": "yes", "Authorization": "Bearer theirs", "Connection": "x-drop", "X-Drop": "1"}
        headers |= {"traceparent": TRACE, "tracestate": "a=1"}
        answer = await live.client.post("/v1/chat/completions?a=b%20c", json=CHAT, headers=headers)
        assert answer.status_code == 200 and answer.json() == {"ok": True}
        (seen,) = one.seen
        assert seen.path == "/base/v1/chat/completions?a=b%20c" and seen.json == CHAT
        assert seen.headers["x-custom"] == "yes" and seen.headers["authorization"] == "Bearer theirs"
        assert seen.headers["traceparent"] == TRACE and seen.headers["tracestate"] == "a=1"
        assert seen.headers["x-forwarded-for"] == "127.0.0.1" and "x-drop" not in seen.headers
        assert seen.headers["host"] == one.url.removeprefix("http://")
        live.assert_idle()


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
@pytest.mark.parametrize("framing", ["Content-Length: {}", "Transfer-Encoding: chunked"])
async def test_the_body_of_an_upgrade_is_no_request(protocol: str, framing: str) -> None:
    """It reaches the upstream as a body, without the wish for another protocol."""
    inner = b'{"model": "m", "x": "\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n"}'.replace(b"\r\n", rb"\r\n")
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner) if "chunked" in framing else inner
    lines = ["Connection: Upgrade", f"Upgrade: {protocol}", framing.format(len(inner)), "", ""]
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: x", *lines]).encode()
    async with upstream() as one, gateway(one.url) as live:
        client = await live.connect()
        await client.send((head + body) * 2)
        assert [(await client.answer())[0] for _ in range(2)] == [200, 200]
        client.writer.write_eof()
        assert not await client.rest()
        assert [seen.json["model"] for seen in one.seen] == ["m", "m"]
        assert "upgrade" not in one.seen[0].headers
        live.assert_idle()


async def test_events_pass_as_they_come() -> None:
    go_on = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event({"number": 0})
        await go_on.wait()
        exchange.event(b"[DONE]")
        exchange.end()

    async with upstream() as one, gateway(one.url) as live:
        one.answer = answer
        async with live.client.stream("POST", "/v1/chat/completions", json=CHAT) as streamed:
            lines = streamed.aiter_lines()
            assert await anext(lines) == 'data: {"number": 0}'  # before the stream has ended
            assert live.replica(one).connections == 1
            go_on.set()
            assert [line async for line in lines if line] == ["data: [DONE]"]
        live.assert_idle()


async def test_connections_to_an_upstream_are_kept_and_replaced() -> None:
    async with upstream() as one, gateway(one.url) as live:
        peers = set()
        for number in range(4):
            assert (await live.chat()).status_code == 200
            writer = one.seen[-1].writer
            peers.add(writer.get_extra_info("peername"))
            if number == 1:
                writer.close()  # the upstream closes an idle connection
                await writer.wait_closed()
        assert len(peers) == 2 and not live.replica(one).breaker.failures


async def test_methods_without_a_body() -> None:
    async with upstream() as one, gateway(one.url) as live:
        assert (await live.client.get("/version")).json() == {"ok": True}
        head = await live.client.head("/version")
        assert head.status_code == 200 and not head.content
        assert (await live.client.get("/version")).json() == {"ok": True}
        live.assert_idle()


async def test_load_is_spread_by_connections() -> None:
    async with upstream() as one, upstream() as two, gateway(one.url, two.url) as live:
        for stub in (one, two):
            stub.answer = never
        asking = [asyncio.create_task(live.chat()) for _ in range(6)]
        await until(lambda: len(one.seen) + len(two.seen) == 6)
        assert len(one.seen) == len(two.seen) == 3
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: not live.proxy.running)
        live.assert_idle()


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "GET", "HEAD", "LINK", "SOURCE", "PROPFIND"])
async def test_other_methods_of_counted_paths_are_refused_before_they_are_sent(method: str) -> None:
    async with upstream() as one, gateway(one.url) as live:
        answer = await live.client.request(method, "/v1/chat/completions")
        assert answer.status_code == 405 and answer.headers["allow"] == "POST, OPTIONS"
        assert (await live.client.options("/v1/chat/completions")).status_code == 200
        assert len(one.seen) == 1
        live.assert_idle()


async def test_methods_that_nobody_routes_are_refused_everywhere() -> None:
    async with upstream() as one, gateway(one.url) as live:
        for path in ("/tokenize", "/v1/files", "/anything"):
            refused(await live.client.request("PROPFIND", path), 405, code="method_not_allowed")
            assert (await live.client.get(path)).status_code == 200
        assert len(one.seen) == 3


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_where_none_belongs_is_refused(method: str, chunked: bool) -> None:
    """No key's models would be compared with it."""
    body = b'{"model": "other"}'

    async def pieces() -> AsyncIterator[bytes]:
        yield body

    async with upstream() as one, gateway(one.url) as live:
        answer = await live.client.request(method, "/tokenize", content=pieces() if chunked else body)
        assert answer.status_code == 400 and not one.seen
        live.assert_idle()


# Trying again


@pytest.mark.parametrize("status", ["500 X", "502 X", "503 X", "429 X", "503 X\r\nRetry-After: 1"])
async def test_a_status_that_another_replica_may_spare_the_client(status: str) -> None:
    async with upstream() as bad, upstream() as good, gateway(bad.url, good.url) as live:
        bad.answer = answer_status(status)
        assert (await live.chat()).json() == {"ok": True}
        assert len(bad.seen) == len(good.seen) == 1
        assert live.replica(bad).breaker.failures == int(status in ("500 X", "502 X", "503 X"))
        live.assert_idle()


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_a_status_that_is_the_request_s_fault_passes(status: int) -> None:
    async with upstream() as one, upstream() as two, gateway(one.url, two.url) as live:
        for stub in (one, two):
            stub.answer = answer_status(f"{status} X", body=b'{"why": "you"}')
        for _ in range(8):
            answer = await live.chat()
            assert answer.status_code == status and answer.json() == {"why": "you"}
        assert len(one.seen) + len(two.seen) == 8
        assert live.replica(one).breaker.closed and not live.replica(one).breaker.failures


async def test_the_last_refusal_passes_if_all_are_full() -> None:
    async with upstream() as one, upstream() as two, gateway(one.url, two.url) as live:
        for stub in (one, two):
            stub.answer = answer_status("429 X", "Retry-After: 7")
        answer = await live.chat()
        assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
        assert len(one.seen) == len(two.seen) == 1
        assert live.replica(one).breaker.closed and live.replica(two).breaker.closed


async def test_a_refusal_is_the_answer_if_all_others_are_dead() -> None:
    async with upstream() as full, upstream() as dead, gateway(full.url, dead.url) as live:
        full.answer, dead.answer = answer_status("429 X", "Retry-After: 7"), hang_up
        for _ in range(2):  # either of them may come first
            answer = await live.chat()
            assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
        live.assert_idle()


async def test_a_dead_replica_loses_none_of_its_requests() -> None:
    dying, alive = asyncio.Event(), 0

    async def die(exchange: Exchange) -> None:
        await dying.wait()
        exchange.hang_up()

    async with upstream() as one, upstream() as two, gateway(one.url, two.url) as live:
        one.answer = die
        asking = [asyncio.create_task(live.chat()) for _ in range(60)]
        await until(lambda: len(one.seen) == 30)
        dying.set()
        for task in asking:
            alive += (await task).json() == {"ok": True}
        assert alive == 60 and len(two.seen) == 60
        live.assert_idle()


async def test_a_head_without_a_body_is_not_yet_an_answer() -> None:
    async def begin(exchange: Exchange) -> None:
        exchange.stream()
        exchange.hang_up()

    async with upstream() as one, upstream() as two, gateway(one.url, two.url) as live:
        one.answer = begin
        for _ in range(2):
            assert (await live.chat()).json() == {"ok": True}
        assert one.seen
        live.assert_idle()


async def test_each_replica_is_tried_once() -> None:
    async with upstream() as one, upstream() as two, gateway(one.url, two.url) as live:
        one.answer = two.answer = hang_up
        refused(await live.chat(), 502, code="closed_before_response")
        assert len(one.seen) == len(two.seen) == 1
        live.assert_idle()


async def test_retries_after_5xx_have_a_budget() -> None:
    async with upstream() as one, upstream() as two, gateway(one.url, two.url) as live:
        for stub in (one, two):
            stub.answer = answer_status("500 X")
        for _ in range(60):
            for stub in (one, two):
                live.replica(stub).breaker.succeed(0.0, probe=True)  # the breaker is not what bounds here
            assert (await live.chat()).status_code == 500
        assert 60 + 20 < len(one.seen) + len(two.seen) <= 60 + 20 + 60 * 0.2 + 1


async def test_a_stalled_replica_is_left() -> None:
    timeouts = {"connect": 1, "first_byte": 0.05, "idle": 5}
    async with upstream() as one, upstream() as two, gateway(one.url, two.url, timeouts=timeouts) as live:
        one.answer = never
        for _ in range(2):
            assert (await live.chat()).json() == {"ok": True}
        assert live.replica(one).breaker.failures
        two.answer = never
        refused(await live.chat(), 504, code="upstream_stalled")
        live.assert_idle()


async def test_nobody_there() -> None:
    async with gateway("http://127.0.0.1:9") as live:
        refused(await live.chat(), 502, code="cannot_connect")
        for _ in range(2):
            await live.chat()
        answer = await live.chat()  # the breaker is open
        refused(answer, 503, code="no_upstream")
        assert answer.headers["retry-after"] == "1"
        live.assert_idle()


# After the first byte


async def test_a_stream_that_breaks_between_events_ends_with_an_error_event() -> None:
    async def answer(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event({"number": 0})
        await exchange.writer.drain()
        exchange.hang_up()

    async with upstream() as one, upstream() as two, gateway(one.url, two.url) as live:
        one.answer = two.answer = answer
        text = (await live.chat()).text
        events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
        assert events[0] == {"number": 0} and events[1]["error"]["code"] == "closed_in_response"
        assert len(events) == 2 and "[DONE]" not in text
        assert len(one.seen) + len(two.seen) == 1
        live.assert_idle()


@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\nzz",
    ],
    ids=["within an event", "shorter than promised", "garbage between chunks"],
)
async def test_a_response_that_breaks_elsewhere_resets_the_connection(begun: bytes) -> None:
    async def answer(exchange: Exchange) -> None:
        exchange.writer.write(begun)
        exchange.hang_up()

    async with upstream() as one, gateway(one.url) as live:
        one.answer = answer
        with pytest.raises(httpx.RemoteProtocolError):
            await live.chat()
        live.assert_idle()
        one.answer = answer_json
        assert (await live.chat()).status_code == 200  # nobody else is affected


async def test_the_client_s_leaving_ends_the_upstream_s_work() -> None:
    for begins in (False, True):
        left = asyncio.Event()

        async def answer(exchange: Exchange, begins: bool = begins, left: asyncio.Event = left) -> None:
            if begins:
                exchange.stream()
            while not exchange.writer.transport.is_closing():
                if begins:
                    exchange.event({"number": 0})
                else:
                    exchange.head("100 Continue")
                await asyncio.sleep(0.005)
            left.set()

        async with upstream() as one, gateway(one.url) as live:
            one.answer = answer
            client = await live.connect()
            await client.send(post())
            await until(lambda one=one: one.seen)
            client.writer.transport.abort()
            await asyncio.wait_for(left.wait(), PATIENCE_S)
            await until(lambda live=live: not live.proxy.running)
            live.assert_idle()
            assert live.replica(one).breaker.closed and not live.replica(one).breaker.failures


async def test_a_slow_client_holds_the_upstream_back() -> None:
    piece, sent = b"x" * 65536, 0

    async def answer(exchange: Exchange) -> None:
        nonlocal sent
        exchange.head("200 OK", "Transfer-Encoding: chunked")
        for _ in range(2000):  # 125 MiB
            exchange.chunk(piece)
            await exchange.writer.drain()
            sent += len(piece)
        exchange.end()

    async with upstream() as one, gateway(one.url) as live:
        one.answer = answer
        client = await live.connect()
        await client.send(post())
        before = -1
        while sent != before:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.3)
        assert 0 < sent < 32 * 2**20  # what the sockets' buffers take
        client.writer.transport.abort()
        await until(lambda: not live.proxy.running)
        live.assert_idle()


async def test_a_body_without_a_length_that_stalls_is_not_complete() -> None:
    async def answer(exchange: Exchange) -> None:
        exchange.head("200 OK", "Content-Type: text/plain")
        exchange.writer.write(b"half of ")
        await asyncio.Event().wait()

    timeouts = {"connect": 1, "first_byte": 5, "idle": 0.05}
    async with upstream() as one, gateway(one.url, timeouts=timeouts) as live:
        one.answer = answer
        with pytest.raises(httpx.RemoteProtocolError):
            await live.chat()
        live.assert_idle()


async def test_a_request_that_waited_on_a_kept_connection_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with upstream() as one, gateway(one.url) as live:
        for again_s, sent in ((PATIENCE_S, 2), (-1.0, 1)):
            monkeypatch.setattr(replica, "SEND_AGAIN_S", again_s)
            one.answer = answer_json
            assert (await live.chat()).status_code == 200
            one.answer = hang_up
            before = len(one.seen)
            refused(await live.chat(), 502, code="closed_before_response")
            assert len(one.seen) == before + sent
        live.assert_idle()


async def test_a_removed_upstream_keeps_no_connection() -> None:
    go_on = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go_on.wait()
        await answer_json(exchange)

    async with upstream() as one, gateway(one.url) as live:
        one.answer, known = slow, live.replica(one)
        asking = asyncio.create_task(live.chat())
        await until(lambda: one.seen)
        live.proxy.fleet.remove(known)
        go_on.set()
        assert (await asking).status_code == 200
        assert known.idle_connection() is None


# Upstreams that misbehave


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (b"garbage\r\n\r\n", "response_not_http"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * (HEAD_BYTES + 70000), "response_head_too_large"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 5000 + b"\r\n", "response_head_too_large"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", "response_not_http"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot a size\r\n", "response_not_http"),
        (b"HTTP/1.1 799 X\r\nContent-Length: 2\r\n\r\n{}", "response_not_http"),
        (b"", "closed_before_response"),
    ],
    ids=["garbage", "long head", "many fields", "two lengths", "no chunk", "unknown status", "nothing"],
)
async def test_a_response_that_cannot_be_read(response: bytes, code: str) -> None:
    async def answer(exchange: Exchange) -> None:
        exchange.writer.write(response)
        exchange.hang_up()

    async with upstream() as one, gateway(one.url) as live:
        one.answer = answer
        refused(await live.chat(), 502, code=code)
        live.assert_idle()


@pytest.mark.parametrize("status", [204, 304])
async def test_a_length_of_a_body_that_never_comes_is_left_out(status: int) -> None:
    async def answer(exchange: Exchange) -> None:
        exchange.head(f"{status} X", "ETag: x", "Content-Length: 5")

    async with upstream() as one, gateway(one.url) as live:
        one.answer = answer
        for _ in range(2):
            got = await live.client.get("/version")
            assert got.status_code == status and "content-length" not in got.headers and got.headers["etag"] == "x"
        live.assert_idle()


async def test_more_than_was_promised_is_not_the_next_answer() -> None:
    async def answer(exchange: Exchange) -> None:
        exchange.writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad"
        )

    async with upstream() as one, gateway(one.url) as live:
        one.answer = answer
        for _ in range(3):
            assert (await live.chat()).text == "{}"
        live.assert_idle()


async def test_a_line_of_any_length_and_crlf_pass() -> None:
    long = b"data: " + b"x" * (40 * HIGH_WATER) + b"\r\n\r\ndata: [DONE]\r\n\r\n"

    async def answer(exchange: Exchange) -> None:
        exchange.stream()
        exchange.chunk(long)
        exchange.end()

    async with upstream() as one, gateway(one.url) as live:
        one.answer = answer
        assert (await live.chat()).content == long


async def test_a_gateway_that_leads_to_itself_is_refused() -> None:
    async with upstream() as one, gateway(one.url) as live:
        live.proxy.fleet.remove(live.replica(one))
        live.proxy.fleet.add(UpstreamConfig(url=f"http://127.0.0.1:{live.address[1]}"))
        refused(await live.chat(), 508, code="gateway_loop")
        live.assert_idle()


async def test_a_body_over_the_limit_reaches_no_upstream() -> None:
    async with upstream() as one, gateway(one.url, max_body_bytes=1000) as live:
        assert (await live.chat()).status_code == 200
        refused(await live.chat(user="u" * 1000), 413, code="body_too_large")
        assert len(one.seen) == 1
        live.assert_idle()


async def test_bodies_are_held_until_no_other_replica_can_need_them() -> None:
    go_on = asyncio.Event()

    async def begin(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event({"number": 0})
        await go_on.wait()
        exchange.end()

    async with upstream() as one, gateway(one.url, max_held_bytes=5000) as live:
        one.answer = never
        asking = [asyncio.create_task(live.chat(user="u" * 2000)) for _ in range(2)]
        await until(lambda: len(one.seen) == 2)
        held = live.proxy.bodies.held
        assert 4000 < held <= 5000
        refused(await live.chat(user="u" * 2000), 503, code="overloaded")
        refused(await live.chat(user="u" * 6000), 413, code="body_too_large")
        assert live.proxy.bodies.held == held
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: not live.proxy.running)
        one.answer = begin
        asking = []
        for number in range(4):  # more than fit at once
            asking.append(asyncio.create_task(live.chat(user="u" * 2000)))
            await until(lambda number=number: len(one.seen) == number + 3 and not live.proxy.bodies.held)
        go_on.set()
        assert {(await task).status_code for task in asking} == {200}
        live.assert_idle()


async def test_the_end_waits_for_requests_and_takes_no_new_ones() -> None:
    go_on = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go_on.wait()
        await answer_json(exchange)

    async with upstream() as one, gateway(one.url) as live:
        one.answer = slow
        asking = asyncio.create_task(live.chat())
        await until(lambda: one.seen)
        live.server.on_signal(signal.SIGTERM, 0.0)
        await until(lambda: live.proxy.draining)
        refused(await live.client.get("/health/ready"), 503, code="shutting_down")
        assert (await live.client.get("/health/live")).status_code == 200
        refused(await live.chat(), 503, code="shutting_down")
        go_on.set()
        assert (await asking).json() == {"ok": True}
        await until(lambda: live.server.should_exit)


# Models and aliases


async def test_a_request_goes_where_its_model_is() -> None:
    async with upstream() as one, upstream() as two:
        upstreams = [{"url": one.url, "models": ["a"]}, {"url": two.url, "models": {"b": "their-b"}}]
        async with gateway(upstreams=upstreams) as live:
            for _ in range(2):
                assert (await live.chat(model="a")).status_code == 200
            assert (await live.chat(model="b")).status_code == 200
            assert [seen.json["model"] for seen in one.seen] == ["a", "a"]
            assert [seen.json for seen in two.seen] == [{**CHAT, "model": "their-b"}]
            refused(await live.chat(model="c"), 404, code="model_not_found", param="model")
            rows = (await live.client.get("/v1/models")).json()["data"]
            assert [row["id"] for row in rows] == ["a", "b"]
            assert (await live.client.get("/v1/models/b")).json()["id"] == "b"
            refused(await live.client.get("/v1/models/c"), 404, code="model_not_found")


async def test_a_body_that_names_no_model_is_the_upstream_s_to_judge() -> None:
    async with gateway("http://127.0.0.1:9") as live:
        for body in (b"{}", b' {"model": 3}'):
            answer = await live.client.post("/v1/chat/completions", content=body)
            refused(answer, 502, code="cannot_connect")


HIDDEN = '{"model": "m", "stream": true, "n": 8, "max_tokens": 99}'
PYTHON_S_OWN = [
    b'{"model": "m", "seed": NaN}',
    b'{"model": "m", "temperature": -Infinity}',
    b'{"model": "m", "n": 1e400}',
    b'{"model": "m", "user": "\\ud800"}',
    HIDDEN.encode("utf-8-sig"),
    HIDDEN.encode("utf-16"),
    HIDDEN.encode("utf-16-le"),
    HIDDEN.encode("utf-32"),
]


@pytest.mark.parametrize("body", PYTHON_S_OWN, ids=range(len(PYTHON_S_OWN)))
async def test_a_body_that_only_the_upstream_could_read_is_refused(body: bytes) -> None:
    assert isinstance(json.loads(body), dict)  # as an upstream in Python reads it
    async with upstream() as one, gateway(one.url) as live:
        for path in ("/v1/chat/completions", "/api/chat", "/v1/messages"):
            answer = await live.client.post(path, content=body)
            assert answer.status_code == 400 and "JSON" in answer.text, answer.text
        assert not one.seen
        live.assert_idle()


NO_OBJECTS = [b"", b"[1]", b"{", b"[" * 100000, b'{"a": ' * 5000, b"\xff", b'{"model": "m"} x']


@pytest.mark.parametrize("body", NO_OBJECTS, ids=range(len(NO_OBJECTS)))
async def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    async with gateway("http://127.0.0.1:9") as live:
        refused(await live.client.post("/v1/completions", content=body), 400, code="not_json")
        live.assert_idle()


async def test_bodies_of_files_and_empty_ones_pass_where_they_belong() -> None:
    async with upstream() as one, gateway(one.url) as live:
        assert (await live.client.post("/ping")).status_code == 200
        # The body is read by the upstream of the test only if it is JSON.
        for path in ("/v1/audio/transcriptions", "/v1/files"):
            assert (await live.client.post(path, content=b"[1]")).status_code == 200
        assert len(one.seen) == 3


@pytest.mark.parametrize("name", ["Model", "MODEL", "N", "\u017ftream", "max_to\u212aens", "Keep_Alive"])
async def test_names_that_differ_by_case_only_are_refused(name: str) -> None:
    """Go's JSON takes them for the same, and the last one counts."""
    async with upstream() as one, gateway(one.url) as live:
        refused(await live.chat(**{name: 8}), 400, code="misspelt_field", param=name.casefold())
        assert not one.seen
        live.assert_idle()


async def test_prefixes_go_to_one_replica_each() -> None:
    async with upstream() as one, upstream() as two, gateway(one.url, two.url, policy="prefix") as live:
        for number in range(12):
            system = {"role": "system", "content": f"{number % 3}" * 2000}
            user = {"role": "user", "content": str(number)}
            assert (await live.chat(messages=[system, user])).status_code == 200
        for stub in (one, two):
            assert stub.seen
        homes: dict[str, set[str]] = {}
        for stub in (one, two):
            for seen in stub.seen:
                homes.setdefault(seen.json["messages"][0]["content"], set()).add(stub.url)
        assert len(homes) == 3 and all(len(stubs) == 1 for stubs in homes.values())


async def test_sessions_go_to_one_replica_each() -> None:
    async with upstream() as one, upstream() as two, gateway(one.url, two.url, policy="session") as live:
        for number in range(20):
            assert (await live.chat(user=f"user {number % 10}")).status_code == 200
        users = [{seen.json["user"] for seen in stub.seen} for stub in (one, two)]
        assert users[0] and users[1] and not users[0] & users[1]


async def test_an_event_stream_end_to_end() -> None:
    async with upstream() as one, gateway(one.url) as live:
        one.answer = answer_events
        text = (await live.chat(stream=True)).text
        assert text.endswith("data: [DONE]\n\n") and text.count("data: ") == 4
