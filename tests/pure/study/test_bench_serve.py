"""weft bench serve: the client against servers that behave well and badly, and the figures that come of it."""

from __future__ import annotations

import asyncio
import re
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.servers import Answering, Exchange, good, serving
from tests.refusals import has_values, refuses
from weft.errors import ConfigError
from weft.study.bench.http import HttpClient, HttpFailure, HttpRefusal, ServerAddress
from weft.study.bench.load import LoadResult, RequestOptions, RequestRecord, error_text, run_open_loop, send_request
from weft.study.bench.prompts import BenchPrompt
from weft.study.bench.summary import load_warnings, meets_limits, parse_limits, percentile, summarise_load


async def one(
    answering: Answering, asking: RequestOptions | None = None, prompt: BenchPrompt | None = None
) -> RequestRecord:
    async with serving(answering) as server:
        client, asking = HttpClient(server), asking or RequestOptions(model="m")
        prompt = prompt or BenchPrompt([1, 2, 3], 4)
        record = RequestRecord(due_s=0.0, requested_tokens=prompt.output_len)
        await send_request(client, asking, record, asking.body(prompt))
        client.close()
        return record


# --- one request ---


async def test_a_good_answer_is_timed_and_counted() -> None:
    seen: list[Exchange] = []

    async def noting(exchange: Exchange) -> None:
        seen.append(exchange)
        await good(exchange)

    record = await one(noting, RequestOptions(model="m", extra={"top_k": 3}))
    assert record.error is None
    assert (record.input_tokens, record.output_tokens, record.cached_tokens) == (3, 4, 1)
    assert len(record.pieces_s) == 4 and record.pieces_s == sorted(record.pieces_s)
    assert 0 <= record.ttft_s <= record.e2e_s and record.tpot_s is not None and record.tpot_s >= 0
    assert seen[0].path == "/v1/completions" and seen[0].headers["x-team"] == "blue"
    assert seen[0].json == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        "top_k": 3,
    }


async def test_chat_has_messages_and_deltas() -> None:
    async def chat(exchange: Exchange) -> None:
        assert exchange.path == "/v1/chat/completions"
        assert exchange.json["messages"] == [{"role": "user", "content": "hello"}]
        exchange.stream()
        exchange.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        exchange.event({"choices": [{"delta": {"reasoning_content": "hm"}}]})
        exchange.event({"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]})
        exchange.event(b"[DONE]")
        exchange.end()

    record = await one(chat, RequestOptions(api="openai-chat"), BenchPrompt("hello", 9))
    assert record.error is None and len(record.pieces_s) == 2
    assert record.output_tokens == 2  # a server that counts nothing


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
async def test_however_the_bytes_are_cut(size: int) -> None:
    async def crumbs(exchange: Exchange) -> None:
        whole = b': keepalive\r\ndata: {"choices":[{"text":"\xc3\xa4"}]}\r\n\r\ndata:{"choices":[{"text":"b"}]}\n\n'
        whole += b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
        exchange.stream()
        for at in range(0, len(whole), size):
            exchange.chunk(whole[at : at + size])
            await exchange.writer.drain()
        exchange.end()

    record = await one(crumbs)
    assert record.error is None and len(record.pieces_s) == 2


async def test_an_answer_of_one_token_without_text() -> None:
    async def silent(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event({"choices": [{"text": "", "finish_reason": "length"}]})
        exchange.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
        exchange.event(b"[DONE]")
        exchange.end()

    record = await one(silent)
    assert record.error is None and record.tpot_s is None and record.ttft_s >= 0


async def test_a_body_that_ends_with_its_connection() -> None:
    async def old(exchange: Exchange) -> None:
        exchange.head("200 OK", "Content-Type: text/event-stream")
        exchange.writer.write(b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        exchange.hang_up()

    assert (await one(old)).error is None


async def refused(exchange: Exchange) -> None:
    exchange.refuse("503 Busy", b'{"error": {"message": "the queue is full", "code": 503}}')


async def cut_off(exchange: Exchange) -> None:
    exchange.stream()
    exchange.event({"choices": [{"text": "a"}]})
    exchange.hang_up()


async def torso(exchange: Exchange) -> None:
    exchange.stream()
    exchange.event({"choices": [{"text": "a"}]})
    exchange.end()


async def in_the_stream(exchange: Exchange) -> None:
    exchange.stream()
    exchange.event({"error": {"message": "a rank has died", "type": "x"}})
    exchange.end()


async def nonsense(exchange: Exchange) -> None:
    exchange.stream()
    exchange.event(b"{nonsense")
    exchange.end()


async def no_http(exchange: Exchange) -> None:
    exchange.writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
    exchange.hang_up()


async def mute(exchange: Exchange) -> None:
    exchange.hang_up()


async def forever(exchange: Exchange) -> None:
    exchange.stream()
    await asyncio.sleep(600)


@pytest.mark.parametrize(
    ("answering", "values"),
    [
        (refused, ("HTTP 503", "the queue is full")),
        (cut_off, ("closed", "in the middle")),
        (torso, ("stream ended",)),
        (in_the_stream, ("in the stream", "a rank has died")),
        (nonsense, ("event", "OpenAI")),
        (no_http, ("not HTTP",)),
        (mute, ("closed", "before")),
        (forever, ("0.2 s",)),
    ],
)
async def test_a_bad_answer_is_a_failure_with_its_reason(answering: Answering, values: tuple[str, ...]) -> None:
    record = await one(answering, RequestOptions(timeout_s=0.2 if answering is forever else 600))
    has_values(record.error or "", *values)


async def test_nobody_there() -> None:
    async with serving(good) as server:
        pass
    record = RequestRecord(due_s=0.0, requested_tokens=1)
    await send_request(HttpClient(server), RequestOptions(), record, b"{}")
    assert record.error is not None and f"http://127.0.0.1:{server.port}" in record.error


async def test_connections_are_kept_and_a_stale_one_is_no_failure() -> None:
    connections: set[int] = set()

    async def noting(exchange: Exchange) -> None:
        connections.add(id(exchange.writer))
        await good(exchange)

    async with serving(noting) as server:
        client, asking = HttpClient(server), RequestOptions()
        for _ in range(3):
            record = RequestRecord(due_s=0.0, requested_tokens=4)
            await send_request(client, asking, record, asking.body(BenchPrompt([1], 4)))
            assert record.error is None
        assert len(connections) == 1
        # The server hangs up in the moment in which the next request is on its way.
        client._idle[0]._transport.write(b"GET / HTTP/1.1\r\nContent-Length: nonsense\r\n\r\n")  # type: ignore[union-attr]
        record = RequestRecord(due_s=0.0, requested_tokens=4)
        await send_request(client, asking, record, asking.body(BenchPrompt([1], 4)))
        assert record.error is None and len(connections) == 2
        client.close()


async def test_get_and_refusals() -> None:
    async def listing(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.refuse("200 OK", b'{"data": []}')
        else:
            exchange.refuse("401 No", b"who are you?")

    async with serving(listing) as server:
        client = HttpClient(server)
        assert await client.get("/v1/models") == b'{"data": []}'
        with refuses(HttpRefusal, "http-status") as told:
            await client.get("/else")
        assert told.value.status == 401 and error_text(told.value.body) == "who are you?"
        client.close()


# --- many ---


async def test_the_loop_is_open() -> None:
    """Nobody is answered before all have asked: a client that waited for answers would wait for ever."""
    count, waiting = 12, asyncio.Event()
    seen = 0

    async def together(exchange: Exchange) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            waiting.set()
        await waiting.wait()
        await good(exchange)

    async with serving(together) as server:
        prompts = [BenchPrompt([1] * n, 3) for n in range(1, count + 1)]
        load = await run_open_loop(HttpClient(server), RequestOptions(), prompts, [0.001 * n for n in range(count)])
    assert [record.error for record in load.records] == [None] * count
    assert load.most_at_once == count
    assert all(record.began_s >= record.due_s for record in load.records)
    assert [record.input_tokens for record in load.records] == list(range(1, count + 1))


async def test_a_limit_on_concurrency_holds_requests_back() -> None:
    running = most = 0

    async def counting(exchange: Exchange) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        await good(exchange)

    ended: list[RequestRecord] = []
    async with serving(counting) as server:
        load = await run_open_loop(
            HttpClient(server),
            RequestOptions(),
            [BenchPrompt([1], 2)] * 7,
            [0.0] * 7,
            max_concurrency=2,
            on_end=ended.append,
        )
    figures = summarise_load(load)
    assert (most, load.most_at_once) == (2, 2) and len(ended) == 7
    assert figures["held_back"] == 5 and figures["completed"] == 7
    # Waiting for a turn is no fault of the client's.
    held = [record for record in load.records if record.held_until_s is not None]
    assert all(record.late_s == record.began_s - record.held_until_s for record in held if record.held_until_s)


async def test_a_load_that_is_cancelled_keeps_what_was_answered() -> None:
    under_way = 0

    async def four_then_silence(exchange: Exchange) -> None:
        nonlocal under_way
        under_way += 1
        await (good(exchange) if under_way <= 4 else asyncio.sleep(60))

    ended: list[RequestRecord] = []
    async with serving(four_then_silence) as server:
        prompts = [BenchPrompt([1], 2)] * 9
        laying = asyncio.create_task(
            run_open_loop(HttpClient(server), RequestOptions(), prompts, [0.0] * 9, on_end=ended.append)
        )
        while len(ended) < 4 or under_way < 9:
            await asyncio.sleep(0.001)
        laying.cancel()
        load = await laying
    figures = summarise_load(load)
    assert (figures["completed"], figures["failed"], figures["interrupted"]) == (4, 0, True)
    assert any(re.search(r"\b4 of 9\b", text) for text in load_warnings(figures, 9))


async def test_a_load_without_an_answer_is_cancelled_for_good() -> None:
    async def silent(exchange: Exchange) -> None:
        await asyncio.sleep(60)

    async with serving(silent) as server:
        laying = asyncio.create_task(run_open_loop(HttpClient(server), RequestOptions(), [BenchPrompt([1], 2)], [0.0]))
        await asyncio.sleep(0.05)
        laying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await laying


async def test_some_fail_and_all_are_counted() -> None:
    async def every_other(exchange: Exchange) -> None:
        await (good if exchange.json["max_tokens"] % 2 else refused)(exchange)

    async with serving(every_other) as server:
        load = await run_open_loop(
            HttpClient(server), RequestOptions(), [BenchPrompt([1], n) for n in range(1, 7)], [0.0] * 6
        )
    figures = summarise_load(load, {"ttft": 600.0})
    assert (figures["completed"], figures["failed"]) == (3, 3)
    assert figures["errors"] == {"HTTP 503: the queue is full": 3}
    assert figures["goodput_share"] == 0.5
    assert any(re.search(r"\b3 of 6\b", text) for text in load_warnings(figures, 6))


# --- figures ---


def made(
    due: float, first: float, gap: float, tokens: int, *, wanted: int = 0, error: str | None = None
) -> RequestRecord:
    pieces = [due + first + gap * n for n in range(tokens)]
    return RequestRecord(
        due_s=due,
        began_s=due,
        pieces_s=pieces,
        ended_s=pieces[-1] if pieces else due,
        requested_tokens=wanted or tokens,
        input_tokens=10,
        output_tokens=tokens,
        error=error,
    )


def test_the_figures_of_a_load() -> None:
    records = [
        made(0, 0.1, 0.01, 11),
        made(1, 0.3, 0.02, 11),
        made(2, 0.2, 0.03, 6, wanted=8),
        made(3, 9, 1, 1, error="x"),
    ]
    load = LoadResult(records=records, began_s=0.0, ended_s=4.0, beats_late_s=[0.0, 0.001], most_at_once=2)
    limits = parse_limits(["ttft:250", "tpot:25"])
    got = summarise_load(load, limits)
    assert (got["completed"], got["failed"], got["short_answers"]) == (3, 1, 1)
    assert (got["total_input_tokens"], got["total_output_tokens"]) == (30, 28)
    assert got["request_throughput"] == 0.75 and got["output_throughput"] == 7.0
    assert got["request_goodput"] == 0.25  # the first one only
    assert got["median_ttft_ms"] == 200 and got["mean_ttft_ms"] == 200
    assert got["median_tpot_ms"] == pytest.approx(20) and got["median_itl_ms"] == pytest.approx(20)
    assert got["p95_e2el_ms"] == pytest.approx(485)  # of 200, 350, 500
    assert got["client_late_requests"] == 0
    assert len(load_warnings(got, 4)) == 2, "of the failed one and the short one"
    assert len(load_warnings({**got, "short_answers": 0}, 4)) == 1
    alone = summarise_load(LoadResult(records=records[:1], began_s=0, ended_s=1, beats_late_s=[], most_at_once=1))
    assert alone["request_goodput"] is None and alone["std_ttft_ms"] == 0
    nobody = summarise_load(LoadResult(records=records[3:], began_s=0, ended_s=0, beats_late_s=[], most_at_once=1))
    assert nobody["mean_ttft_ms"] is None and nobody["output_throughput"] == 0


def test_a_client_that_is_late_says_so() -> None:
    late = [made(n, 0.1, 0.01, 3) for n in range(20)]
    late[3].began_s += 0.05
    load = LoadResult(records=late, began_s=0, ended_s=20, beats_late_s=[0.03] * 5, most_at_once=1)
    figures = summarise_load(load)
    assert figures["client_late_requests"] == 1 and figures["client_max_late_ms"] == pytest.approx(50)
    late_requests, late_clock = load_warnings(figures, 20)
    has_values(late_requests, "1 of 20", "10 ms", "50 ms")
    assert "30 ms" in late_clock
    assert load_warnings({**figures, "client_late_requests": 0, "client_p99_loop_late_ms": 0}, 20) == []


@given(values=st.lists(st.floats(0, 1e6), min_size=1), percent=st.floats(0, 100))
def test_percentiles_are_numpy_s(values: list[float], percent: float) -> None:
    values.sort()
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


@given(first=st.floats(0.01, 1), gap=st.floats(0.001, 0.1), tokens=st.integers(1, 9), more=st.floats(1.0, 9.0))
def test_a_request_within_a_limit_is_within_a_wider_one(first: float, gap: float, tokens: int, more: float) -> None:
    record, limits = made(0, first, gap, tokens), {"ttft": 0.5, "tpot": 0.05, "e2el": 1.0}
    if meets_limits(record, limits):
        assert meets_limits(record, {name: limit * more for name, limit in limits.items()})
    assert not meets_limits(made(0, first, gap, tokens, error="x"), dict.fromkeys(limits, inf))


@pytest.mark.parametrize(
    "word", ["ttft", "ttft:", "ttft:fast", "ttft:0", "ttft:-1", "ttft:inf", "ttft:nan", "itl:5", ":3"]
)
def test_limits_that_are_none(word: str) -> None:
    with refuses(ConfigError, "bad-goodput-limit", "1000", "50"):
        parse_limits([word])


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x:99999"])
def test_addresses_that_are_none(url: str) -> None:
    with refuses(ConfigError, "not-a-server-address"):
        ServerAddress(url)


def test_addresses() -> None:
    assert ServerAddress("localhost:9").url == "http://localhost:9"
    assert ServerAddress("https://a.b/llm/").url == "https://a.b:443/llm"
    assert ServerAddress("http://[::1]:8000").url == "http://[::1]:8000"
    assert issubclass(HttpRefusal, HttpFailure)
