"""Streams that end badly, clients that go away, and what health and metrics say of it."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.pure.worlds import CHAT, DEAD, FakeEngine, Stream, Wire, World, dying, endless, refused
from weft.api.observe.progress import StepProgress
from weft.engine.core.request import Stats


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_requests(path: str, stream: bool) -> None:
    world = World(FakeEngine(endless))
    wire = Wire(world, path, {**CHAT, "prompt": "ab", "stream": stream, "n": 2})
    while len(world.engine.open) < 2 or (stream and not wire.sent):
        await asyncio.sleep(0)
    wire.hang_up()
    await wire.task
    assert not world.engine.open and len(world.engine.aborted) == 2
    assert not world.service.streams


async def test_a_stream_is_given_back_whatever_the_engine_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(stream: Stream) -> None:
        raise RuntimeError("the connection is lost")

    monkeypatch.setattr(Stream, "aclose", broken)
    world = World()
    with pytest.raises(RuntimeError):
        await world.complete()
    assert world.engine.requests and not world.service.streams and world.service.idle.is_set()


async def test_a_client_that_is_gone_before_the_first_byte_ends_its_requests() -> None:
    world = World(FakeEngine(endless))
    wire = Wire(world, "/v1/chat/completions", {**CHAT, "stream": True})
    wire.hang_up()
    await wire.task
    assert world.engine.requests and not world.engine.open and not world.service.streams


async def test_a_client_that_goes_away_amid_its_body_is_no_error_of_ours() -> None:
    wire = Wire(World(), "/v1/chat/completions", None)
    wire.hang_up()
    await wire.task  # does not raise
    assert wire.sent[0]["status"] == 400 and b"client_disconnected" in wire.sent[1]["body"]


async def test_a_handler_that_is_cancelled_ends_its_requests() -> None:
    world = World(FakeEngine(endless))
    wire = Wire(world, "/v1/chat/completions", {**CHAT, "stream": True})
    await wire.text(until='"content":"a"')
    wire.task.cancel()
    await asyncio.gather(wire.task, return_exceptions=True)
    assert not world.engine.open and not world.service.streams


async def test_a_stream_that_breaks_says_why_and_is_cut() -> None:
    engine = FakeEngine(endless)
    engine.breaks = True
    wire = Wire(World(engine), "/v1/chat/completions", {**CHAT, "stream": True})
    await wire.task
    text = b"".join(message.get("body", b"") for message in wire.sent).decode()
    last = json.loads(text.strip().rpartition("\n\n")[2].removeprefix("data: "))
    assert last["error"]["code"] == "engine_dead" and str(DEAD) == last["error"]["message"]
    assert "[DONE]" not in text and not wire.whole


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_is_cut_off_gets_the_reason(stream: bool) -> None:
    world = World(FakeEngine(endless))
    wire = Wire(world, "/v1/chat/completions", {**CHAT, "stream": stream})
    while not world.engine.open:
        await asyncio.sleep(0)
    for answer in world.service.streams:
        answer.cut_off()
    await wire.task
    text = b"".join(message.get("body", b"") for message in wire.sent).decode()
    assert "shutting_down" in text and wire.whole != stream
    assert wire.sent[0]["status"] == (200 if stream else 503) and not world.service.streams


async def test_before_the_first_byte_a_dead_engine_is_a_500() -> None:
    engine = FakeEngine(endless)
    engine.breaks = True
    assert "look at dmesg" in refused(await World(engine).chat(), 500, code="engine_dead", type="server_error")
    world = World()
    world.engine.failure = DEAD
    refused(await world.chat(stream=True), 500, code="engine_dead")
    assert "SIGKILL" in refused(await world.client.get("/health"), 503)
    assert (await world.client.get("/health/live")).status_code == 200


async def test_while_engines_start_again_a_client_is_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "outage", "no replica runs: they start")
    answer = await World(FakeEngine(dying)).chat()
    assert "they start" in refused(answer, 503, code="engine_restarts")
    assert int(answer.headers["Retry-After"]) > 0


async def test_a_silent_stream_is_kept_alive() -> None:
    world = World(FakeEngine(endless), keepalive_interval=0.01)
    wire = Wire(world, "/v1/chat/completions", {**CHAT, "stream": True})
    text = await wire.text(until=": keepalive\n\n: keepalive\n\n")
    assert '"content":"a"' in text
    wire.hang_up()
    await wire.task


# Health and numbers


async def test_health_is_forward_progress() -> None:
    world = World(FakeEngine(endless), progress_timeout=0.0)
    # Nothing to do, nothing done: fine for ever.
    assert (await world.client.get("/health")).status_code == 200
    wire = Wire(world, "/v1/chat/completions", {**CHAT, "stream": True})
    await wire.text(until='"content":"a"')
    assert (await world.client.get("/load")).json()["server_load"] == 1
    world.engine.stats = replace_steps(world.engine.stats, 1)
    assert (await world.client.get("/health")).status_code == 200
    refused(await world.client.get("/health"), 503, code="unhealthy")
    world.engine.stats = replace_steps(world.engine.stats, 2)
    assert (await world.client.get("/ping")).status_code == 200
    wire.hang_up()
    await wire.task
    assert (await world.client.get("/health")).status_code == 200


async def test_time_without_work_is_no_stall() -> None:
    now = 0.0
    world = World(FakeEngine(endless))
    world.service._progress = StepProgress(10.0, lambda: now)
    now = 1000.0
    wire = Wire(world, "/v1/chat/completions", {**CHAT, "stream": True})
    await wire.text(until='"content":"a"')
    assert (await world.client.get("/health")).status_code == 200
    now = 1011.0
    assert "for 11 s" in refused(await world.client.get("/health"), 503, code="unhealthy")
    wire.hang_up()
    await wire.task


def replace_steps(stats: Stats, steps: int) -> Stats:
    return Stats(blocks_total=stats.blocks_total, steps=steps)


async def test_numbers() -> None:
    world = World()
    world.engine.stats = Stats(running=2, waiting=3, blocks_used=5, blocks_total=10, prompt_tokens=7, preemptions=1)
    await world.chat(n=2)
    await world.complete(max_tokens=3)
    labels = {"model_name": "tiny", "engine": "0"}
    expected = {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "kv_cache_usage_perc": 0.5,
        "prompt_tokens_total": 7,
        "num_preemptions_total": 1,
        "time_to_first_token_seconds_count": 3,
        "inter_token_latency_seconds_count": 5 + 5 + 2,
        "e2e_request_latency_seconds_count": 3,
        "request_generation_tokens_sum": 6 + 6 + 3,
    }
    for name, value in expected.items():
        assert await world.metric(f"vllm:{name}", **labels) == value, name
    for reason, count in (("stop", 2), ("length", 1)):
        assert await world.metric("vllm:request_success_total", finished_reason=reason, **labels) == count
    assert await world.metric("vllm:time_to_first_token_seconds_bucket", le="0.001") is not None
    assert (await world.client.get("/version")).json()["version"]
