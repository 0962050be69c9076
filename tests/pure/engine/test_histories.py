"""Histories as clients send them back, in templates that refuse them or leave a part of them out."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.letters import text_tools
from tests.pure.trait_templates import CHANGING, TEMPLATES
from tests.pure.worlds import FakeEngine, World, saying
from tests.refusals import refuses
from weft.api.conversation.tools import add_tools_message, call_form
from weft.api.parsers.choose import FORMATS, ToolFormat, choose_format
from weft.api.parsers.reader import CallArguments, CallBegin
from weft.engine.frontend.text_tools import TextTools
from weft.engine.templates.messages import result_text
from weft.engine.templates.template import ChatTemplate
from weft.errors import RequestError

Message = dict[str, Any]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": {"type": "object"}}}
    for name in ("first", "second")
]


def message(role: str, content: Any, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def call(name: str, value: str, id: str = "call_0123456789abcdef01234567") -> Message:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps({"value": value})}}


def result(content: Any, id: str = "call_0123456789abcdef01234567") -> Message:
    return message("tool", content, tool_call_id=id)


USER = message("user", "question")


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], {"bos_token": "<s>"})


def words_of(messages: list[Message]) -> list[str]:
    """The texts of messages that a model must see."""
    words = []
    for item in messages:
        words.append(item["content"] or "")
        for one in item.get("tool_calls", ()):
            words += [one["function"]["name"], json.loads(one["function"]["arguments"])["value"]]
    return words


def check_shown(name: str, messages: list[Message], tools: Any = None) -> str:
    text = template(name).render(messages, tools=tools)
    assert not [word for word in words_of(messages) if word not in text], text
    assert "None" not in text
    return text


HISTORIES: dict[str, list[Message]] = {
    "null content": [USER, message("assistant", None, tool_calls=[call("first", "a1")]), result("r1"), USER],
    "text beside a call": [
        USER,
        message("assistant", "Wait.", reasoning="hm", tool_calls=[call("first", "a1")]),
        result("r1"),
        message("assistant", "It is r1."),
        USER,
    ],
    "two calls": [
        USER,
        message("assistant", "", tool_calls=[call("first", "a1", "call_1"), call("second", "a2", "call_2")]),
        result("r2", "call_2"),
        result("r1", "call_1"),
        message("assistant", "Both."),
        USER,
    ],
    "reasoning alone": [USER, message("assistant", None, reasoning_content="hm"), USER],
    "a later system message": [message("system", "rules"), USER, message("assistant", "ok"), message("system", "more")],
    "a developer after the instructions": [message("system", "rules"), message("developer", "more"), USER],
    "a developer after the user": [message("system", "rules"), USER, message("developer", "more")],
    "a system message after a result": [
        USER,
        message("assistant", None, tool_calls=[call("first", "a1")]),
        result("r1"),
        message("system", "more"),
    ],
    "a call without a result": [USER, message("assistant", None, tool_calls=[call("first", "a1")]), USER],
    "a result without a call": [USER, result("r1"), message("assistant", "ok"), USER],
    "two users": [USER, message("user", "again"), message("assistant", "one"), message("assistant", "two"), USER],
}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_message_is_shown(name: str, history: str, tools: Any) -> None:
    check_shown(name, HISTORIES[history], tools)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Turns of any kind, each text a word of its own; the last one is not answered yet."""
    number = 0

    def word() -> str:
        nonlocal number
        number += 1
        return f"w{number}x"

    def instruct(most: int) -> list[Message]:
        roles = draw(st.lists(st.sampled_from(["system", "developer"]), max_size=most))
        return [message(role, word()) for role in roles]

    def turn_of_calls() -> list[Message]:
        ids = [f"call_{word()}" for _ in range(draw(st.integers(1, 3)))]
        made = message("assistant", draw(st.sampled_from([None, "", word()])))
        made["tool_calls"] = [call(word(), word(), id) for id in ids]
        if draw(st.booleans()):
            made[draw(st.sampled_from(["reasoning", "reasoning_content", "thinking"]))] = "hm"
        return [made, *(result(word(), id) for id in ids)]

    messages = instruct(2)
    for last in [False] * draw(st.integers(0, 3)) + [True]:
        messages += [message("user", word()), *instruct(1)]
        for _ in range(draw(st.integers(0, 2))):
            messages += turn_of_calls()
        if not last:
            messages.append(message("assistant", word()))
    return messages


@given(st.sampled_from(sorted(TEMPLATES)), conversations(), st.sampled_from([None, TOOLS]))
@settings(max_examples=100, deadline=None)
def test_no_message_of_any_conversation_vanishes(name: str, messages: list[Message], tools: Any) -> None:
    check_shown(name, messages, tools)


@given(st.sampled_from(sorted(set(TEMPLATES) - set(CHANGING))), conversations(), st.sampled_from([None, TOOLS]))
@settings(max_examples=100, deadline=None)
def test_a_conversation_that_grows_keeps_its_prefix(name: str, messages: list[Message], tools: Any) -> None:
    def rendered(end: int) -> str:
        return template(name).render(messages[:end], tools=tools, add_generation_prompt=False)

    asked = [place for place, item in enumerate(messages) if item["role"] == "assistant"]
    texts = [rendered(end) for end in (*asked, len(messages))]
    if name == "system first":  # tools stand at its end
        texts = [text.removesuffix(json.dumps(tools)) for text in texts]
    for earlier, later in pairwise(texts):
        assert later.startswith(earlier)


# Arguments that a model has written, and a text of them that stays.
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"zone": "U', "U"),
        ('{"text": "a\nb"}', "text"),
        ("[17]", "17"),
        ("null", ""),
        ("", ""),
        (None, ""),
        ('"only"', "only"),
        ("[" * 2000, "[[["),
        ({"zone": "UTC"}, "UTC"),
        ([17], "17"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_that_are_no_object(name: str, arguments: Any, shown: str) -> None:
    made = {"id": "c", "type": "function", "function": {"name": "first", "arguments": arguments}}
    history = [USER, message("assistant", None, tool_calls=[made]), result("12:00", "c"), USER]
    text = template(name).render(history)
    assert "first" in text and shown in text and "12:00" in text


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_has_the_name_that_the_template_reads(field: str) -> None:
    turn = [USER, message("assistant", None, **{field: "hm hm"}, tool_calls=[call("first", "a1")]), result("r1")]
    for name in ("harmony", "thinking"):
        assert "hm hm" in template(name).render(turn)
    assert template("thinking").render([USER, message("assistant", "</think>", **{field: ""})]).count("(") == 0


@pytest.mark.parametrize(
    "fields",
    [
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hm hm"}]},
                {"type": "text", "text": "a"},
            ]
        },
        {"content": [{"type": "reasoning", "reasoning": "hm hm"}, {"type": "text", "text": "a"}]},
        {"content": "a", "reasoning": [{"type": "text", "text": "hm hm"}]},
    ],
    ids=str,
)
def test_reasoning_in_parts(fields: Message) -> None:
    text = template("thinking").render([USER, {"role": "assistant", **fields}, USER])
    assert "(hm hm)a" in text


@pytest.mark.parametrize(
    "turn",
    [
        message("assistant", None, refusal="never"),
        message("assistant", [{"type": "refusal", "refusal": "never"}]),
        message("assistant", [{"type": "output_text", "text": "never"}]),
        message("assistant", None, function_call={"name": "first", "arguments": '{"value": "never"}'}),
        message("function", "never", name="first"),
        message("user", [{"type": "input_text", "text": "never"}]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["thinking", "no system"])
def test_other_forms_of_messages(name: str, turn: Message) -> None:
    assert "never" in template(name).render([USER, turn, USER])


@pytest.mark.parametrize("kind", [{}, [], None, 5, "image_url"], ids=str)
def test_parts_that_are_no_text_are_refused(kind: Any) -> None:
    with refuses(RequestError, "content-part-not-text"):
        template("thinking").render([message("user", [{"type": kind}])])


def test_parallel_calls_are_followed_by_their_own_results() -> None:
    text = check_shown("one call", HISTORIES["two calls"])
    places = [text.index(part) for part in ("a1", "r1", "a2", "r2", "Both.")]
    assert places == sorted(places)


def test_instructions_of_a_template_without_any_are_the_user_s_first_words() -> None:
    text = template("no system").render([message("system", "rules"), USER, message("assistant", "ok"), USER])
    assert text.startswith("<start>user\nrules\n\nquestion<end>\n<start>model\nok<end>\n")


def test_messages_that_a_template_shows_are_given_as_they_are() -> None:
    history = [message("system", "a"), message("system", "b"), USER, USER, *HISTORIES["two calls"]]
    text = template("prints").render(history)
    assert text.startswith("[system]a[system]b[user]question[user]question[user]question[assistant]<call>first")
    assert "[tool]r2[tool]r1" in text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}], "a\n[image: "),
        ([{"type": "input_image"}], "[image: "),
        ([{"type": "image", "source": {}}, {"type": "document"}], "[image: this model reads text only]\n[document: "),
        ([{"type": "document", "source": {"type": "text", "data": "words"}}], "words"),
        ([{"type": "search_result", "source": "x", "content": [{"type": "text", "text": "words"}]}], "words"),
        ([{"type": "text", "text": ""}], ""),
        ({"a": 1}, '{"a": 1}'),
        ([1, 2], "[1, 2]"),
        (5, "5"),
    ],
)
def test_results_that_are_no_text(content: Any, text: str) -> None:
    assert result_text(content).startswith(text)
    assert text in template("prints").render([USER, result(content)])


def test_a_template_that_refuses_every_form_says_why() -> None:
    refusing = ChatTemplate("{{ messages[0].content }}{{ raise_exception('never') }}")
    with refuses(RequestError, "chat-template-refused", "never") as error:
        refusing.render([USER])
    assert error.value.param == "messages"


def test_a_message_that_no_form_shows_is_refused() -> None:
    three = ChatTemplate("{% for m in messages[:3] %}{{ m.role }}: {{ m.content }}{% endfor %}")
    turns = [USER, message("assistant", "a"), USER]
    three.render(turns)
    with refuses(RequestError, "message-left-out", "assistant", "'b'"):
        three.render([*turns, message("assistant", "b"), USER])


# Tools


@pytest.mark.parametrize(
    "function",
    [
        {"name": "look"},
        {"name": "look", "description": None, "parameters": None},
        {"name": "look", "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2], "default": 1}}}},
        {"name": "look", "parameters": {"type": "object", "properties": {"n": True}}},
    ],
    ids=str,
)
def test_tools_without_what_is_optional(function: Message) -> None:
    text = template("harmony").render([USER], tools=[{"type": "function", "function": function}])
    assert "// look: " in text and "None" not in text


def test_tools_that_a_template_refuses_are_named() -> None:
    source = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + TEMPLATES["prints"]
    with refuses(RequestError, "chat-template-refused", "no tools") as error:
        ChatTemplate(source).render([USER], tools=TOOLS)
    assert error.value.param == "tools"


def test_the_template_for_tools() -> None:
    both = ChatTemplate(TEMPLATES["chatml"], {}, TEMPLATES["prints"])
    assert both.render([USER], tools=TOOLS).startswith('[{"type"') and both.render([USER]).startswith("<|im_start|>")


@pytest.mark.parametrize("family", FORMATS, ids=lambda item: f"{item.name} {'-'.join(item.signs)}")
def test_calls_as_text_are_those_that_the_family_s_parser_reads(family: ToolFormat) -> None:
    chosen = choose_format("".join(family.signs), family.name)
    called = [("first", {"value": "a b", "number": 3}), ("second", {})]
    parser = chosen.parser("", TOOLS)
    assert parser is not None
    calls: list[list[str]] = []
    for event in parser.push(call_form(family).write_calls(called)) + parser.finish():
        if isinstance(event, CallBegin):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.text
    assert [(name, json.loads(arguments)) for name, arguments in calls] == called


def test_instructions_and_history_have_the_form_of_the_parser() -> None:
    form = call_form(choose_format(TEMPLATES["deepseek"]).tools)
    asked = add_tools_message(HISTORIES["null content"], TOOLS, form)
    text = template("deepseek").render(asked, call_form=form)
    assert "<｜tool▁call▁begin｜>function<｜tool▁sep｜><function-name>\n```json\n<args-json-object>\n```" in text
    assert '<｜tool▁call▁begin｜>function<｜tool▁sep｜>first\n```json\n{"value": "a1"}\n```' in text
    assert "<tool_call>" not in text


# The end of a prompt that goes on


@pytest.mark.parametrize("text", ["", " ", "<", "|", "<|", "im", "end", "e", "</", "Hello ", "```json\n", "Hello"])
@pytest.mark.parametrize("name", ["chatml", "no system", "one call", "alternating", "harmony"])
def test_an_unfinished_message_ends_where_its_text_ends(name: str, text: str) -> None:
    strips = name in ("no system", "one call")
    prompt = template(name).render([USER, message("assistant", text)], add_generation_prompt=False, unfinished=True)
    begun = template(name).render([USER, message("assistant", "weft")], add_generation_prompt=False)
    assert prompt == begun[: begun.index("weft")] + (text.strip() if strips else text)


# Over HTTP


def world(name: str) -> World:
    tokenizer = text_tools().tokenizer
    assert tokenizer is not None
    return World(FakeEngine(saying("ok")), TextTools(tokenizer, template(name)), 8192)


def prompt_of(world: World) -> str:
    return bytes(token for token in world.engine.requests[-1].prompt if token < 256).decode()


CUT = '{"value": "cut'
CHAT: Message = {
    "messages": [
        message("system", "rules"),
        message("user", "question"),
        message("assistant", None, reasoning="hm", tool_calls=[call("first", "a1", "toolu_1")]),
        result([{"type": "text", "text": "r1"}, {"type": "image_url", "image_url": {"url": "data:"}}], "toolu_1"),
        message("assistant", None, tool_calls=[{"id": "x", "function": {"name": "second", "arguments": CUT}}]),
        result("r2", "x"),
        message("assistant", "answer"),
        message("developer", "later"),
        message("user", "more"),
    ],
    "tools": TOOLS,
}
MESSAGES: Message = {
    "max_tokens": 20,
    "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "rules"}],
    "messages": [
        message("user", "question"),
        message(
            "assistant",
            [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "first", "input": {"value": "a1"}},
                {"type": "tool_use", "id": "toolu_2", "name": "second", "input": {"value": "cut"}},
            ],
        ),
        message(
            "user",
            [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "r1"}, {"type": "image", "source": {"type": "base64"}}],
                },
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "r2"},
            ],
        ),
        message("assistant", "answer"),
        message("user", "more"),
        message("system", "later"),
    ],
    "tools": [{"name": "first", "input_schema": {"type": "object"}}, {"name": "second"}],
}
RESPONSES: Message = {
    "instructions": "rules",
    "input": [
        message("user", "question"),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "first", "arguments": '{"value": "a1"}'},
        {"type": "function_call", "call_id": "c2", "name": "second", "arguments": CUT},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "r1"}, {"type": "input_image", "image_url": "data:"}],
        },
        {"type": "function_call_output", "call_id": "c2", "output": "r2"},
        message("assistant", [{"type": "output_text", "text": "answer", "annotations": []}]),
        message("developer", [{"type": "input_text", "text": "later"}]),
        message("user", "more"),
    ],
    "tools": [{"type": "function", "name": "first"}, {"type": "function", "name": "second", "parameters": {}}],
}
OLLAMA: Message = {
    "stream": False,
    "messages": [
        message("system", "rules"),
        message("user", "question"),
        message(
            "assistant",
            "",
            thinking="hm",
            tool_calls=[
                {"function": {"name": "first", "arguments": {"value": "a1"}}},
                {"function": {"name": "second", "arguments": {"value": "cut"}}},
            ],
        ),
        message("tool", "r1", tool_name="first", images=["aGk="]),
        message("tool", "r2", tool_name="second"),
        message("assistant", "answer"),
        message("system", "later"),
        message("user", "more"),
    ],
    "tools": TOOLS,
}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/api/chat": OLLAMA,
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_long_history_over_each_api(name: str, path: str) -> None:
    here = world(name)
    answer = await here.client.post(path, json={"model": "tiny", **BODIES[path]})
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(here)
    words = ["rules", "question", "first", "a1", "r1", "second", "cut", "r2", "answer", "later", "more", "[image: "]
    assert not [word for word in words if word not in prompt], prompt
    assert "billing" not in prompt


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
async def test_the_last_message_of_the_assistant_goes_on(path: str) -> None:
    here = world("chatml")
    turns = [message("user", "question"), message("assistant", "so <")]
    body = {"model": "tiny", "messages": turns, "max_tokens": 5, "stream": False}
    assert (await here.client.post(path, json=body)).status_code == 200
    assert prompt_of(here).endswith("<|im_start|>assistant\nso <")


async def test_an_answer_begins_or_goes_on() -> None:
    both = {"add_generation_prompt": True, "continue_final_message": True}
    answer = await world("chatml").chat(messages=[USER, message("assistant", "so")], **both)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")
