"""Tools, reasoning and constrained answers of the chat endpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.pure.api.test_parsers import TOOLS
from tests.pure.letters import TEMPLATE, text_tools
from tests.pure.worlds import HI, FakeEngine, World, events, refused, saying
from weft.engine.frontend.text_tools import TextTools
from weft.engine.structured.compiler import GrammarCompiler
from weft.engine.templates.template import ChatTemplate

CALLS: list[tuple[str, Any]] = [("get_weather", {"city": "Rome", "days": 3}), ("find", {"query": {"a": [1, "}"]}})]
HELLO = "Let me look."
ANSWER = HELLO + "".join(
    f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in CALLS
)
NAMED = {"type": "function", "function": {"name": "now"}}
BAD_PARAMETERS = {"type": "object", "properties": {"x": {"type": "objekt"}}}
BAD_TOOL = {"type": "function", "function": {"name": "a", "parameters": BAD_PARAMETERS}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def world_saying(text: str, template: str = TEMPLATE, **options: Any) -> World:
    tokenizer = text_tools().tokenizer
    assert tokenizer is not None
    tools = TextTools(tokenizer, ChatTemplate(template, tokenizer.special_tokens))
    return World(FakeEngine(saying(text)), tools, 8192, **options)


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


def prompt_of(world: World) -> str:
    return bytes(token for token in world.engine.requests[-1].prompt if token < 256).decode()


def grammar_of(world: World) -> str:
    return world.engine.requests[-1].grammar


def compiler_of(world: World) -> GrammarCompiler:
    """A compiler as the core has one."""
    front = world.service.frontend
    return GrammarCompiler(lambda: front.require_tokenizer("a grammar", ""), front.vocab, front._eos)


async def test_calls_and_the_text_before_them() -> None:
    world = world_saying(ANSWER)
    choice = (await world.chat(tools=TOOLS)).json()["choices"][0]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == (HELLO, "tool_calls")
    assert calls_of(message) == CALLS
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(id.startswith("call_") for id in ids)
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert grammar_of(world) == ""


async def test_streamed_calls_are_those_of_the_whole_answer() -> None:
    world = world_saying(ANSWER)
    whole = (await world.chat(tools=TOOLS)).json()["choices"][0]["message"]
    chunks = events(await world.chat(tools=TOOLS, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"]
    calls: list[dict[str, Any]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls") or ()):
        if part["index"] == len(calls):
            assert part["id"] and part["type"] == "function" and part["function"]["name"]
            calls.append({"name": part["function"]["name"], "arguments": ""})
        else:
            assert part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"}
        calls[part["index"]]["arguments"] += part["function"]["arguments"]
    assert calls == [call["function"] for call in whole["tool_calls"]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert sum("arguments" in str(delta) for delta in deltas) > 10  # as they come, not at the end


async def test_one_call_where_no_more_are_wanted() -> None:
    message = (await world_saying(ANSWER).chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"][0]
    assert [name for name, _ in calls_of(message["message"])] == ["get_weather"]


async def test_without_tools_a_call_is_text() -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        world = world_saying(ANSWER)
        choice = (await world.chat(**fields)).json()["choices"][0]
        assert choice["message"]["content"] == ANSWER and choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"] and "get_weather" not in prompt_of(world)


@pytest.mark.parametrize(
    ("choice", "reason", "forced"),
    [("required", "tool_calls", {"now", "get_weather", "find", "save"}), (NAMED, "stop", {"now"})],
)
async def test_a_forced_call_is_in_the_grammar(choice: Any, reason: str, forced: set[str]) -> None:
    world = world_saying('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    answer = (await world.chat(tools=TOOLS, tool_choice=choice)).json()["choices"][0]
    assert (answer["finish_reason"], calls_of(answer["message"])) == (reason, [("now", {})])
    names = {tool["function"]["name"] for tool in TOOLS}
    (grammar,) = json.loads(grammar_of(world))["grammars"]
    assert {name for name in names if rf"\"name\": \"{name}\"" in grammar["lark_grammar"]} == forced


async def test_a_template_without_tools_learns_of_them_in_the_system_message() -> None:
    world = world_saying("ok")
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    history = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "12:00"},
    ]
    await world.chat(tools=TOOLS, messages=history)
    prompt = prompt_of(world)
    assert prompt.startswith("system:Be brief.\n\n# Tools") and json.dumps(TOOLS[0]) in prompt
    assert 'assistant:<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in prompt
    assert "user:<tool_response>\n12:00\n</tool_response>" in prompt


async def test_a_template_with_tools_shows_them_itself() -> None:
    world = world_saying("[TOOL_CALLS]now[ARGS]{}", "{% if tools %}T={{ tools|length }}[TOOL_CALLS][ARGS]{% endif %}")
    answer = (await world.chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert prompt_of(world).startswith("T=4") and calls_of(answer) == [("now", {})]
    assert len(answer["tool_calls"][0]["id"]) == 9


THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}<think></think>{% endif %}"
)


async def test_reasoning_is_split_off() -> None:
    world = world_saying("<think>Hm, 1+1.</think>\n\nTwo", THINKING)
    message = (await world.chat()).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("Two", *["Hm, 1+1."] * 2)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(await world.chat(stream=True))]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Two"
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm, 1+1."
    hidden = (await world.chat(include_reasoning=False)).json()["choices"][0]["message"]
    assert "reasoning" not in hidden and hidden["content"] == "Two"


async def test_an_effort_of_none_turns_reasoning_off() -> None:
    world = world_saying("Two", THINKING)
    assert (await world.chat(reasoning_effort="none")).json()["choices"][0]["message"]["content"] == "Two"
    assert prompt_of(world).endswith("<think></think>")
    await world.chat(reasoning_effort="low")
    assert not prompt_of(world).endswith("</think>")


async def test_a_parser_by_name() -> None:
    world = world_saying("[now()]", tool_call_parser="pythonic", enable_auto_tool_choice=True)
    assert calls_of((await world.chat(tools=TOOLS)).json()["choices"][0]["message"]) == [("now", {})]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_schema_in_every_spelling(path: str, fields: dict[str, Any]) -> None:
    world = world_saying("{}")
    body = {"messages": HI} if "chat" in path else {"prompt": "hi"}
    assert (await world.post(path, {**body, **fields})).status_code == 200
    (grammar,) = json.loads(grammar_of(world))["grammars"][-1:]
    assert grammar["json_schema"]["properties"] == SCHEMA["properties"]


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"response_format": {"type": "json_object"}}, '"json_schema": {"type": "object"'),
        ({"guided_regex": "a+"}, "/a+/"),
        ({"guided_choice": ["a", "b"]}, r"\"a\" | \"b\""),
        ({"guided_grammar": 'root ::= "x"'}, r"start: \"x\""),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, "/a+/"),
    ],
)
async def test_other_constraints(fields: dict[str, Any], part: str) -> None:
    world = world_saying("a")
    assert (await world.chat(**fields)).status_code == 200 and part in grammar_of(world)


async def test_reasoning_comes_before_a_constrained_answer() -> None:
    world = world_saying("a", THINKING)
    await world.chat(guided_regex="a+")
    grammars = compiler_of(world)

    def follows(text: str) -> bool:
        matcher = grammars.compile(grammar_of(world), []).result()
        return matcher.count_valid(list(text.encode())) == len(text)

    assert follows("<think>free</think>\n\naa") and follows("aa") and not follows("<think>free</think>b")
    await world.chat(guided_regex="a+", reasoning_effort="none")
    assert follows("aa") and not follows("<th")


async def test_a_tool_call_or_the_wanted_answer() -> None:
    world = world_saying("a")
    await world.chat(tools=TOOLS, guided_regex="a+")
    matcher = compiler_of(world).compile(grammar_of(world), []).result()
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x", "days": 3}}\n</tool_call>'
    for text, valid in ((call, True), ("aa", True), ("b", False), (call.replace("3", "10"), False)):
        assert (matcher.count_valid(list(text.encode())) == len(text)) == valid


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "then"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom", "name": "a"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools"),
        ({"tools": TOOLS * 300}, "tools"),
        ({"tools": [BAD_TOOL], "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
            "response_format",
        ),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
    ],
)
async def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    world = world_saying("a")
    assert refused(await world.chat(**fields), param=param)
    assert not world.engine.requests
