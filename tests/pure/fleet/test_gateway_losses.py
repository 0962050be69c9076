"""Upstreams that die with a request: one other gets it, and what ends two in a row is refused for a while."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tests.log_events import logged
from tests.pure.fleet.test_gateway_continues import replicas, weft
from tests.pure.gateways import LiveGateway, Upstream, answer_json, answer_status, gateway, hang_up, never, upstream
from tests.pure.servers import PATIENCE_S, Exchange
from tests.pure.worlds import refused
from weft.engine.replicas.suspects import LOST, REFUSED_S
from weft.fleet.gateway import choice
from weft.fleet.upstreams.breaker import RetryBudget
from weft.fleet.upstreams.checks import check_health
from weft.fleet.upstreams.config import Timeouts

KILLER = {"messages": [{"role": "user", "content": "killer"}]}
RESTARTS = b'{"error": {"message": "the engine has started again", "code": "engine_restarts"}}'
restarts = answer_status("503 X", "Retry-After: 5", body=RESTARTS)
coded = answer_status("503 X", "Retry-After: 5", "X-Weft-Code: engine_restarts", body=b'{"error": "again"}')


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting requests look often."""
    monkeypatch.setattr(choice, "POLL_S", 0.002)


@asynccontextmanager
async def fleet(
    count: int, answer: Callable[[Exchange], Awaitable[None]] = answer_json, **config: Any
) -> AsyncIterator[LiveGateway]:
    """A gateway in front of so many upstreams, all with the same answer."""
    async with AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(upstream()) for _ in range(count)]
        for stub in stubs:
            stub.answer = answer
        live = await stack.enter_async_context(gateway(*(stub.url for stub in stubs), **config))
        live.stubs = stubs
        yield live


def asked(live: LiveGateway) -> int:
    """Number of requests that came to upstreams."""
    return sum(len(stub.seen) for stub in live.stubs)


def unpaid(live: LiveGateway) -> int:
    """Number of retries that were paid."""
    return RetryBudget.SAVED - live.proxy._dispatcher._budget._saved // RetryBudget.PRICE


@pytest.mark.parametrize("dies", [hang_up, restarts, coded], ids=["closed", "code in the body", "code in the head"])
async def test_a_request_that_kills_loses_two_upstreams_and_is_refused_then(
    dies: Callable[[Exchange], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(6, dies) as live:
        first = await live.chat()
        assert first.status_code == (502 if dies is hang_up else 503)
        assert asked(live) == LOST and unpaid(live) == 1
        refusal = await live.chat()
        digest = refused(refusal, 422, code="request_ends_engines").rpartition(" ")[2]
        assert asked(live) == LOST and digest in caplog.text and "hello" not in caplog.text
        assert logged(caplog, "request-ends-engines")
        for stub in live.stubs:
            stub.answer = answer_json
        assert (await live.chat(seed=1)).status_code == 200  # another request
        now = live.proxy.fleet.clock()
        live.proxy.fleet.clock = lambda: now + 2 * REFUSED_S
        assert (await live.chat()).status_code == 200
        live.assert_idle()


async def test_an_upstream_that_answers_nobody_makes_no_request_a_suspect() -> None:
    async with fleet(1, hang_up) as live:
        replica = live.replica(live.stubs[0])
        for _ in range(5):
            assert (await live.chat()).status_code == 502
            replica.breaker.failures = 0
        live.stubs[0].answer = answer_json
        await check_health(replica, live.proxy.fleet, live.proxy.timeouts)  # it lives, and restarts quickly
        live.stubs[0].answer = hang_up
        assert [(await live.chat()).status_code for _ in range(2)] == [502, 422]
        live.assert_idle()


async def test_copies_of_a_request_that_kills_are_asked_one_by_one() -> None:
    """Two are there before anybody knows, and one more dies to tell."""
    async with fleet(8, hang_up) as live:
        answers = await asyncio.gather(*(live.chat() for _ in range(2)))
        assert asked(live) == LOST + 1
        assert sorted(answer.status_code for answer in answers) == [422, 502]
        live.assert_idle()


async def test_a_restart_in_the_shape_of_any_api_is_told_from_a_full_server() -> None:
    async with fleet(4, answer_status("503 X", "Retry-After: 5")) as live:
        assert (await live.chat()).status_code == 503
        assert asked(live) == 4 and not unpaid(live)


async def test_an_answer_forgives() -> None:
    async with fleet(3) as live:
        for _ in range(3):
            live.stubs[0].answer = live.stubs[1].answer = live.stubs[2].answer = _once(live, hang_up)
            assert (await live.chat()).status_code == 200
        assert asked(live) == 6
        live.assert_idle()


def _once(live: LiveGateway, answer: Callable[[Exchange], Awaitable[None]]) -> Callable[[Exchange], Awaitable[None]]:
    """Answer the first request so, and later ones well."""
    left = [answer]

    async def answers(exchange: Exchange) -> None:
        await (left.pop() if left else answer_json)(exchange)

    return answers


class Mortal:
    """An upstream that dies of the killer, with all the requests that it has. The others wait until it may answer."""

    def __init__(self, stub: Upstream) -> None:
        self.dead, self.may_answer = asyncio.Event(), asyncio.Event()
        stub.answer = self

    async def __call__(self, exchange: Exchange) -> None:
        assert exchange.json is not None
        if exchange.json["messages"] == KILLER["messages"]:
            self.dead.set()
        ends = [asyncio.create_task(event.wait()) for event in (self.dead, self.may_answer)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await (hang_up if self.dead.is_set() else answer_json)(exchange)


async def test_of_all_requests_in_flight_only_the_killer_is_refused() -> None:
    async with fleet(4) as live:
        mortals = [Mortal(stub) for stub in live.stubs]
        innocent = [asyncio.create_task(live.chat(seed=number)) for number in range(12)]
        async with asyncio.timeout(PATIENCE_S):
            while asked(live) < 12:
                await asyncio.sleep(0.002)
            killer = asyncio.create_task(live.chat(**KILLER))
            while sum(mortal.dead.is_set() for mortal in mortals) < LOST:
                for mortal in mortals:
                    if not mortal.dead.is_set() and any(other.dead.is_set() for other in mortals):
                        mortal.may_answer.set()
                await asyncio.sleep(0.002)
            for mortal in mortals:
                mortal.may_answer.set()
            answers = await asyncio.gather(*innocent)
        assert [answer.status_code for answer in answers] == [200] * 12
        assert (await killer).status_code == 502
        assert sum(mortal.dead.is_set() for mortal in mortals) == LOST
        refused(await live.chat(**KILLER), 422, code="request_ends_engines")
        assert unpaid(live) <= LOST  # once for each death, however many requests it took
        live.assert_idle()


async def test_a_stall_counts_as_a_loss_but_refuses_nothing() -> None:
    async with fleet(4, never, timeouts={"first_byte": 0.05, "wait": 0}) as live:
        for _ in range(2):
            refused(await live.chat(), 504, code="upstream_stalled")
        assert asked(live) == 2 * LOST
        live.assert_idle()


async def test_streams_without_a_token_lose_no_more() -> None:
    async with replicas(*[weft(1, 1, 1) for _ in range(4)]) as live:
        body = {"model": "tiny", "stream": True, "messages": KILLER["messages"]}
        text = (await live.client.post("/v1/chat/completions", json=body)).text
        assert "closed_in_response" in text
        assert sum(1 for stub in live.stubs for seen in stub.seen if seen.json) == LOST
        refused(await live.client.post("/v1/chat/completions", json=body), 422, code="request_ends_engines")
        live.assert_idle()


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/files", "/api/pull"])
async def test_what_makes_files_or_batches_is_sent_once(path: str) -> None:
    async with fleet(3) as live:
        assert (await live.chat()).status_code == 200  # leaves a kept connection
        for stub in live.stubs:
            stub.answer = hang_up
        assert (await live.client.post(path, json={"a": 1})).status_code == 502
        assert asked(live) == 2
        for stub in live.stubs:
            stub.answer = answer_status("500 X")
        assert (await live.client.post(path, json={"a": 1})).status_code == 500
        assert asked(live) == 3
        live.assert_idle()


async def test_a_kept_connection_that_closes_with_a_request_is_replaced_once() -> None:
    async with fleet(3) as live:
        for _ in range(3):
            assert (await live.chat()).status_code == 200
        for stub in live.stubs:
            stub.answer = hang_up
        before = asked(live)
        assert (await live.chat()).status_code == 502
        assert asked(live) - before == LOST


async def test_many_dead_upstreams_cost_a_request_few_tries() -> None:
    servers = [await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) for _ in range(30)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    for server in servers:
        server.close()
        await server.wait_closed()
    async with gateway(*urls) as live:
        message = refused(await live.chat(), 502, code="cannot_connect")
        assert "127.0.0.1" not in message and "Errno" not in message
        failures = [replica.breaker.failures for replica in live.proxy.fleet.replicas.values()]
        assert sum(failures) == choice.TRIES and max(failures) == 1


def test_one_deadline_for_all_tries() -> None:
    patience = choice.Patience(100.0, Timeouts(first_byte=10.0))
    assert [patience.first_byte_s(now) for now in (100, 108, 115, 119.5)] == [10, 10, 5, 1]
    assert choice.Patience(100.0, Timeouts(first_byte=0)).first_byte_s(500) == 0


async def test_requests_wait_for_an_upstream_that_comes_back() -> None:
    async with fleet(1, timeouts={"wait": PATIENCE_S}) as live:
        replica = live.replica(live.stubs[0])
        for _ in range(3):
            replica.breaker.fail(live.proxy.fleet.clock(), "x", probe=False)
        asking = asyncio.create_task(live.chat())
        while not live.proxy.running:
            await asyncio.sleep(0.002)
        assert not asking.done() and not asked(live)
        replica.breaker.succeed(live.proxy.fleet.clock(), probe=replica.breaker.begin())
        assert (await asking).status_code == 200
        live.assert_idle()


async def test_a_request_that_waits_ends_with_its_client() -> None:
    async with fleet(1, timeouts={"wait": PATIENCE_S}) as live:
        live.replica(live.stubs[0]).breaker._open_until = 1e12
        client = await live.connect()
        body = json.dumps(KILLER).encode()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(PATIENCE_S):
            while not live.proxy.running:
                await asyncio.sleep(0.002)
            client.writer.transport.abort()
            while live.proxy.running:
                await asyncio.sleep(0.002)
        live.assert_idle()


async def test_without_an_upstream_that_could_come_back_nobody_waits() -> None:
    async with fleet(1, timeouts={"wait": 1e5}) as live:
        live.replica(live.stubs[0]).draining = True
        refused(await live.chat(), 503, code="no_upstream")
        live.replica(live.stubs[0]).draining = False
        live.stubs[0].answer = answer_status("429 X")
        assert (await live.chat()).status_code == 429
        live.stubs[0].answer = hang_up
        refused(await live.chat(), 502, code="closed_before_response")


async def test_no_address_of_an_upstream_reaches_clients() -> None:
    async def half(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event({"a": 1})
        exchange.hang_up()

    async with fleet(2, half) as live:
        text = (await live.client.post("/v1/chat/completions", json={"model": "m", "stream": True})).text
        assert "closed_in_response" in text
        texts = [text]
        for answer in (hang_up, answer_status("429 X")):
            live.stubs[0].answer = live.stubs[1].answer = answer
            texts.append((await live.chat(seed=len(texts))).text)
        assert not any("127.0.0.1" in text or "http:" in text for text in texts)
