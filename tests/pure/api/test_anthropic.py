"""/v1/messages with Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pytest

from tests.pure.letters import END, output
from tests.pure.worlds import FakeEngine, Wire, World, in_pieces, saying
from weft.engine.core.request import Output, Request

ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 2000, "messages": [{"role": "user", "content": "hi"}]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL: Any = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {"a": {}}}}
OPTIONS: dict[str, Any] = {"max_model_len": 4096}


@asynccontextmanager
async def client(world: World, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(world.app))
    async with anthropic.AsyncAnthropic(base_url="http://weft", api_key=key, http_client=http, max_retries=0) as api:
        yield api


def prompt_of(world: World) -> str:
    return bytes(token for token in world.engine.requests[-1].prompt if token < 256).decode()


async def asked(world: World, **fields: Any) -> Any:
    async with client(world) as api:
        return await api.messages.create(**{**ASK, **fields})


async def streamed(world: World, **fields: Any) -> tuple[list[Any], Any]:
    """The events, and the message that the client makes of them."""
    fields = {**ASK, **fields}
    async with client(world) as api, api.messages.stream(**fields) as stream:
        events = [event async for event in stream]
        return events, await stream.get_final_message()


async def test_a_message() -> None:
    message = await asked(World())
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert [block.text for block in message.content] == ["hello"]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    # Of the prompt, two tokens are from the cache of the fake engine.
    assert usage.cache_read_input_tokens == 2 and usage.output_tokens == 6 and usage.input_tokens > 0


async def test_the_events_of_a_stream() -> None:
    world = World()
    answer = await world.client.post("/v1/messages", json={**ASK, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in blocks]
    data = [json.loads(row.removeprefix("data: ")) for _, row in blocks]
    assert names == [row["type"] for row in data]
    deltas = ["content_block_delta"] * 5
    ends = ["content_block_stop", "message_delta", "message_stop"]
    assert names == ["message_start", "ping", "content_block_start", *deltas, *ends]
    assert data[0]["message"]["content"] == [] and data[0]["message"]["usage"]["output_tokens"] == 0
    assert data[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert data[-2]["usage"]["output_tokens"] == 6


async def test_streamed_and_whole_are_the_same() -> None:
    for script in (saying("hello"), saying("so " + CALL + CALL), saying("<think>hm</think>yes"), saying("")):
        options = {**OPTIONS, "reasoning_parser": "qwen3"}
        fields = {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
        whole = await asked(World(FakeEngine(script), **options), **fields)
        _, made = await streamed(World(FakeEngine(script), **options), **fields)
        hidden = {"parsed_output", "id"}
        told = [block.model_dump(exclude=hidden) for block in made.content]
        assert told == [block.model_dump(exclude=hidden) for block in whole.content]
        assert made.stop_reason == whole.stop_reason
        assert made.usage.output_tokens == whole.usage.output_tokens
        assert made.usage.input_tokens == whole.usage.input_tokens


async def test_system_as_text_and_as_blocks() -> None:
    world = World(**OPTIONS)
    await asked(world, system="be brief")
    text = prompt_of(world)
    cached = {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}
    await asked(world, system=[cached])
    assert prompt_of(world) == text and "system:be brief" in text


@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "hel", "max_tokens", None),
        ({"stop_sequences": ["lo", "x"]}, "hel", "stop_sequence", "lo"),
    ],
    ids=str,
)
async def test_ends(fields: dict[str, Any], text: str, reason: str, sequence: str | None) -> None:
    for message in (await asked(World(), **fields), (await streamed(World(), **fields))[1]):
        assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (text, reason, sequence)


async def test_parameters_reach_the_sampler() -> None:
    world = World()
    await asked(
        world, max_tokens=40, temperature=0.5, top_p=0.9, top_k=5, metadata={"user_id": "x"}, service_tier="auto"
    )
    params = world.engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 5, 40)


async def test_tools() -> None:
    world = World(FakeEngine(saying("so " + CALL)), **OPTIONS)
    message = await asked(world, tools=[TOOL])
    text, call = message.content
    assert (text.text.strip(), call.type, call.name, call.input) == ("so", "tool_use", "add", {"a": 1})
    assert message.stop_reason == "tool_use" and '"description": "adds"' in prompt_of(world)
    events, made = await streamed(World(FakeEngine(saying(CALL)), **OPTIONS), tools=[TOOL])
    assert made.content[0].input == {"a": 1} and made.stop_reason == "tool_use"
    parts = [event.partial_json for event in events if event.type == "input_json"]
    assert json.loads("".join(parts)) == {"a": 1} and len(parts) > 1


async def test_text_that_comes_with_the_end_of_a_call_stands_behind_it() -> None:
    world = World(FakeEngine(in_pieces(CALL[:-16], CALL[-16:] + "\nDone")), **OPTIONS)
    _, made = await streamed(world, tools=[TOOL])
    call, text = made.content
    assert call.input == {"a": 1} and (text.type, text.text.strip()) == ("text", "Done")


async def test_results_of_tools_go_back() -> None:
    world = World(**OPTIONS)
    use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "three"}]},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "none", "is_error": True},
        {"type": "text", "text": "go on"},
    ]
    history = [*ASK["messages"], {"role": "assistant", "content": [use]}, {"role": "user", "content": results}]
    await asked(world, tools=[TOOL], messages=history)
    prompt = prompt_of(world)
    order = ['"arguments": {"a": 1}', "three", "Error: none", "go on"]
    places = [prompt.find(text) for text in order]
    assert -1 not in places and places == sorted(places), prompt


@pytest.mark.parametrize(("choice", "made"), [("auto", True), ("any", True), ("tool", True), ("none", False)])
async def test_tool_choice(choice: str, made: bool) -> None:
    world = World(FakeEngine(saying(CALL)), **OPTIONS)
    given = {"type": choice} | ({"name": "add"} if choice == "tool" else {})
    message = await asked(world, tools=[TOOL], tool_choice=given)
    assert (message.stop_reason == "tool_use") == made
    assert bool(world.engine.requests[0].grammar) == (choice in ("any", "tool"))


async def test_one_call_where_parallel_ones_are_refused() -> None:
    world = World(FakeEngine(saying(CALL + CALL)), **OPTIONS)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = await asked(world, tools=[TOOL], tool_choice=choice)
    assert [block.type for block in message.content] == ["tool_use"]


@pytest.mark.parametrize(
    ("thinking", "types"),
    [
        (None, ["text"]),
        ({"type": "disabled"}, ["text"]),
        ({"type": "enabled", "budget_tokens": 1024}, ["thinking", "text"]),
        ({"type": "adaptive"}, ["thinking", "text"]),
    ],
)
async def test_thinking(thinking: Any, types: list[str]) -> None:
    script = saying("<think>hm</think>yes")
    fields = {} if thinking is None else {"thinking": thinking}
    for ask in (asked, streamed):
        world = World(FakeEngine(script), reasoning_parser="qwen3", **OPTIONS)
        made = await ask(world, **fields)
        message = made[1] if isinstance(made, tuple) else made
        assert [block.type for block in message.content] == types
        assert message.content[-1].text.strip() == "yes"


async def test_a_last_message_of_the_assistant_is_continued() -> None:
    world = World()
    await asked(world, messages=[*ASK["messages"], {"role": "assistant", "content": "I say"}])
    assert prompt_of(world).endswith("assistant:I say")


async def test_tokens_are_counted_as_the_prompt_has_them() -> None:
    world = World(**OPTIONS)
    async with client(world) as api:
        fields: dict[str, Any] = {"model": "tiny", "messages": ASK["messages"], "system": "s", "tools": [TOOL]}
        counted = (await api.messages.count_tokens(**fields)).input_tokens
        await api.messages.create(**fields, max_tokens=5)
        assert counted == len(world.engine.requests[0].prompt)
        long = [{"role": "user", "content": "x" * 10_000}]
        assert (await api.messages.count_tokens(model="tiny", messages=long)).input_tokens > 10_000


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"temperature": -1},
        {"messages": []},
        {"messages": [{"role": "robot", "content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
        {"tool_choice": {"type": "some"}},
        {"thinking": {"type": "maybe"}},
        {"output_config": {"effort": "huge"}},
        {"output_format": {"type": "xml"}},
        {"mcp_servers": [{"type": "url", "url": "https://a.example", "name": "a"}]},
        {"container": "c"},
        {"stop_sequences": ["x"] * 65},
    ],
    ids=str,
)
async def test_refusals(fields: dict[str, Any]) -> None:
    answer = await World().client.post("/v1/messages", json={**ASK, **fields})
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("earlier", [False, True])
async def test_a_schema_constrains_the_answer(earlier: bool) -> None:
    world = World(FakeEngine(saying('{"a": 1}')))
    wanted = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    fields = {"output_format": wanted} if earlier else {"output_config": {"format": wanted}}
    answer = await world.client.post("/v1/messages", json={**ASK, **fields, "mcp_servers": []})
    assert answer.status_code == 200, answer.text
    assert '"integer"' in world.engine.requests[0].grammar


async def test_a_body_without_max_tokens_is_refused() -> None:
    answer = await World().client.post("/v1/messages", json={"model": "tiny", "messages": ASK["messages"]})
    assert answer.status_code == 400 and "max_tokens" in answer.json()["error"]["message"]


async def test_keys_and_other_errors_are_in_anthropic_s_shape() -> None:
    world = World(api_key=("secret",))
    async with client(world, "wrong") as api:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await api.messages.create(**ASK)
    assert refused.value.response.json()["error"]["type"] == "authentication_error"
    async with client(world, "secret") as api:  # x-api-key
        assert (await api.messages.create(**ASK)).content
        with pytest.raises(anthropic.NotFoundError, match="other"):
            await api.messages.create(**{**ASK, "model": "other"})
        world.engine.full = True
        with pytest.raises(anthropic.RateLimitError) as caught:
            await api.messages.create(**ASK)
    assert caught.value.response.json()["error"]["type"] == "rate_limit_error"


async def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    def script(request: Request) -> Iterable[Output]:
        yield output(request.id, "a")

    world = World(FakeEngine(script))
    world.engine.breaks = True
    wire = Wire(world, "/v1/messages", {**ASK, "stream": True})
    text = await wire.text(until="event: error")
    await wire.task
    data = json.loads(text.strip().split("\n\n")[-1].split("data: ")[1])
    assert data["type"] == "error" and data["error"]["type"] == "api_error" and not wire.whole


async def test_a_token_that_is_the_end_only() -> None:
    def script(request: Request) -> Iterable[Output]:
        yield output(request.id, END, "stop")

    _, message = await streamed(World(FakeEngine(script)))
    assert [block.text for block in message.content] == [""]
