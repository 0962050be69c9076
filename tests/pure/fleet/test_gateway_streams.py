"""Streams of Anthropic's, OpenAI's and Ollama's APIs that a replica begins and another one ends."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pure.api.test_continued_answers import world
from tests.pure.fleet.test_gateway_continues import breaking, replicas, soon
from tests.pure.gateways import LiveGateway, answer_status, gateway, hang_up, upstream
from tests.pure.servers import Exchange
from tests.pure.worlds import HI, refused
from tests.refusals import refuses
from weft.fleet.gateway import completion
from weft.fleet.gateway.events import EVENT_BYTES
from weft.fleet.gateway.marked import MarkedAnswer
from weft.fleet.gateway.stream_apis import APIS
from weft.fleet.upstreams.upstream import UpstreamError

__all__ = ["soon"]

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SAID = f"<think>hm</think>so{CALL}{CALL}\nDone é"  # of é only the first byte is said, half a character
SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "max_tokens": 2000,
        "messages": HI,
        "thinking": {"type": "enabled"},
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "stream": True,
    },
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", "name": "add"}], "stream": True},
    "/api/chat": {"messages": HI, "tools": [FUNCTION]},
    "/api/generate": {"prompt": "hi", "raw": True},
}
OPTIONS: dict[str, Any] = {"said": SAID, "reasoning_parser": "qwen3", "max_model_len": 4096}
# Times, and what each server's cache had.
CHANGING = re.compile(
    rb'"(?:created_at":"[^"]*|[a-z_]+_duration":\d+|(?:cache_read_)?input_tokens":\d+|cached_tokens":\d+)'
)


def body(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", **ASKED[path], **fields}


def weft(*breaks: int | None, **options: Any) -> Callable[[Exchange], Awaitable[None]]:
    """A replica with the code of `weft serve`. Its n-th stream breaks after so many parts, or never if None."""
    served, left = world(**{**OPTIONS, **options}), list(breaks)

    async def answer(exchange: Exchange) -> None:
        method = "GET" if exchange.json is None else "POST"
        keys = {"authorization": exchange.headers.get("authorization", "")}
        made = await served.client.request(method, exchange.path, json=exchange.json, headers=keys)
        kind = made.headers["content-type"]
        if "content-length" in made.headers:
            exchange.head(f"{made.status_code} X", f"Content-Length: {len(made.content)}", f"Content-Type: {kind}")
            exchange.writer.write(made.content)
            return
        end = b"\n" if "ndjson" in kind else b"\n\n"
        exchange.head("200 OK", f"Content-Type: {kind}", "Transfer-Encoding: chunked")
        most = left.pop(0) if left else None
        for part in [part + end for part in made.content.split(end) if part][:most]:
            exchange.chunk(part[:9])  # a part may come in pieces
            exchange.chunk(part[9:])
        if most is None:
            exchange.end()
        else:
            exchange.chunk(b'data: {"ha')
            exchange.hang_up()

    return answer


@pytest.fixture(autouse=True)
def same_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams have the same ids."""
    monkeypatch.setattr(completion.secrets, "token_hex", lambda count: "5" * count)
    monkeypatch.setattr(completion.time, "time", lambda: 1_700_000_000.0)


def steady(content: bytes) -> bytes:
    """An answer without what differs from server to server."""
    return CHANGING.sub(b"", content)


async def raw(live: LiveGateway, path: str, **fields: Any) -> bytes:
    answer = await live.client.post(path, json=body(path, **fields))
    assert answer.status_code == 200, answer.text
    return answer.content


async def asked(live: LiveGateway, path: str, **fields: Any) -> bytes:
    return steady(await raw(live, path, **fields))


@pytest.mark.parametrize("path", ASKED)
async def test_the_client_sees_an_undisturbed_stream(path: str) -> None:
    async with replicas(weft(), weft()) as live:
        alone = await asked(live, path)
    assert b"weft" not in alone and "Done \ufffd".encode() in b"".join(
        re.findall(rb'(?:text|content|response|delta)":"([^"]*)', alone)
    )
    end = b"\n" if path.startswith("/api/") else b"\n\n"
    # As many parts as an undisturbed replica sends, marks included: one for each letter, and those around them.
    counts = [*range(8), *range(8, 3 * len(SAID), 17)]
    for count in counts:
        async with breaking(weft, count) as live:
            assert await asked(live, path) == alone, count
            sent = [seen.json for stub in live.stubs for seen in stub.seen if seen.json]
            assert len({one["seed"] for one in sent}) == 1
    assert alone.endswith(end)


@pytest.mark.parametrize("path", ASKED)
async def test_without_a_gateway_nothing_is_added(path: str) -> None:
    async with replicas(weft(), weft()) as live:
        through = await asked(live, path)
    async with upstream() as stub, gateway(stub.url) as live:
        stub.answer = weft()  # the only one, so that nobody could go on
        direct = await asked(live, path, stream_state={"id": "5" * 16, "created": 1_700_000_000})
        assert "return_token_ids" not in (stub.seen[-1].json or {})
    assert direct == through


async def test_the_events_of_responses_are_numbered_through() -> None:
    async with replicas(weft(9), weft(9)) as live:
        events = (await raw(live, "/v1/responses")).split(b"\n\n")
    told = [json.loads(event.partition(b"data: ")[2]) for event in events if event]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert len({event["response"]["id"] for event in told if "response" in event}) == 1
    whole = told[-1]["response"]
    assert [item["type"] for item in whole["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    items = {event["item"]["id"] for event in told if event["type"] == "response.output_item.added"}
    assert items == {item["id"] for item in whole["output"]}


@pytest.mark.parametrize("path", ASKED)
async def test_a_failure_of_all_ends_visibly(path: str) -> None:
    closed = {"api_key": ("k",), "admin_key": "other"}  # the gateway's key may not continue answers
    async with replicas(weft(12, **closed), weft(12, **closed)) as live:
        live.client.headers["Authorization"] = "Bearer k"
        for stub in live.stubs:
            live.replica(stub).listed = {"tiny": {"id": "tiny", "owned_by": "weft"}}
        text = (await raw(live, path)).decode()
        last = text.strip().split("\n")[-1]
        if path.startswith("/api/"):
            assert isinstance(json.loads(last)["error"], str)
        else:
            assert "event: error\n" in text and json.loads(last[6:])["type"] == "error"
        assert "weft {" not in text
        live.assert_idle()


async def test_an_error_of_the_replica_is_shown_if_nobody_goes_on() -> None:
    async def reports(exchange: Exchange) -> None:
        if exchange.json is None:
            await weft()(exchange)
            return
        exchange.stream()
        exchange.chunk(b": weft {}\n\n")
        exchange.chunk(b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"it broke"}}\n\n')
        exchange.hang_up()

    async with replicas(reports, reports) as live:
        assert b"it broke" in await asked(live, "/v1/messages")
        live.assert_idle()


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
async def test_servers_that_know_no_marks_are_passed_on(path: str) -> None:
    lines = path.startswith("/api/")
    part = b'{"message":{"content":"a"}}\n' if lines else b'event: ping\ndata: {"type": "ping"}\n\n'

    async def other(exchange: Exchange) -> None:
        if exchange.json is None:
            await weft()(exchange)
            return
        kind = "application/x-ndjson" if lines else "text/event-stream"
        exchange.head("200 OK", f"Content-Type: {kind}", "Transfer-Encoding: chunked")
        exchange.chunk(part)
        exchange.chunk(part)
        exchange.end()

    async with replicas(other, other) as live:
        assert await asked(live, path) == 2 * part
        live.assert_idle()
    async with replicas(weft(9, *[0] * 20), other) as live:  # which does not go on with the marks of the first
        live.replica(live.stubs[1]).connections += 1
        text = await asked(live, path)
        live.replica(live.stubs[1]).connections -= 1
        assert b"error" in text and not text.endswith(part)
        live.assert_idle()


@pytest.mark.parametrize("path", ASKED)
async def test_only_administrators_say_what_a_model_has_said(path: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{name: a, key: one}, {name: b, key: two, admin: true}]")
    async with replicas(weft(), weft(), keys=str(keys)) as live:
        for key, status in (("one", 403), ("two", 200)):
            live.client.headers["Authorization"] = f"Bearer {key}"
            answer = await live.client.post(path, json=body(path, continue_token_ids=[*b"<think>"]))
            assert answer.status_code == status


async def test_responses_with_logprobs_end_visibly() -> None:
    async with replicas(weft(12), weft(12)) as live:
        text = await asked(live, "/v1/responses", include=["message.output_text.logprobs"], tools=[])
        assert b"event: error" in text
    made = await world().post("/v1/responses", {**body("/v1/responses"), "top_logprobs": 2, "continue_token_ids": [65]})
    assert "logprobs" in refused(made, 400, param="continue_token_ids")


@pytest.mark.parametrize(
    "state",
    [
        {"id": "", "created": 1},
        {"id": "x" * 129, "created": 1},
        {"id": "a", "created": -1},
        {"id": "a", "created": 1, "events": -1},
    ],
)
async def test_states_that_no_stream_has(state: dict[str, Any]) -> None:
    made = await world(**OPTIONS).post("/v1/responses", body("/v1/responses", stream_state=state))
    refused(made, 400, param="stream_state")


def test_parts_without_a_mark_take_bounded_memory() -> None:
    answer = MarkedAnswer(APIS["/api/chat"], continuable=True)
    answer.push(b'{"weft":{}}\n')
    with refuses(UpstreamError, "event-too-large", EVENT_BYTES):
        for _ in range(EVENT_BYTES // 1000 + 1):
            assert not answer.push(b'{"message":"' + b"x" * 1000 + b'"}\n')
            answer.check()


@pytest.mark.parametrize("keeps_marks", [False, True])
def test_marks_are_the_gateway_s_though_nobody_can_go_on(keeps_marks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.fleet.gateway.marked.MAX_HELD_IDS", 3)
    answer = MarkedAnswer(APIS["/api/generate"], continuable=True, keeps_marks=keeps_marks)
    mark, parts = b'{"weft":{"token_ids":[1,2]}}\n', [b'{"response":"%d"}\n' % number for number in range(3)]
    sent = [mark, parts[0], mark, parts[1], mark, parts[2], mark]
    shown = b"".join(answer.push(piece) for piece in sent) + answer.push(mark[:-1]) + answer.finish()
    assert not answer.continuable and not answer.token_ids
    assert shown == (b"".join(sent) + mark[:-1] if keeps_marks else b"".join(parts))
    assert answer.tokens == 2 * sent.count(mark)


# What is counted

USAGES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"usage": {"input_tokens": 30, "cache_read_input_tokens": 10, "output_tokens": 7}},
    "/v1/responses": {"usage": {"input_tokens": 40, "output_tokens": 7}},
    "/api/chat": {"prompt_eval_count": 40, "eval_count": 7},
    "/api/generate": {"prompt_eval_count": 40, "eval_count": 7},
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("streams", [False, True])
async def test_tokens_of_all_apis_count(path: str, streams: bool, tmp_path: Path) -> None:
    """The server is another vendor's, whose streams have no marks."""
    told: dict[str, Any] = {"model": "m", **USAGES[path]}

    async def answer(exchange: Exchange) -> None:
        content = json.dumps(told).encode()
        if not streams:
            exchange.head("200 OK", f"Content-Length: {len(content)}")
            exchange.writer.write(content)
        elif path.startswith("/api/"):
            exchange.head("200 OK", "Content-Type: application/x-ndjson", "Transfer-Encoding: chunked")
            exchange.chunk(b'{"message":{"content":"a"}}\n' + content + b"\n")
            exchange.end()
        else:
            exchange.stream()
            event = {"type": "response.completed", "response": told} if path == "/v1/responses" else told
            exchange.chunk(b"event: x\ndata: " + json.dumps(event).encode() + b"\n\n")
            exchange.end()

    keys = tmp_path / "keys.yaml"
    keys.write_text("[{name: a, key: one, admin: true, quota: {hour: 100}}]")
    async with upstream() as stub:
        stub.answer = answer
        async with gateway(stub.url, keys=str(keys), ledger=str(tmp_path / "ledger")) as live:
            live.client.headers["Authorization"] = "Bearer one"
            for status in (200, 200, 429):
                made = await live.client.post(path, json={"model": "m", "max_tokens": 1, "stream": streams})
                assert made.status_code == status, made.text
            (row,) = (await live.client.get("/gateway/status")).json()["spending"]["usage_day"]
            assert (row["prompt_tokens"], row["completion_tokens"]) == (80, 14)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("streams", [False, True])
async def test_answers_have_the_gateway_s_name_of_a_model(path: str, streams: bool) -> None:
    async with upstream() as stub:
        stub.answer = weft()
        async with gateway(upstreams=[{"url": stub.url, "models": {"mine": "tiny"}}]) as live:
            text = (await live.client.post(path, json=body(path, model="mine", stream=streams))).text
            assert '"mine"' in text and '"tiny"' not in text
            assert stub.seen[-1].json["model"] == "tiny"


async def test_broken_streams_of_other_servers_end_with_an_error_line() -> None:
    async def breaks(exchange: Exchange) -> None:
        exchange.head("200 OK", "Content-Type: application/x-ndjson", "Transfer-Encoding: chunked")
        exchange.chunk(b'{"message":{"content":"a"}}\n')
        await exchange.writer.drain()
        exchange.hang_up()

    async with upstream() as stub, gateway(stub.url) as live:
        stub.answer = breaks
        lines = (await live.client.post("/api/chat", json=body("/api/chat"))).text.splitlines()
        assert len(lines) == 2 and isinstance(json.loads(lines[1])["error"], str)
        for other in (hang_up, answer_status("500 X")):
            stub.answer = other
            assert "error" in (await live.client.post("/api/chat", json=body("/api/chat"))).text or other is not hang_up
