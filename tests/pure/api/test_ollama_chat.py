"""/api/chat and /api/generate, with Ollama's Python client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import ollama
import pytest

from tests.pure.worlds import HI, FakeEngine, Wire, World, saying

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "e"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def client(world: World) -> ollama.AsyncClient:
    return ollama.AsyncClient(host="http://127.0.0.1:8000", transport=httpx.ASGITransport(world.app))


async def post(world: World, path: str, **fields: Any) -> httpx.Response:
    return await world.client.post(path, json={"model": "tiny", **fields})


async def test_a_chat() -> None:
    answer = await client(World()).chat("tiny", HI)
    assert (answer.message.role, answer.message.content, answer.model) == ("assistant", "hello", "tiny")
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.prompt_eval_count and answer.eval_count == 6
    durations = (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
    assert all(isinstance(value, int) and value >= 0 for value in durations)
    assert answer.total_duration and answer.total_duration >= sum(value or 0 for value in durations) * 0.99
    assert answer.created_at and answer.created_at.endswith("Z")


async def test_a_streamed_chat_says_the_same() -> None:
    parts = [part async for part in await client(World()).chat("tiny:latest", HI, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == "hello"
    assert [part.done for part in parts] == [False] * 5 + [True]
    assert parts[-1].done_reason == "stop" and parts[-1].eval_count == 6 and parts[0].eval_count is None


async def test_streaming_is_what_happens_unless_refused() -> None:
    answer = await post(World(), "/api/chat", messages=HI)
    assert answer.headers["content-type"] == "application/x-ndjson" and len(answer.text.splitlines()) == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_generate(stream: bool) -> None:
    world = World()
    answer = await post(world, "/api/generate", prompt="hi", system="be brief", stream=stream)
    parts = [json.loads(row) for row in answer.text.splitlines()]
    assert "".join(part["response"] for part in parts) == "hello" and parts[-1]["done_reason"] == "stop"
    assert b"system:be brief" in bytes(token for token in world.engine.requests[0].prompt if token < 256)


async def test_a_raw_prompt_goes_without_the_template() -> None:
    world = World()
    assert (await client(world).generate("tiny", "ab", raw=True)).response == "hello"
    assert bytes(token for token in world.engine.requests[0].prompt if token < 256) == b"ab"


@pytest.mark.parametrize(("arguments", "shown"), [('{"zone": "UTC"}', "UTC"), (None, "{}"), ('{"zone": "U', "U")])
async def test_arguments_that_another_server_gave(arguments: Any, shown: str) -> None:
    world = World(max_model_len=8192)
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": arguments}}]}
    body = {"model": "tiny", "messages": [*HI, turn, {"role": "tool", "content": "12:00"}], "stream": False}
    assert (await world.client.post("/api/chat", json=body)).status_code == 200
    assert shown in bytes(token for token in world.engine.requests[0].prompt if token < 256).decode()


async def test_options() -> None:
    world = World()
    options = {"seed": 3, "num_predict": 4, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "temperature": 0.7}
    options |= {"repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "num_ctx": 8192}
    answer = await client(world).chat("tiny", HI, options=options, keep_alive="5m")
    assert (answer.message.content, answer.done_reason) == ("hell", "length")
    params = world.engine.requests[0].params
    assert (params.max_tokens, params.top_k, params.top_p, params.min_p, params.temperature) == (4, 5, 0.5, 0.1, 0.7)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, 0.3)
    for unlimited in ({"num_predict": 0}, {"num_predict": -2}, {"num_predict": -1, "top_p": 0, "top_k": 0}):
        answer = await client(world).chat("tiny", HI, options=unlimited)
        assert answer.message.content == "hello" and answer.done_reason == "stop"
    assert 0 < world.engine.requests[-1].params.top_p < 1e-3
    stopped = await client(world).chat("tiny", HI, options={"stop": ["l"], "num_predict": -1})
    assert (stopped.message.content, stopped.done_reason) == ("he", "stop")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"options": {"mirostat": 2}}),
        ("/api/chat", {"options": {"temperature": "hot"}}),
        ("/api/chat", {"options": {"temperature": -1}}),
        ("/api/chat", {"options": {"stop": [5]}}),
        ("/api/chat", {"options": {"stop": ["x"] * 65}}),
        ("/api/chat", {"format": "yaml"}),
        ("/api/chat", {"messages": [{"role": "robot", "content": "hi"}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hi", "images": ["aGk="]}]}),
        ("/api/chat", {"messages": "hi"}),
        ("/api/chat", {"tools": [{"type": "function"}]}),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}),
        ("/api/generate", {"prompt": "a", "context": [1]}),
        ("/api/generate", {"prompt": "a", "suffix": "b"}),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}),
    ],
    ids=str,
)
async def test_refusals(path: str, fields: dict[str, Any]) -> None:
    answer = await post(World(), path, **{"messages": HI, **fields})
    assert answer.status_code == 400 and set(answer.json()) == {"error"}


@pytest.mark.parametrize(("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (0, "unload")])
async def test_nothing_asked_means_that_the_model_is_wanted(keep_alive: Any, reason: str) -> None:
    world = World()
    world.client.base_url = httpx.URL("http://127.0.0.1:11434")  # of this machine's owner
    for answer in (
        await post(world, "/api/generate", keep_alive=keep_alive),
        await post(world, "/api/chat", messages=[], keep_alive=keep_alive),
    ):
        assert (answer.json()["done"], answer.json()["done_reason"]) == (True, reason)
    assert not world.engine.requests
    assert (await client(world).chat("tiny", HI)).message.content == "hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_whole(stream: bool) -> None:
    world = World(FakeEngine(saying("so " + CALL + CALL)), max_model_len=4096)
    answer = await post(world, "/api/chat", messages=HI, tools=[TOOL], stream=stream)
    messages = [json.loads(row)["message"] for row in answer.text.splitlines()]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    assert [(call["name"], call["arguments"], call["index"]) for call in calls] == [
        ("add", {"a": 1, "b": "e"}, 0),
        ("add", {"a": 1, "b": "e"}, 1),
    ]
    assert "".join(message["content"] for message in messages).strip() == "so"
    assert json.loads(answer.text.splitlines()[-1])["done_reason"] == "stop"


async def test_the_client_s_tools_and_their_answers_reach_the_template() -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one
            b: another
        """
        return a + b

    world = World(FakeEngine(saying(CALL)), max_model_len=4096)
    answer = await client(world).chat("tiny", HI, tools=[add])
    assert answer.message.tool_calls and answer.message.tool_calls[0].function.arguments == {"a": 1, "b": "e"}
    history = [*HI, answer.message, {"role": "tool", "tool_name": "add", "content": "3"}]
    await client(world).chat("tiny", history, tools=[add])
    prompt = bytes(token for token in world.engine.requests[-1].prompt if token < 256).decode()
    assert '"description": "Add two numbers."' in prompt and "<tool_response>\n3" in prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("think", "shown"), [(None, "hm"), (True, "hm"), ("high", "hm"), (False, "")])
async def test_thinking_is_told_apart(stream: bool, think: Any, shown: str) -> None:
    world = World(FakeEngine(saying("<think>hm</think>yes")), max_model_len=4096, reasoning_parser="qwen3")
    for path, asked in (("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "hi"})):
        answer = await post(world, path, think=think, stream=stream, **asked)
        rows = [json.loads(row) for row in answer.text.splitlines()]
        parts = [row.get("message", row) for row in rows]
        assert "".join(part.get("thinking", "") for part in parts).strip() == shown
        assert "".join(part.get("content", part.get("response", "")) for part in parts).strip() == "yes"


async def test_logprobs() -> None:
    answer = await client(World()).chat("tiny", HI, logprobs=True, top_logprobs=1, options={"num_predict": 2})
    assert answer.logprobs and [row.token for row in answer.logprobs] == ["h", "e"]
    assert [row.top_logprobs[0].token for row in answer.logprobs if row.top_logprobs] == ["A", "A"]


async def test_a_model_that_is_not_served_is_a_404() -> None:
    with pytest.raises(ollama.ResponseError, match="llama3") as caught:
        await client(World()).chat("llama3", HI)
    assert caught.value.status_code == 404


async def test_a_full_server_says_so() -> None:
    world = World()
    world.engine.full = True
    answer = await post(world, "/api/chat", messages=HI)
    assert answer.status_code == 429 and set(answer.json()) == {"error"} and answer.headers["Retry-After"] == "3"


async def test_an_engine_that_dies_ends_the_stream_with_its_error() -> None:
    world = World()
    world.engine.breaks = True
    world.engine.script = lambda request: [*list(saying("hello")(request))[:2]]
    wire = Wire(world, "/api/chat", {"model": "tiny", "messages": HI})
    last = json.loads((await wire.text(until='"error"')).splitlines()[-1])
    assert set(last) == {"error"} and "SIGKILL" in last["error"]
    await wire.task
    assert not wire.whole
