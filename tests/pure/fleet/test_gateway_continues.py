"""Answers that a replica begins and another one ends: the client sees those of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.pure.api.test_continued_answers import world
from tests.pure.gateways import CHAT, LiveGateway, answer_status, gateway, hang_up, never, upstream
from tests.pure.servers import Exchange
from weft.engine.replicas.suspects import LOST
from weft.fleet.gateway import dispatch
from weft.fleet.gateway.events import EVENT_BYTES
from weft.fleet.upstreams.checks import check_health, read_models
from weft.fleet.upstreams.config import UpstreamConfig

PATHS = ("/v1/chat/completions", "/v1/completions")
KEYS = {"id", "created"}
BREAKS = 4  # events of an answer with tokens, after which it breaks
PREAMBLE = 5  # events of an answer that may come before its first token


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that broke an answer may go on with it at once, not after a second."""
    monkeypatch.setattr(dispatch, "SECOND_CHANCE_S", 0.02)
    monkeypatch.setattr(dispatch, "POLL_S", 0.005)


def weft(*breaks: int | None, **options: Any) -> Callable[[Exchange], Awaitable[None]]:
    """A replica with the code of `weft serve`. Its n-th stream breaks after so many events, or never if None."""
    served, left = world(**options), list(breaks)

    async def answer(exchange: Exchange) -> None:
        method = "GET" if exchange.json is None else "POST"
        headers = {"authorization": exchange.headers.get("authorization", "")}
        made = await served.client.request(method, exchange.path, json=exchange.json, headers=headers)
        kind = made.headers["content-type"]
        if not kind.startswith("text/event-stream"):
            exchange.head(f"{made.status_code} X", f"Content-Length: {len(made.content)}", f"Content-Type: {kind}")
            exchange.writer.write(made.content)
            return
        most = left.pop(0) if left else None
        events = [event + b"\n\n" for event in made.content.split(b"\n\n") if event]
        exchange.stream()
        for event in events[:most]:
            exchange.chunk(event[:9])  # an event may come in pieces
            exchange.chunk(event[9:])
        if most is None:
            exchange.end()
        else:
            exchange.chunk(b'data: {"ha')
            exchange.hang_up()

    return answer


@asynccontextmanager
async def replicas(*answers: Callable[[Exchange], Awaitable[None]], **config: Any) -> AsyncIterator[LiveGateway]:
    """A gateway in front of these replicas, whose models it knows."""
    async with AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(upstream()) for _ in answers]
        for stub, answer in zip(stubs, answers, strict=True):
            stub.answer = answer
        live = await stack.enter_async_context(gateway(*(stub.url for stub in stubs), **config))
        for stub in stubs:
            assert await read_models(live.replica(stub), live.proxy.timeouts)
        live.stubs = stubs
        yield live


@asynccontextmanager
async def breaking(
    make: Callable[..., Callable[[Exchange], Awaitable[None]]], count: int | None, **options: Any
) -> AsyncIterator[LiveGateway]:
    """Two replicas, of which the first to be asked breaks after `count` events, and so does the other.

    Without a token from either, no third try would come: the other one then is well.
    """
    fruitless = count is not None and count <= PREAMBLE
    async with replicas(make(count, **options), make(None if fruitless else count, **options)) as live:
        other = live.replica(live.stubs[1])
        other.connections += 1  # so that the other one comes first
        yield live
        other.connections -= 1
        live.assert_idle()


def body(path: str, **fields: Any) -> dict[str, Any]:
    given = {"prompt": "ab"} if path == "/v1/completions" else {"messages": CHAT["messages"]}
    return {"model": "tiny", "stream": True, **given, **fields}


def chunks(answer: httpx.Response) -> list[Any]:
    """The events of an answer; ids and times, which must be the same in all of them, left out."""
    assert answer.status_code == 200
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    found = [json.loads(line[6:]) if line != "data: [DONE]" else line for line in lines]
    assert len({(chunk["id"], chunk["created"]) for chunk in found if isinstance(chunk, dict)}) == 1
    for chunk in found:
        if isinstance(chunk, dict):
            del chunk["id"], chunk["created"]
            (chunk["usage"] or {}).pop("prompt_tokens_details", None)
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"logprobs": True, "stream_options": {"include_usage": True}},
        {"return_token_ids": True},
        {"echo": True},
    ],
    ids=str,
)
async def test_the_client_sees_an_undisturbed_answer(path: str, fields: dict[str, Any]) -> None:
    if path == "/v1/completions" and "logprobs" in fields:
        fields = {**fields, "logprobs": 1}
    asked = body(path, **fields)
    async with upstream() as plain, gateway(plain.url) as live:
        plain.answer = weft()
        alone = chunks(await live.client.post(path, json=asked))
        assert alone[-1] == "data: [DONE]" and plain.seen[-1].json == asked
    for count in range(len(alone) + 1):
        async with breaking(weft, count) as live:
            answer = await live.client.post(path, json=asked)
            assert chunks(answer) == alone, count
            asked_of = [seen.json for stub in live.stubs for seen in stub.seen if seen.json]
            assert all(one["return_token_ids"] for one in asked_of)
            assert len({one["seed"] for one in asked_of}) == 1


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def without_call_ids(found: list[Any]) -> list[Any]:
    for chunk in found:
        for choice in chunk["choices"] if isinstance(chunk, dict) else ():
            for call in choice["delta"].get("tool_calls") or ():
                call.pop("id", None)
    return found


@pytest.mark.parametrize("count", [0, 3, 5, 8, None])
async def test_reasoning_and_calls_reach_the_client(count: int | None) -> None:
    options: dict[str, Any] = {"said": f"<think>hm</think>so{CALL}", "reasoning_parser": "qwen3", "max_model_len": 4096}
    asked = body(PATHS[0], tools=[TOOL])
    async with upstream() as plain, gateway(plain.url) as live:
        plain.answer = weft(**options)
        alone = without_call_ids(chunks(await live.client.post(PATHS[0], json=asked)))
    deltas = [chunk["choices"][0]["delta"] for chunk in alone if isinstance(chunk, dict)]
    assert any(delta.get("tool_calls") for delta in deltas) and any(delta.get("reasoning") for delta in deltas)
    async with breaking(weft, count, **options) as live:
        assert without_call_ids(chunks(await live.client.post(PATHS[0], json=asked))) == alone


async def test_a_seed_of_the_client_stays() -> None:
    async with replicas(weft(3), weft()) as live:
        await live.client.post(PATHS[1], json=body(PATHS[1], seed=5))
        assert {seen.json["seed"] for stub in live.stubs for seen in stub.seen if seen.json} == {5}


async def test_a_replica_that_reports_an_error_is_left() -> None:
    async def reports(exchange: Exchange) -> None:
        if exchange.json is None:
            await weft()(exchange)
            return
        exchange.stream()
        if not exchange.json["continue_token_ids"]:
            exchange.event({"id": "1", "created": 1, "choices": [{"index": 0, "text": "h", "token_ids": [104]}]})
        exchange.event({"error": {"message": "shutting down", "type": "overloaded_error"}})
        exchange.hang_up()

    async with replicas(reports, weft()) as live:
        for _ in range(2):
            text = (await live.client.post(PATHS[1], json=body(PATHS[1]))).text
            assert "error" not in text and text.endswith("data: [DONE]\n\n")
            shown = [json.loads(line[6:])["choices"][0]["text"] for line in text.split("\n\n")[:-2]]
            assert "".join(shown) == "hello"
        live.assert_idle()
    async with replicas(reports, reports) as live:
        text = (await live.client.post(PATHS[1], json=body(PATHS[1]))).text
        assert text.count("error") == 2 and "shutting down" in text and "[DONE]" not in text
        tries = sum(len([seen for seen in stub.seen if seen.json]) for stub in live.stubs)
        assert tries == LOST
        live.assert_idle()


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}, {"prompt": [[65], [66]]}], ids=str)
async def test_what_cannot_be_continued_ends_visibly(fields: dict[str, Any]) -> None:
    async with replicas(weft(1), weft(1)) as live:
        with pytest.raises(httpx.RemoteProtocolError):  # within an event
            await live.client.post(PATHS[1], json=body(PATHS[1], **fields))
        assert sum(len([seen for seen in stub.seen if seen.json]) for stub in live.stubs) == 1
        live.assert_idle()


async def test_other_servers_are_asked_for_no_token_ids() -> None:
    async def other(exchange: Exchange) -> None:
        if exchange.json is None:
            exchange.head("200 OK", "Content-Length: 24")
            exchange.writer.write(b'{"data": [{"id": "m"}] }')
        else:
            exchange.stream()
            exchange.event({"choices": [{"text": "a"}]})
            await exchange.writer.drain()
            exchange.hang_up()

    async with replicas(other, other) as live:
        asked = body(PATHS[1], model="m")
        text = (await live.client.post(PATHS[1], json=asked)).text
        assert "error" in text and "[DONE]" not in text
        assert [seen.json for stub in live.stubs for seen in stub.seen if seen.json] == [asked]
        live.assert_idle()


async def test_an_answer_of_another_vendor_is_complete_with_its_end_mark() -> None:
    """Its server goes between the end mark and the end of the response: the client lacks nothing, and sees no error."""

    async def other(exchange: Exchange) -> None:
        if exchange.json is None:
            exchange.head("200 OK", "Content-Length: 23")
            exchange.writer.write(b'{"data": [{"id": "m"}] }')
        else:
            exchange.stream()
            exchange.event({"choices": [{"text": "a"}]})
            exchange.event(b"[DONE]")
            await exchange.writer.drain()
            exchange.hang_up()

    async with replicas(other) as live:
        text = (await live.client.post(PATHS[1], json=body(PATHS[1], model="m"))).text
        assert "error" not in text and text.count("[DONE]") == 1
        live.assert_idle()


async def test_a_replica_that_does_not_continue_ends_the_answer_visibly() -> None:
    """It has keys, and that of the gateway is not the admin's."""
    closed = {"api_key": ("k",), "admin_key": "other"}
    async with replicas(weft(3, **closed), weft(3, **closed)) as live:
        live.client.headers = httpx.Headers({"Authorization": "Bearer k"})
        for stub in live.stubs:
            live.replica(stub).listed = {"tiny": {"id": "tiny", "owned_by": "weft"}}
        text = (await live.client.post(PATHS[0], json=body(PATHS[0]))).text
        assert "closed_in_response" in text and "[DONE]" not in text
        live.assert_idle()


async def test_a_replica_that_refuses_to_continue_is_not_to_blame() -> None:
    async def refuses(exchange: Exchange) -> None:
        await (weft() if exchange.json is None else answer_status("400 X"))(exchange)

    async with replicas(weft(3), refuses) as live:
        broken, healthy = (live.replica(stub) for stub in live.stubs)
        healthy.connections += 1  # so that the other one comes first
        text = (await live.client.post(PATHS[1], json=body(PATHS[1]))).text
        healthy.connections -= 1
        assert live.stubs[1].seen[-1].json["continue_token_ids"]
        assert "closed_in_response" in text and "127.0.0.1" not in text and "[DONE]" not in text
        assert broken.breaker.failures == 1 and not healthy.breaker.failures
        live.assert_idle()


async def test_a_finished_answer_whose_usage_nobody_gives_is_complete() -> None:
    """Other versions of a server may send tokens behind a stop string, with which none goes on."""

    async def refuses(exchange: Exchange) -> None:
        await (weft() if exchange.json is None else answer_status("400 X"))(exchange)

    asked = body(PATHS[1], stream_options={"include_usage": True})
    async with replicas(weft()) as live:
        whole = chunks(await live.client.post(PATHS[1], json=asked))
    async with replicas(weft(len(whole) - 2), refuses) as live:
        healthy = live.replica(live.stubs[1])
        healthy.connections += 1  # so that the other one comes first
        answer = chunks(await live.client.post(PATHS[1], json=asked))
        healthy.connections -= 1
        assert live.stubs[1].seen[-1].json["continue_token_ids"]
        assert answer == [*whole[:-2], "data: [DONE]"] and whole[-2]["usage"]
        live.assert_idle()


async def test_only_administrators_say_what_a_model_has_said(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{name: a, key: one}, {name: b, key: two, admin: true}]")
    async with replicas(weft(), weft(), keys=str(keys)) as live:
        asked = body(PATHS[1], continue_token_ids=[*b"he"])
        for key, status in (("one", 403), ("two", 200)):
            live.client.headers = httpx.Headers({"Authorization": f"Bearer {key}"})
            assert (await live.client.post(PATHS[1], json=asked)).status_code == status


async def test_an_answer_that_began_elsewhere_goes_on_twice() -> None:
    asked = body(PATHS[1], continue_token_ids=[*b"he"], return_token_ids=True)
    async with replicas(weft(1), weft(1)) as live:
        found = chunks(await live.client.post(PATHS[1], json=asked))
        assert [id for chunk in found[:-1] for id in chunk["choices"][0]["token_ids"]][:3] == [*b"llo"]


async def test_streams_leave_a_replica_that_checks_find_stopped() -> None:
    began = asyncio.Event()

    async def stops(exchange: Exchange) -> None:
        if exchange.json is None:
            await weft()(exchange)
            return
        exchange.stream()
        exchange.event({"id": "1", "created": 1, "choices": [{"index": 0, "text": "h", "token_ids": [104]}]})
        await exchange.writer.drain()
        began.set()
        await never(exchange)

    async with replicas(stops, weft()) as live:
        live.replica(live.stubs[1]).connections += 1  # so that the other one comes first
        asking = asyncio.create_task(live.client.post(PATHS[1], json=body(PATHS[1])))
        await began.wait()
        live.stubs[0].answer = hang_up
        for _ in range(3):
            await check_health(live.replica(live.stubs[0]), live.proxy.fleet, live.proxy.timeouts)
        text = (await asking).text
        live.replica(live.stubs[1]).connections -= 1
        assert text.endswith("data: [DONE]\n\n") and "error" not in text
        live.assert_idle()


async def test_an_event_that_never_ends_takes_bounded_memory() -> None:
    async def endless(exchange: Exchange) -> None:
        if exchange.json is None:
            await weft()(exchange)
            return
        exchange.stream()
        for _ in range(2 * EVENT_BYTES // 65536):
            exchange.chunk(b"x" * 65536)
            await exchange.writer.drain()
        exchange.end()

    async with replicas(endless, weft()) as live:
        for _ in range(2):
            text = (await live.client.post(PATHS[1], json=body(PATHS[1]))).text
            assert text.endswith("data: [DONE]\n\n") and "xx" not in text
        live.assert_idle()


async def test_replicas_that_break_an_answer_in_vain_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "SECOND_CHANCE_S", 0.0)
    monkeypatch.setattr(dispatch, "POLL_S", 0.0)
    async with replicas(weft(*[1] * 50), weft(*[1] * 50)) as live:
        for stub in live.stubs:
            live.replica(stub).breaker.fail = lambda *given, **named: None  # type: ignore[method-assign]
        assert "closed_in_response" in (await live.client.post(PATHS[0], json=body(PATHS[0]))).text
        tries = sum(len([seen for seen in stub.seen if seen.json]) for stub in live.stubs)
        assert tries == LOST
        live.assert_idle()


@pytest.mark.parametrize("begun", ["before", "after"])
async def test_an_upstream_that_was_just_added_takes_the_place_of_a_drained_one(begun: str) -> None:
    """Add, drain and kill in one breath: a stream goes on, whether it began before the newcomer came or after."""
    answering = weft(BREAKS)
    go_on, begun_there = asyncio.Event(), asyncio.Event()

    async def old(exchange: Exchange) -> None:
        if exchange.json is not None:
            begun_there.set()
            await go_on.wait()
        await answering(exchange)

    async with replicas(old) as live, upstream() as new:
        new.answer = weft()

        async def add() -> None:
            added = (await live.client.post("/gateway/add", json={"url": new.url})).json()
            assert added["models"] == ["tiny"], "the answer comes after its first check"
            live.replica(new).connections += 1  # so that the old one comes first

        if begun == "after":
            await add()
        stream = asyncio.create_task(live.client.post(PATHS[1], json=body(PATHS[1])))
        await begun_there.wait()
        if begun == "before":
            await add()
        await live.client.post("/gateway/drain", json={"url": live.stubs[0].url})
        go_on.set()
        text = (await stream).text
        assert text.rstrip().endswith("[DONE]") and "error" not in text
        live.replica(new).connections -= 1


async def test_an_upstream_without_a_check_yet_is_waited_for() -> None:
    async with replicas(weft(BREAKS)) as live, upstream() as new:
        new.answer = weft()
        newcomer = live.proxy.fleet.add(UpstreamConfig(url=new.url))  # as a file of upstreams does
        newcomer.connections += 1
        stream = asyncio.create_task(live.client.post(PATHS[1], json=body(PATHS[1])))
        while not live.stubs[0].seen:
            await asyncio.sleep(0)
        live.replica(live.stubs[0]).draining = True
        await read_models(newcomer, live.proxy.timeouts)
        assert (await stream).text.rstrip().endswith("[DONE]")
        newcomer.connections -= 1


async def test_a_stream_of_the_only_upstream_ends_at_once_if_it_breaks() -> None:
    async with replicas(weft(BREAKS, BREAKS)) as live:
        assert "closed_in_response" in (await live.client.post(PATHS[1], json=body(PATHS[1]))).text
