"""/v1/responses with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tests.pure.clients import openai_client
from tests.pure.letters import output
from tests.pure.worlds import FakeEngine, Wire, World, in_pieces, refused, saying
from weft.engine.core.request import Output, Request

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
OPTIONS: dict[str, Any] = {"max_model_len": 4096}
THINKING = saying("<think>hm</think>yes")


async def asked(world: World, **fields: Any) -> Any:
    async with openai_client(world) as api:
        return await api.responses.create(**{"model": "tiny", "input": "hi", **fields})


async def streamed(world: World, **fields: Any) -> list[Any]:
    async with openai_client(world) as api:
        return [event async for event in await api.responses.create(model="tiny", input="hi", stream=True, **fields)]


def prompt_of(world: World) -> str:
    return bytes(token for token in world.engine.requests[-1].prompt if token < 256).decode()


async def test_a_response() -> None:
    response = await asked(World(), instructions="be brief", metadata={"a": "b"})
    assert (response.object, response.status, response.model) == ("response", "completed", "tiny")
    assert response.output_text == "hello" and response.error is None and response.metadata == {"a": "b"}
    assert response.usage.output_tokens == 6 and response.usage.input_tokens_details.cached_tokens == 2
    assert response.usage.total_tokens == response.usage.input_tokens + 6
    assert response.instructions == "be brief" and response.text.format.type == "text"


async def test_the_events_of_a_text() -> None:
    events = await streamed(World())
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = ["output_text.delta"] * 5
    begins = ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds == [*begins, *deltas, *ends]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added, done = events[2].item, events[-2].item
    assert added.id == done.id and added.content == [] and added.status == "in_progress"
    assert done.content[0].text == events[-4].text == "hello" and done.status == "completed"
    assert events[0].response.output == [] and events[-1].response.output_text == "hello"
    assert events[-1].response.usage.output_tokens == 6 and events[0].response.usage is None


@pytest.mark.parametrize("script", [saying("hello"), saying("so " + CALL + CALL), THINKING, saying("")])
async def test_streamed_and_whole_are_the_same(script: Any) -> None:
    options = {**OPTIONS, "reasoning_parser": "qwen3"}
    whole = await asked(World(FakeEngine(script), **options), tools=[TOOL])
    events = await streamed(World(FakeEngine(script), **options), tools=[TOOL])
    last = events[-1].response
    hidden = {"id", "call_id"}
    assert [i.model_dump(exclude=hidden) for i in last.output] == [i.model_dump(exclude=hidden) for i in whole.output]
    assert last.usage == whole.usage and last.status == whole.status
    # What the events say adds up to what the response holds.
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in last.output]
    for event in events:
        if event.type.endswith(".delta") or event.type.endswith(".done"):
            assert event.output_index < len(last.output)


async def test_calls_of_tools() -> None:
    events = await streamed(World(FakeEngine(saying("so " + CALL + CALL)), **OPTIONS), tools=[TOOL])
    message, *calls = [event.item for event in events if event.type == "response.output_item.done"]
    assert message.content[0].text.strip() == "so" and len(calls) == 2 and calls[0].call_id != calls[1].call_id
    for call in calls:
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
        parts = [e.delta for e in events if e.type.endswith("arguments.delta") and e.item_id == call.id]
        assert "".join(parts) == call.arguments and len(parts) > 1
    kinds = [event.type for event in events]
    assert kinds.count("response.function_call_arguments.done") == 2


async def test_text_that_comes_with_the_end_of_a_call_stands_behind_it() -> None:
    script = in_pieces(CALL[:-16], CALL[-16:] + "\nDone")
    events = await streamed(World(FakeEngine(script), **OPTIONS), tools=[TOOL])
    call, message = events[-1].response.output
    assert json.loads(call.arguments) == {"a": 1} and message.content[0].text.strip() == "Done"


async def test_reasoning_is_an_item() -> None:
    world = World(FakeEngine(THINKING), reasoning_parser="qwen3", **OPTIONS)
    response = await asked(world, reasoning={"effort": "low", "summary": "auto"})
    thought, message = response.output
    assert (thought.type, thought.content[0].text.strip(), thought.summary) == ("reasoning", "hm", [])
    assert message.content[0].text.strip() == "yes"
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


async def test_a_conversation_with_calls_and_reasoning() -> None:
    world = World(**OPTIONS)
    history = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "input_text", "text": "first"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "calling", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "user", "content": "and?"},
    ]
    await asked(world, input=history, tools=[TOOL])
    assert "rules" in prompt_of(world)
    prompt = prompt_of(world)[prompt_of(world).index("first") :]
    order = ["first", "calling", '{"a": 1}', '{"a": 2}', "one", "two", "and?"]
    places = [prompt.find(text) for text in order]
    assert -1 not in places and places == sorted(places), prompt
    assert prompt.count("assistant:") == 2  # one turn of the model, and the answer


async def test_what_was_answered_goes_back_as_it_came() -> None:
    world = World(FakeEngine(saying("so " + CALL)), **OPTIONS)
    first = await asked(world, tools=[TOOL])
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    history = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output), result]
    second = await asked(world, tools=[TOOL], input=history)
    assert second.status == "completed" and "<tool_response>\n3" in prompt_of(world)


async def test_an_answer_that_is_cut_is_incomplete() -> None:
    for response in (
        await asked(World(), max_output_tokens=3),
        (await streamed(World(), max_output_tokens=3))[-1].response,
    ):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output_text == "hel" and response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("choice", "made"),
    [("auto", True), ("required", True), ("none", False), ({"type": "function", "name": "add"}, True)],
)
async def test_tool_choice(choice: Any, made: bool) -> None:
    world = World(FakeEngine(saying(CALL)), **OPTIONS)
    response = await asked(world, tools=[TOOL], tool_choice=choice)
    assert ("function_call" in [item.type for item in response.output]) == made
    assert bool(world.engine.requests[0].grammar) == (choice not in ("auto", "none"))


async def test_a_schema_constrains_the_answer() -> None:
    world = World(**OPTIONS)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    await asked(world, text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}})
    assert world.engine.requests[0].grammar


async def test_logprobs() -> None:
    response = await asked(World(), include=["message.output_text.logprobs"], top_logprobs=1, max_output_tokens=2)
    rows = response.output[0].content[0].logprobs
    assert [row.token for row in rows] == ["h", "e"] and [row.top_logprobs[0].token for row in rows] == ["A", "A"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "first"}, "truncation"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": []}, "messages"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": 5}, "input"),
        ({"max_output_tokens": 0}, "max_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "response_format"),
    ],
    ids=str,
)
async def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    world = World(**OPTIONS)
    refused(await world.client.post("/v1/responses", json={"model": "tiny", "input": "hi", **fields}), 400, param=param)
    assert not world.engine.requests


@pytest.mark.parametrize(
    "fields", [{"store": False}, {"truncation": "disabled"}, {"previous_response_id": None}], ids=str
)
async def test_what_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert (await asked(World(), **fields)).store is False


async def test_a_stream_that_breaks_says_so() -> None:
    def script(request: Request) -> Iterable[Output]:
        yield output(request.id, "a")

    world = World(FakeEngine(script))
    world.engine.breaks = True
    wire = Wire(world, "/v1/responses", {"model": "tiny", "input": "hi", "stream": True})
    text = await wire.text(until="event: error")
    await wire.task
    failed, told = [json.loads(block.split("data: ")[1]) for block in text.strip().split("\n\n")[-2:]]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert "SIGKILL" in failed["response"]["error"]["message"] and told["code"] == "engine_dead"
    assert told["sequence_number"] == failed["sequence_number"] + 1 and not wire.whole


async def test_the_client_s_stream_helper() -> None:
    async with openai_client(World()) as api, api.responses.stream(model="tiny", input="hi") as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_text == "hello"
