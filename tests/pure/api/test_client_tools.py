"""Tools of every kind that clients send, tool_choice in all its forms, and what agents' requests have beside them."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.pure.api.test_parsers import TOOLS
from tests.pure.api.test_responses import asked, prompt_of, streamed
from tests.pure.api.test_tools import world_saying
from tests.pure.worlds import HI, FakeEngine, World, events, refused, saying

SHELL = {"type": "local_shell"}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SPACES: list[Any] = [
    {"type": "function", "name": "wait", "parameters": {"type": "object", "properties": {}}},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Agents",
        "tools": [
            {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}},
            {"type": "function", "name": "wait", "parameters": {"type": "object", "properties": {}}},
        ],
    },
]
OPTIONS: dict[str, Any] = {"max_model_len": 8192}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def saying_world(text: str) -> World:
    return World(FakeEngine(saying(text)), **OPTIONS)


def subjects(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Subjects of the log lines about requests that are not answered as asked."""
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    return [one["subject"] for one in fields if "subject" in one]


def custom(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as a chat request has it."""
    return {"type": "custom", "custom": {name: value for name, value in tool.items() if name != "type"}}


@pytest.mark.parametrize(
    ("known", "name", "namespace"), [("spawn", "spawn", "agents"), ("agents__wait", "wait", "agents")]
)
async def test_tools_of_a_namespace_are_called_by_their_own_names(known: str, name: str, namespace: str) -> None:
    world = saying_world(call(known))
    response = await asked(world, tools=SPACES)
    item = response.output[0].model_dump()
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", name, namespace)
    done = [
        event.item.model_dump() for event in await streamed(world, tools=SPACES) if event.type.endswith("item.done")
    ]
    assert [(one["name"], one["namespace"]) for one in done] == [(name, namespace)]
    # The call comes back, and the model sees it by the name that it knows.
    history = [{"role": "user", "content": "hi"}, {**item, "id": None}]
    history.append({"type": "function_call_output", "call_id": item["call_id"], "output": "done"})
    await asked(world, tools=SPACES, input=history)
    assert f'"name": "{known}"' in prompt_of(world)


async def test_a_tool_beside_a_namespace_keeps_its_name() -> None:
    item = (await asked(saying_world(call("wait")), tools=SPACES)).output[0].model_dump()
    assert item["name"] == "wait" and item.get("namespace") is None


@pytest.mark.parametrize(
    ("choice", "known"), [({}, "wait"), ({"namespace": "agents"}, "agents__wait")], ids=["alone", "of a namespace"]
)
async def test_a_choice_means_the_tool_of_its_namespace(choice: dict[str, str], known: str) -> None:
    """A tool of a namespace does not stand in for one of its name outside."""
    world = saying_world(call(known))
    await asked(world, tools=SPACES, tool_choice={"type": "function", "name": "wait", **choice})
    grammar = world.engine.requests[-1].grammar
    assert [name for name in ("agents__wait", "wait") if f'"{name}' in grammar.replace("\\", "")] == [known]


async def test_a_custom_tool_takes_a_text() -> None:
    text = '*** Begin "Patch"\n+a\n'
    world = saying_world("so " + call("apply_patch", input=text) + call("apply_patch", input="b"))
    response = await asked(world, tools=[PATCH])
    calls = [item for item in response.output if item.type == "custom_tool_call"]
    assert [(one.name, one.input) for one in calls] == [("apply_patch", text), ("apply_patch", "b")]
    assert "start: /.+/" in prompt_of(world)
    seen = await streamed(world, tools=[PATCH])
    deltas = [event.delta for event in seen if event.type == "response.custom_tool_call_input.delta"]
    ends = [event.input for event in seen if event.type == "response.custom_tool_call_input.done"]
    assert deltas == ends == [text, "b"]
    assert [item.model_dump(exclude={"id", "call_id"}) for item in seen[-1].response.output] == [
        item.model_dump(exclude={"id", "call_id"}) for item in response.output
    ]
    back = [item.model_dump() for item in response.output]
    outputs = [{"type": "custom_tool_call_output", "call_id": one.call_id, "output": "ok"} for one in calls]
    await asked(world, tools=[PATCH], input=[{"role": "user", "content": "hi"}, *back, *outputs])
    assert json.dumps(text) in prompt_of(world)


async def test_a_custom_tool_of_a_chat() -> None:
    world = world_saying(call("apply_patch", input="a\nb"))
    named = {"type": "custom", "custom": {"name": "apply_patch"}}
    for choice in ("auto", named):
        message = (await world.chat(tools=[custom(PATCH)], tool_choice=choice)).json()["choices"][0]["message"]
        (made,) = message["tool_calls"]
        assert made == {"id": made["id"], "type": "custom", "custom": {"name": "apply_patch", "input": "a\nb"}}
    chunks = events(await world.chat(tools=[custom(PATCH)], stream=True))
    parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [(part["type"], part["custom"]) for part in parts] == [("custom", made["custom"])]
    history = [*HI, message, {"role": "tool", "tool_call_id": made["id"], "content": "ok"}]
    assert (await world.chat(tools=[custom(PATCH)], messages=history)).status_code == 200
    assert "a\\nb" in prompt_of(world)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "ab', "ab"),
        ('{"input": "ab", "why": 3}', "ab"),
        ('{"patch": "ab"}', "ab"),
        ('{"input": ["ab"]}', '["ab"]'),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
    ],
)
async def test_the_input_of_a_custom_tool_whatever_the_model_writes(arguments: str, text: str) -> None:
    answer = '<tool_call>\n{"name": "apply_patch", "arguments": ' + arguments
    (output,) = (await asked(saying_world(answer), tools=[PATCH], max_output_tokens=len(answer))).output
    assert (output.type, output.input) == ("custom_tool_call", text)


@pytest.mark.parametrize(("stop", "reason"), [("UT", "stop"), ("</tool_call>", "tool_calls")])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_that_a_stop_string_cuts_is_none_to_make(stop: str, reason: str, streams: bool) -> None:
    answer = await saying_world(call("get_weather", city="UTC")).chat(tools=TOOLS, stop=stop, stream=streams)
    choices = [chunk["choices"][0] for chunk in events(answer)] if streams else answer.json()["choices"]
    assert choices[-1]["finish_reason"] == reason


@pytest.mark.parametrize("streams", [False, True])
async def test_a_local_shell(streams: bool) -> None:
    world = saying_world(call("local_shell", command=["ls", "-l"], timeout_ms=5))
    if streams:
        output = (await streamed(world, tools=[SHELL]))[-1].response.output
    else:
        output = (await asked(world, tools=[SHELL])).output
    assert (output[0].type, output[0].action.command, output[0].action.timeout_ms) == (
        "local_shell_call",
        ["ls", "-l"],
        5,
    )
    result = {"type": "local_shell_call_output", "id": output[0].call_id, "output": "a file"}
    await asked(world, tools=[SHELL], input=[{"role": "user", "content": "hi"}, output[0].model_dump(), result])
    assert '["ls", "-l"]' in prompt_of(world).replace('["ls","-l"]', '["ls", "-l"]') and "a file" in prompt_of(world)


async def test_a_shell_s_call_without_a_command_stays_a_function_s() -> None:
    output = (await asked(saying_world(call("local_shell", cmd="ls")), tools=[SHELL])).output
    assert (output[0].type, json.loads(output[0].arguments)) == ("function_call", {"cmd": "ls"})


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "web_search", "external_web_access": True}],
        [{"type": "tool_search"}, {"type": "mcp", "server_label": "x"}],
    ],
    ids=str,
)
async def test_tools_of_a_provider_s_servers_are_left_out(tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    world = saying_world("hello")
    for _ in range(2):
        response = await world.client.post("/v1/responses", json={"model": "tiny", "input": "hi", "tools": tools})
        assert response.status_code == 200 and response.json()["tools"] == tools
    assert subjects(caplog) == [f"tool {tool['type']}" for tool in tools]


@pytest.mark.parametrize("choice", ["required", {"type": "web_search"}, {"type": "mcp", "server_label": "x"}], ids=str)
async def test_a_forced_tool_that_is_not_here_is_refused(choice: Any) -> None:
    body = {"model": "tiny", "input": "hi", "tools": [{"type": "web_search"}, {"type": "mcp"}], "tool_choice": choice}
    refused(await saying_world("").client.post("/v1/responses", json=body), 400, param="tool_choice")


async def test_a_server_tool_of_anthropic_s_is_left_out() -> None:
    world = saying_world("hello")
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    body = {"model": "tiny", "max_tokens": 9, "messages": HI, "tools": tools}
    assert (await world.client.post("/v1/messages", json=body)).status_code == 200


FUNCTION = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ("any", ["find", "get_weather", "now", "save"]),
        ({"type": "required"}, ["find", "get_weather", "now", "save"]),
        ({"type": "function", "name": "now"}, ["now"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [FUNCTION]}, ["now"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [FUNCTION]}}, ["now"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}, []),
        ({"type": "auto"}, []),
        ({"type": "none"}, []),
    ],
    ids=str,
)
async def test_forms_of_tool_choice(choice: Any, forced: list[str]) -> None:
    world = world_saying("a")
    assert (await world.chat(tools=TOOLS, tool_choice=choice)).status_code == 200
    grammar = world.engine.requests[-1].grammar
    assert sorted({tool["function"]["name"] for tool in TOOLS if tool["function"]["name"] in grammar}) == forced


async def test_tools_that_are_not_allowed_are_shown_and_not_called() -> None:
    world = world_saying(call("find", query=1) + call("now"))
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]}
    await world.chat(tools=TOOLS, tool_choice=choice)
    assert '"find"' in prompt_of(world)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]},
        {"type": "allowed_tools", "mode": "always", "tools": [FUNCTION]},
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "x"}] * 1025},
        {"type": "custom", "custom": {}},
    ],
    ids=lambda choice: str(choice)[:60],
)
async def test_a_choice_that_names_nothing_is_refused(choice: Any) -> None:
    refused(await world_saying("a").chat(tools=TOOLS, tool_choice=choice), 400, param="tool_choice")


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "rs_1"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x", "outcome": {"type": "exit"}}]},
        {"type": "mcp_list_tools", "server_label": "x", "tools": [{"name": "find", "input_schema": {}}]},
    ],
    ids=lambda item: item["type"],
)
async def test_items_that_live_elsewhere_are_left_out(item: Any, caplog: pytest.LogCaptureFixture) -> None:
    world = saying_world("hello")
    body = {"model": "tiny", "input": [item, {"role": "user", "content": "hi"}], "truncation": "auto"}
    response = await world.client.post("/v1/responses", json=body)
    assert response.status_code == 200 and response.json()["truncation"] == "disabled"
    assert set(subjects(caplog)) == {f"item {item['type']}", "truncation"}


async def test_arguments_that_are_an_object_already() -> None:
    world = saying_world("hello")
    made = {"type": "function_call", "call_id": "c", "name": "now", "arguments": {"zone": "UTC"}}
    await asked(world, input=[{"role": "user", "content": "hi"}, made])
    assert "UTC" in prompt_of(world)


async def test_a_namespace_can_be_allowed() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "agents"}]}
    world = saying_world("a")
    await asked(world, tools=SPACES, tool_choice=choice)
    grammar = world.engine.requests[-1].grammar
    assert "spawn" in grammar and "agents__wait" in grammar and '"wait' not in grammar


async def test_tools_that_come_as_an_item() -> None:
    world = saying_world(call("spawn"))
    items = [{"type": "additional_tools", "role": "developer", "tools": SPACES}, {"role": "user", "content": "hi"}]
    response = await world.client.post("/v1/responses", json={"model": "tiny", "input": items})
    assert response.json()["output"][0]["namespace"] == "agents"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/chat/completions", {"messages": HI, "max_completion_tokens": 5000}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 5000}),
    ],
    ids=str,
)
async def test_an_answer_without_room_is_refused_as_by_vllm(path: str, body: dict[str, Any]) -> None:
    world, given = World(max_model_len=64), {"model": "tiny", "max_tokens": 5000, **body}
    if "max_output_tokens" in body or "max_completion_tokens" in body:
        del given["max_tokens"]
    message = refused(
        await world.client.post(path, json=given), 400, param="max_tokens", code="context_length_exceeded"
    )
    assert "maximum context length is 64 tokens" in message
    clipping = World(max_model_len=64, clip_max_tokens=True)
    assert (await clipping.client.post(path, json=given)).status_code == 200


async def test_a_default_length_is_never_too_long() -> None:
    """The 16 tokens of a completion that asks for no length."""
    assert (await World(max_model_len=64).client.post("/v1/completions", json={"prompt": "a" * 60})).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 5000, "messages": HI}),
        ("/api/chat", {"messages": HI, "options": {"num_predict": 5000}}),
        ("/api/generate", {"prompt": "a", "raw": True, "options": {"num_predict": 5000}}),
    ],
    ids=str,
)
async def test_apis_whose_clients_always_send_a_length_clip_it(
    path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    world = World(max_model_len=64)
    for _ in range(2):
        assert (await world.client.post(path, json={"model": "tiny", **body})).status_code == 200
    assert subjects(caplog) == ["max_tokens"]


@pytest.mark.parametrize("characters", [60, 60_000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
async def test_a_full_context_in_the_words_that_agents_know(path: str, characters: int) -> None:
    messages = [{"role": "user", "content": "a" * characters}]
    given = {"input": messages} if path == "/v1/responses" else {"messages": messages, "max_tokens": 1}
    response = await World(max_model_len=48).client.post(path, json={"model": "tiny", **given})
    assert response.status_code == 400
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "maximum context length is 48 tokens" in message and message.startswith("prompt is too long: ")
    assert " tokens > 47 maximum" in message
    if path in ("/v1/chat/completions", "/v1/responses"):
        assert error["code"] == "context_length_exceeded"
    else:
        assert response.headers["x-weft-code"] == "context_length_exceeded"


@pytest.mark.parametrize("text", ["hello", call("now"), ""])
async def test_the_end_of_a_stream_comes_alone(text: str) -> None:
    chunks = events(await world_saying(text).chat(tools=TOOLS, stream=True, max_tokens=len(text) or None))
    last = chunks[-1]["choices"][0]
    assert last["delta"] == {} and last["finish_reason"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 4.0, "top_p": 0, "top_k": 40.0}),
        ("/v1/chat/completions", {"messages": HI, "prediction": {"type": "content", "content": "x"}}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 4.0, "top_p": 0.0}),
        ("/api/chat", {"messages": HI, "options": {"top_k": 40.0, "num_predict": 3.0, "top_p": 0}}),
        ("/v1/messages", {"messages": HI, "max_tokens": 4.0, "top_p": 0}),
    ],
    ids=str,
)
async def test_odd_and_harmless_values(path: str, body: dict[str, Any]) -> None:
    assert (await World().client.post(path, json={"model": "tiny", **body})).status_code == 200


async def test_a_number_with_a_fraction_is_none_of_tokens() -> None:
    refused(await World().chat(max_tokens=4.5), 400, param="max_tokens")


async def test_a_compressed_body_is_refused_by_name() -> None:
    body = gzip.compress(json.dumps({"model": "tiny", "messages": HI}).encode())
    for encoding in ("gzip", "zstd"):
        response = await World().client.post(
            "/v1/chat/completions", content=body, headers={"Content-Encoding": encoding}
        )
        assert encoding in refused(response, 415, code="unsupported_content_encoding")


async def test_the_list_of_models_with_a_slash_behind_it() -> None:
    world = World()
    assert (await world.client.get("/v1/models/")).json() == (await world.client.get("/v1/models")).json()


async def test_the_version_is_one_of_ollama_s_api() -> None:
    """VS Code's Copilot asks for 0.6.4, other clients for 0.14."""
    version = (await World().client.get("/api/version")).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 14, 0)
