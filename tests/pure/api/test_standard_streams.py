"""An engine on standard streams, with the messages that an Infernet node sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from weft.api.server import standard_streams
from weft.api.server.standard_streams import StreamEngine
from weft.cli.parser import UsageError
from weft.cli.serve.infernet_engine import read_environment
from weft.engine.core.token_ids import TokenIds
from weft.engine.frontend.outputs import CompletionOutput, Metrics, RequestOutput
from weft.errors import ModelError

HI = [{"role": "user", "content": "hi"}]


class FakeModel:
    """Says "hello" letter by letter, or "a" for ever."""

    def __init__(self, name: str) -> None:
        self.names = (name,)
        self.asked: list[dict[str, Any]] = []
        self.closed = False

    async def chat(
        self, messages: list[dict[str, Any]], sampling: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        self.asked.append(sampling)
        most = sampling["max_tokens"]
        answer = RequestOutput("r", "", TokenIds(b""), [CompletionOutput(0)], Metrics(0.0))
        choice = answer.outputs[0]
        for letter in "hello" if messages == HI else "a" * 10**6:
            await asyncio.sleep(0)
            choice.text += letter
            if len(choice.text) == most:
                choice.finish_reason = "length"
            yield answer
            if choice.finish_reason:
                return
        choice.finish_reason = "stop"
        yield answer

    async def close(self) -> None:
        self.closed = True


class Node:
    """A node's side of the streams."""

    def __init__(self, model: str | None = None, first_line_s: float = 60.0) -> None:
        self.models: list[FakeModel] = []
        self._written: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        engine = StreamEngine(self._load, self._take, model, first_line_s)
        self.task = asyncio.create_task(engine.serve_lines(self._input()))

    async def _load(self, name: str) -> FakeModel:
        await asyncio.sleep(0)
        if name == "broken":
            raise ModelError("no such model: broken", code="model-not-found")
        self.models.append(FakeModel(name))
        return self.models[-1]

    def _take(self, data: bytes) -> None:
        assert data.endswith(b"\n") and data.count(b"\n") == 1
        event = json.loads(data)
        assert event["v"] == 1 and event["type"]
        self._written.put_nowait(event)

    async def _input(self) -> AsyncIterator[bytes]:
        while (line := await self._lines.get()) is not None:
            yield line

    def send(self, kind: str, **fields: Any) -> None:
        self._lines.put_nowait(json.dumps({"v": 1, "type": kind, **fields}).encode() + b"\n")

    def send_line(self, line: bytes | None) -> None:
        self._lines.put_nowait(line)

    async def event(self, kind: str = "") -> dict[str, Any]:
        """The next event, or the next one of a type."""
        async with asyncio.timeout(10):
            while True:
                event = await self._written.get()
                if kind in ("", event["type"]):
                    return event

    async def end(self) -> None:
        self.send("shutdown")
        await asyncio.wait_for(self.task, 60)
        assert all(model.closed for model in self.models)


async def test_a_generation() -> None:
    node = Node()
    node.send("load", model="qwen")
    assert await node.event() == {"v": 1, "type": "ready", "model": "qwen"}
    node.send("generate", id="a", messages=HI, model="qwen", max_tokens=3, temperature=0.5, other=1)
    meta = await node.event()
    assert (meta["type"], meta["id"], meta["model"]) == ("meta", "a", "qwen") and meta["started_at"].endswith("Z")
    assert [(await node.event())["text"] for _ in range(3)] == ["h", "e", "l"]
    done = await node.event()
    assert (done["type"], done["id"], done["reason"], done["text"]) == ("done", "a", "length", "hel")
    assert done["finished_at"] >= meta["started_at"]
    assert node.models[0].asked[0]["temperature"] == 0.5
    node.send("generate", id="b", messages=HI, model=None, max_tokens=None, temperature=None)
    done = await node.event("done")
    assert (done["reason"], done["text"]) == ("stop", "hello")
    await node.end()


async def test_a_cancel_that_comes_with_its_request_is_answered() -> None:
    """Both lines may be there before the request has begun."""
    node = Node("qwen")
    assert (await node.event())["type"] == "ready"
    for _ in range(2):  # and the id may be used again
        node.send("generate", id="early", messages=HI)
        node.send("cancel", id="early")
        done = await node.event()
        assert (done["type"], done["id"], done["reason"], done["text"]) == ("done", "early", "cancel", "")
    node.send("generate", id="early", messages=HI)
    assert (await node.event("done"))["text"] == "hello"
    await node.end()


async def test_a_cancel_ends_one_of_two() -> None:
    node = Node("qwen")
    assert (await node.event())["type"] == "ready"
    node.send("generate", id="long", messages=[])
    while (await node.event())["type"] != "token":
        pass
    node.send("generate", id="short", messages=HI)
    node.send("generate", id="long", messages=[])  # again while it runs
    assert (await node.event("log"))["level"] == "warn"
    assert (await node.event("done"))["id"] == "short"
    node.send("cancel", id="long")
    node.send("cancel", id="unknown")
    done = await node.event("done")
    assert (done["id"], done["reason"]) == ("long", "cancel") and set(done["text"]) == {"a"}
    await node.end()


async def test_failures_are_events() -> None:
    node = Node("qwen")
    await node.event("ready")
    node.send("generate", id="a", messages=HI, model="other")
    error = await node.event()
    assert (error["type"], error["id"]) == ("error", "a") and "'other'" in error["message"]
    for line in (b"{\n", b'{"v": 2, "type": "load"}\n', b'{"v": 1, "type": "dance"}\n', b"\xff\n", b"[]\n"):
        node.send_line(line)
        error = await node.event()
        assert error["type"] == "error" and "id" not in error
    node.send("load", model="broken")
    assert "no such model" in (await node.event("error"))["message"]
    node.send("generate", id="b", messages=HI, model="qwen")
    assert (await node.event("done"))["text"] == "hello"
    await node.end()


async def test_an_engine_without_a_model_is_ready_and_loads_what_is_asked_for() -> None:
    node = Node(first_line_s=0.0)
    assert await node.event() == {"v": 1, "type": "ready", "model": None}
    node.send("generate", id="a", messages=HI)
    assert "no model" in (await node.event("error"))["message"]
    node.send("generate", id="b", messages=HI, model="qwen")
    assert (await node.event("done"))["text"] == "hello"
    node.send("load", model="llama")
    assert (await node.event("ready"))["model"] == "llama" and node.models[0].closed
    await node.end()


async def test_a_request_for_another_model_waits_for_the_first_and_is_refused() -> None:
    node = Node("qwen")
    node.send("generate", id="a", messages=HI, model="other")
    assert (await node.event())["model"] == "qwen"
    error = await node.event()
    assert (error["type"], error["id"]) == ("error", "a") and "'other'" in error["message"]
    node.send("generate", id="b", messages=HI)
    assert (await node.event("done"))["text"] == "hello"
    await node.end()


async def test_a_request_behind_two_loads_is_answered_by_the_second_model() -> None:
    node = Node()
    node.send("load", model="qwen")
    node.send("load", model="llama")
    node.send("generate", id="a", messages=HI)
    assert [(await node.event("ready"))["model"] for _ in range(2)] == ["qwen", "llama"]
    assert (await node.event("meta"))["model"] == "llama"
    assert (await node.event("done"))["text"] == "hello"
    assert node.models[0].closed
    await node.end()


async def test_a_model_stays_until_its_requests_have_ended() -> None:
    node = Node("qwen")
    node.send("generate", id="long", messages=[])
    await node.event("token")
    node.send("load", model="llama")
    node.send("generate", id="next", messages=HI, model="llama")
    await node.event("token")
    assert not node.models[0].closed
    node.send("cancel", id="long")
    assert (await node.event("done"))["id"] == "long"
    assert (await node.event("ready"))["model"] == "llama" and node.models[0].closed
    done = await node.event("done")
    assert (done["id"], done["text"]) == ("next", "hello")
    await node.end()


async def test_the_end_of_the_input_is_the_end() -> None:
    node = Node("qwen")
    await node.event("ready")
    node.send("generate", id="long", messages=[])
    await node.event("token")
    node.send_line(None)
    await asyncio.wait_for(node.task, 60)
    assert node.models[0].closed


@pytest.mark.parametrize("step", [1, 7, 100, 1000])
@pytest.mark.parametrize("last", [b"", b"end", b"z" * 50])
async def test_a_line_that_is_too_long_is_skipped(monkeypatch: pytest.MonkeyPatch, step: int, last: bytes) -> None:
    monkeypatch.setattr(standard_streams, "LINE_BYTES", 20)
    sent = [b"a" * 19, b"b" * 20, b"c" * 21, b"d" * 500, b"", b"e"]
    text = b"".join(line + b"\n" for line in sent) + last
    reader = asyncio.StreamReader(20)

    async def feed() -> None:
        for at in range(0, len(text), step):
            reader.feed_data(text[at : at + step])
            await asyncio.sleep(0)
        reader.feed_eof()

    feeding = asyncio.create_task(feed())
    lines = [line async for line in standard_streams.bounded_lines(reader)]
    await feeding
    expected = [line[:21] for line in (*sent, last)][: None if last else -1]
    assert [line.rstrip(b"\n") for line in lines] == expected


async def test_a_line_that_is_too_long_is_an_event_and_requests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard_streams, "LINE_BYTES", 1000)
    node = Node("qwen")
    await node.event("ready")
    node.send("generate", id="a", messages=HI)
    await node.event("token")
    node.send("generate", id="b", messages=[{"role": "user", "content": "x" * 2000}])
    error = await node.event("error")
    assert "1,000 bytes" in error["message"] and "id" not in error
    node.send("cancel", id="a")
    assert (await node.event("done"))["id"] == "a"
    await node.end()


def test_flags_of_the_environment() -> None:
    _, config = read_environment({"WEFT_ENGINE_ARGS": "demo --tensor-parallel-size 2 --max-model-len '512'"})
    assert (config.model, config.tensor_parallel_size, config.max_model_len) == ("demo", 2, 512)
    assert read_environment({"INFERNET_ENGINE_MODEL": "qwen3:8b"})[1].model == "qwen3:8b"
    assert read_environment({})[1].model == ""
    with pytest.raises(UsageError, match="--tensor-paralel"):
        read_environment({"WEFT_ENGINE_ARGS": "--tensor-paralel-size 2"})
    with pytest.raises(UsageError, match="WEFT_ENGINE_ARGS"):
        read_environment({"WEFT_ENGINE_ARGS": "'"})
