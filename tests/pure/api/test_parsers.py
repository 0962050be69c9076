"""Parsers of answers: golden answers of every family, however they are cut into pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.refusals import refuses
from weft.api.parsers.choose import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat, choose_format
from weft.api.parsers.json_text import MAX_DEPTH
from weft.api.parsers.reader import CallArguments, CallBegin, Content, Event, Reasoning
from weft.errors import ConfigError

ANSWERS = Path(__file__).parents[2] / "data" / "answers"
TOOLS = json.loads((ANSWERS / "tools.json").read_text())
CASES = [
    pytest.param(family, case, id=f"{family}: {case['name']}")
    for family in TOOL_FORMATS
    for case in json.loads((ANSWERS / f"{family}.json").read_text())
]
Said = tuple[str, str, list[list[Any]]]


def format_of(family: str, case: dict[str, Any]) -> AnswerFormat:
    reasoning = case.get("reasoning_parser")
    return AnswerFormat(TOOL_FORMATS[family], REASONING_FORMATS[reasoning] if reasoning else None)


def said(events: Iterable[Event]) -> Said:
    """Content, reasoning, and the id, name and arguments of each call."""
    content, reasoning = "", ""
    calls: list[list[Any]] = []
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegin(name, id):
                calls.append([id, name, ""])
            case CallArguments(text):
                calls[-1][2] += text
    return content, reasoning, calls


def parse(family: str, case: dict[str, Any], pieces: Iterable[str]) -> Said:
    parser = format_of(family, case).parser(case.get("prompt", ""), TOOLS)
    assert parser is not None
    events = [event for piece in pieces for event in parser.push(piece)]
    is_cut = any("partial" in call for call in case.get("calls", ()))
    return said(events + parser.finish(cut=is_cut))


def cut(text: str, draw: random.Random) -> list[str]:
    """The text in pieces: some of single letters, some long."""
    pieces = []
    while text:
        size = draw.choice((1, 1, 2, 3, 5, 8, 40))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize(("family", "case"), CASES)
def test_a_golden_answer(family: str, case: dict[str, Any]) -> None:
    content, reasoning, calls = parse(family, case, [case["text"]])
    assert (content, reasoning) == (case["content"], case["reasoning"])
    assert [call[1] for call in calls] == [call["name"] for call in case["calls"]]
    assert [call[0] for call in calls] == [call.get("id") for call in case["calls"]]
    for call, wanted in zip(calls, case["calls"], strict=True):
        if "partial" in wanted:
            assert call[2] == wanted["partial"]
        else:
            assert json.loads(call[2]) == wanted["arguments"]


def check_cuts(family: str, case: dict[str, Any], number: int) -> None:
    whole = parse(family, case, [case["text"]])
    draw = random.Random(case["name"])
    for _ in range(number):
        assert parse(family, case, cut(case["text"], draw)) == whole


@pytest.mark.parametrize(("family", "case"), CASES)
def test_the_pieces_of_an_answer_do_not_matter(family: str, case: dict[str, Any]) -> None:
    whole = parse(family, case, [case["text"]])
    for at in range(len(case["text"])):
        assert parse(family, case, [case["text"][:at], case["text"][at:]]) == whole
    check_cuts(family, case, 40)


@pytest.mark.long
@pytest.mark.parametrize("family", TOOL_FORMATS)
def test_the_pieces_of_ten_thousand_answers_do_not_matter(family: str) -> None:
    cases = [case.values[1] for case in CASES if case.values[0] == family]
    for case in cases:
        check_cuts(family, case, -(-10_000 // len(cases)))


@pytest.mark.parametrize(("family", "case"), CASES)
def test_an_answer_may_end_anywhere(family: str, case: dict[str, Any]) -> None:
    """A beginning says the beginning of what the whole says, but for what was held back."""
    whole = parse(family, case, [case["text"]])
    for at in range(len(case["text"])):
        parser = format_of(family, case).parser(case.get("prompt", ""), TOOLS)
        assert parser is not None
        content, reasoning, calls = said(parser.push(case["text"][:at]))
        assert whole[0].startswith(content) and whole[1].startswith(reasoning)
        assert [call[:2] for call in calls] == [call[:2] for call in whole[2][: len(calls)]]
        assert all(full[2].startswith(call[2]) for call, full in zip(calls, whole[2], strict=False))
        parser.finish()


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        ("pythonic", "[find(a='\\ud800', b='\\ud83d\\ude00', c='é')]", {"a": "\ufffd", "b": "\U0001f600", "c": "é"}),
        ("pythonic", "[find(a=1e999, b=[-1e999])]", {"a": "inf", "b": ["-inf"]}),
        ("gemma", "<|tool_call>call:f{a:1e999,b:NaN,c:2}<tool_call|>", {"a": "1e999", "b": "NaN", "c": 2}),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1e999</arg_value></tool_call>", {"a": "1e999"}),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>[NaN]</arg_value></tool_call>", {"a": "[NaN]"}),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>', {"a": "\ufffd"}),
    ],
)
def test_arguments_are_json_that_any_decoder_reads(family: str, text: str, arguments: dict[str, Any]) -> None:
    _, _, [call] = parse(family, {}, [text])
    assert msgspec.json.decode(call[2].encode()) == arguments


def test_arguments_that_are_nested_too_deeply_are_cut() -> None:
    _, _, [call] = parse("gemma", {}, ["<|tool_call>call:f{a:" + "[" * 3000 + "]" * 3000 + "}<tool_call|>"])
    value, depth = msgspec.json.decode(call[2])["a"], 0
    while value:
        value, depth = value[0], depth + 1
    assert 0 < depth < MAX_DEPTH


def test_text_of_an_answer_is_said_as_it_comes() -> None:
    parser = AnswerFormat().parser("", TOOLS)
    assert parser is not None
    assert [said(parser.push(piece))[0] for piece in ("Hel", "lo", " <", "b>")] == ["Hel", "lo", "", " <b>"]
    pieces = ["<tool_call>", '{"name": "now", "argu', 'ments": {"a', '": 1', "}}"]
    assert [said(parser.push(piece))[2] for piece in pieces[:2]] == [[], []]
    events = [event for piece in pieces[2:] for event in parser.push(piece)]
    assert events == [CallBegin("now"), CallArguments("{"), *map(CallArguments, ('"', "a", '"', ":", " ", "1", "}"))]


TEMPLATES = {
    "hermes": "{%- if tools %}<tool_call>{% endif %}",
    "qwen3_coder": "{% if tools %}<tool_call>\n<function=x>\n<parameter=y>{% endif %}",
    "llama3_json": "{% if tools %}<|python_tag|>{% endif %}",
    "pythonic": "{% if tools %}[func_name1(params_name1=params_value1)]{% endif %}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}",
    "deepseek_v3": "{% if tools %}<｜tool▁calls▁begin｜>```json{% endif %}",
    "deepseek_v31": "{% if tools %}<｜tool▁calls▁begin｜>{% endif %}",
    "openai": "{% if tools %}<|channel|>commentary<|message|>{% endif %}",
    "glm45": "{% if tools %}<tool_call>{n}\n<arg_key>{% endif %}",
    "kimi_k2": "{% if tools %}<|tool_calls_section_begin|>{% endif %}",
    "gemma": "{% if tools %}<start_function_call>{% endif %}",
}


@pytest.mark.parametrize("family", TOOL_FORMATS)
def test_a_template_tells_the_family(family: str) -> None:
    chosen = choose_format(TEMPLATES[family])
    assert (chosen.tools.name, chosen.in_prompt) == (family, True)
    assert choose_format("{{ messages }}", tools=family).tools.name == family


def test_a_template_tells_the_reasoning() -> None:
    assert choose_format("{{ messages }}") == AnswerFormat()
    qwen = choose_format("{{ '<think>' + x + '</think>' }}")
    assert qwen.reasoning is not None and qwen.reasoning.name == "qwen3" and not qwen.in_prompt
    kimi = choose_format(TEMPLATES["kimi_k2"] + "</think>").reasoning
    assert kimi is not None and kimi.name == "kimi_k2"
    harmony = choose_format(TEMPLATES["openai"]).reasoning
    assert harmony is not None and harmony.name == "openai_gptoss"
    named = choose_format(None, reasoning="deepseek_r1").reasoning
    assert named is not None and named.always


@pytest.mark.parametrize("flag", ["tool-call-parser", "reasoning-parser"])
def test_an_unknown_parser_is_an_error(flag: str) -> None:
    with refuses(ConfigError, "unknown-parser", f"--{flag}", "'qwen'", "'qwen3"):
        choose_format(None, **{"tools" if flag == "tool-call-parser" else "reasoning": "qwen"})
