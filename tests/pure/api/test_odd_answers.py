"""Calls as models really write them: ends that are missing or odd, marks within texts, several calls, broken JSON."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

import pytest

from tests.pure.api.test_parsers import CASES, TOOLS, cut, parse, said
from weft.api.parsers.choose import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat, choose_format
from weft.api.parsers.lenient_json import repaired
from weft.api.parsers.rules import schema_of

Calls = list[tuple[str, dict[str, Any]]]
NOW: Calls = [("now", {})]
BOTH: Calls = [("now", {}), ("save", {"path": "a"})]
QWEN_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
QUOTED = "<tool_call>\n<function=save>\n<parameter=path>\nb\n</parameter>\n</function>\n</tool_call>"


class Odd(NamedTuple):
    """An odd answer, and what it says."""

    family: str
    name: str
    text: str
    calls: Calls
    content: str = ""
    reasoning: str = ""
    parser: str | None = None
    prompt: str = ""


def qwen(*lines: str) -> str:
    """A call of `save` with these lines."""
    return "\n".join(["<tool_call>", "<function=save>", *lines])


ENDS = ("</parameter>", "</function>", "</tool_call>")
QWEN: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("an end of a parameter is missing", ("<parameter=path>", "a", "<parameter=text>", "b", *ENDS), {"text": "b"}),
    ("the end of the last parameter is missing", ("<parameter=path>", "a", *ENDS[1:]), {}),
    ("the end of the function is missing", ("<parameter=path>", "a", "</parameter>", "</tool_call>"), {}),
    ("both inner ends are missing", ("<parameter=path>", "a", "</tool_call>"), {}),
    ("all ends are missing", ("<parameter=path>", "a"), {}),
    ("the outer end is missing", ("<parameter=path>", "a", *ENDS[:2]), {}),
    ("the end has a slash too many", ("<parameter=path>", "a", "</parameter/>", *ENDS[1:]), {}),
    ("the end is of another name", ("<parameter=path>", "a", "</param>", *ENDS[1:]), {}),
    ("the end is cut", ("<parameter=path>", "a", "</parameter", *ENDS[1:]), {}),
    ("one line", ("<parameter=path>a<parameter=text>b</function></tool_call>",), {"text": "b"}),
    ("quotes around a key", ('<parameter="path">', "a", *ENDS), {}),
    ("an unknown key", ("<parameter=path>", "a", "</parameter>", "<parameter=x>", "1", *ENDS), {"x": 1}),
    (
        "the end within a text",
        ("<parameter=text>", "x = '</parameter>'", "y", "</parameter>", "<parameter=path>", "a", *ENDS),
        {"text": "x = '</parameter>'\ny"},
    ),
    (
        "all ends within a line of a text",
        ("<parameter=text>", "'</parameter></function></tool_call>'", "y", "</parameter>", "<parameter=path>a", *ENDS),
        {"text": "'</parameter></function></tool_call>'\ny"},
    ),
    (
        "another key within a text",
        ("<parameter=text>", "see <parameter=mode> and", "<parameter=b>", "</parameter>", "<parameter=path>a", *ENDS),
        {"text": "see <parameter=mode> and\n<parameter=b>"},
    ),
    (
        "a whole call within a text",
        ("<parameter=text>", "as in", QUOTED, "end", "</parameter>", "<parameter=path>", "a", *ENDS),
        {"text": f"as in\n{QUOTED}\nend"},
    ),
    (
        "calls of another form within a text",
        (
            "<parameter=text>",
            "as",
            *["<tool_call>", "{}", "</tool_call>"] * 2,
            "end",
            "</parameter>",
            "<parameter=path>a",
            *ENDS,
        ),
        {"text": "as" + "\n<tool_call>\n{}\n</tool_call>" * 2 + "\nend"},
    ),
    (
        "an outer end alone within a text",
        ("<parameter=text>", "as", "</tool_call>", "end", "</parameter>", "<parameter=path>a", *ENDS),
        {"text": "as\n</tool_call>\nend"},
    ),
    (
        "an opening mark alone within a text",
        ("<parameter=text>", "as", "<tool_call>", "end", "</parameter>", "<parameter=path>", "a", *ENDS),
        {"text": "as\n<tool_call>\nend"},
    ),
    (
        "marks that are indented",
        (
            "<parameter=text>",
            "<a>",
            "  <parameter=path>",
            " </function>",
            "</a>",
            "</parameter>",
            "<parameter=path>",
            "a",
            *ENDS,
        ),
        {"text": "<a>\n  <parameter=path>\n </function>\n</a>"},
    ),
    (
        "an end of a function within a text",
        ("<parameter=text>", "<function>", "</function>", "end", "</parameter>", "<parameter=path>", "a", *ENDS),
        {"text": "<function>\n</function>\nend"},
    ),
]
JSON_NOW, JSON_SAVE = '{"name": "now", "arguments": {}}', '{"name": "save", "arguments": {"path": "a"}}'
SEP = "<｜tool▁sep｜>"
KIMI = "<|tool_call_begin|>functions.%s:%d<|tool_call_argument_begin|>%s<|tool_call_end|>"
SAVED: Calls = [("save", {"path": "a"})]
SAVED_BOTH: Calls = [("save", {"path": "a", "text": "b, c"})]
JSON_BOTH = '{"name": "save", "arguments": {"path": "a",, "text": "b, c"}}'
TAGS = ("<tool_call>", "</tool_call>")
ODD = [
    *(Odd("qwen3_coder", name, qwen(*lines), [("save", {"path": "a", **more})]) for name, lines, more in QWEN),
    Odd(
        "qwen3_coder",
        "a key without an end",
        qwen("<parameter=path", "a", "</parameter>", "<parameter=text>", "b", *ENDS),
        [("save", {"text": "b"})],
        content="<parameter=path\na\n",
    ),
    Odd("qwen3_coder", "the first call has no end", f"{QWEN_NOW[:25]}\n{qwen('<parameter=path>', 'a', *ENDS)}", BOTH),
    Odd(
        "qwen3_coder",
        "no end of the first call's value",
        qwen("<parameter=path>", "a") + f"\n{QWEN_NOW}",
        [("save", {"path": "a"}), ("now", {})],
    ),
    Odd("qwen3_coder", "no end of the name", "<tool_call>\n<function=now\n</function>\n</tool_call>", NOW),
    Odd("qwen3_coder", "JSON within the tag", f"<tool_call>\n{JSON_SAVE}\n</tool_call>", SAVED),
    Odd("qwen3_coder", "JSON within the function", qwen('{"path": "a"}', *ENDS[1:]), SAVED),
    Odd("glm45", "JSON behind the name", '<tool_call>save\n{"path": "a"}\n</tool_call>', SAVED),
    Odd("qwen3_coder", "a function that is no tool", "I use <function=foo> here", [], "I use <function=foo> here"),
    Odd("qwen3_coder", "the mark as an end", f"{qwen('<parameter=path>', 'a', *ENDS[:2])}\n<tool_call>", SAVED),
    Odd("qwen3_coder", "text in the place of arguments", qwen("path: a", *ENDS[1:]), [], "*"),
    Odd("qwen3_coder", "arguments of another form", qwen('<parameter name="path">', "a", *ENDS), [], "*"),
    Odd("qwen3_coder", "text behind the call", f"{QWEN_NOW}\nDone.", NOW, "Done."),
    Odd(
        "qwen3_coder",
        "Python's spelling",
        "<tool_call><function=find><parameter=query>{'k': True, 'n': (1, None)}</parameter>"
        "<parameter=exact>TRUE</parameter></function></tool_call>",
        [("find", {"query": {"k": True, "n": [1, None]}, "exact": True})],
    ),
    Odd(
        "qwen3_coder",
        "an object for a text",
        "<tool_call><function=save><parameter=path>{'k': 1}</parameter></function></tool_call>",
        [("save", {"path": "{'k': 1}"})],
    ),
    Odd("hermes", "two calls in one tag", f"<tool_call>\n{JSON_NOW}\n{JSON_SAVE}\n</tool_call>", BOTH),
    Odd("hermes", "a list of calls", f"<tool_call>[{JSON_NOW}, {JSON_SAVE}]</tool_call>", BOTH),
    Odd("hermes", "no end of the first", f"<tool_call>{JSON_NOW}\n<tool_call>{JSON_SAVE}</tool_call>", BOTH),
    Odd("hermes", "no end", f"<tool_call>{JSON_SAVE}", SAVED),
    Odd("hermes", "the mark as an end", f"<tool_call>{JSON_NOW}<tool_call>\n<tool_call>{JSON_SAVE}<tool_call>\n", BOTH),
    Odd("hermes", "keys without quotes", "<tool_call>{name: 'save', arguments: {path: 'a', text: 'b, c'}}", SAVED_BOTH),
    Odd("hermes", "one key without quotes", JSON_SAVE.replace('"arguments"', "arguments").join(TAGS), SAVED),
    Odd("hermes", "a comment before the arguments", JSON_SAVE.replace(", ", ", /* x */ ").join(TAGS), [], "*"),
    Odd("hermes", "no bracket, no arguments", '<tool_call>{"name": "now"</tool_call>', NOW),
    Odd("hermes", "no name", '<tool_call>{"name": "", "arguments": {}}</tool_call>', [], "*"),
    Odd("hermes", "two commas", JSON_BOTH.replace(",,", ",,").join(TAGS), SAVED_BOTH),
    Odd("hermes", "no comma", JSON_BOTH.replace(",,", "").join(TAGS), SAVED_BOTH),
    Odd("hermes", "a bracket is missing", f"<tool_call>{JSON_SAVE[:-1]}\n</tool_call>", SAVED),
    Odd("hermes", "both brackets are missing", f"<tool_call>{JSON_SAVE[:-2]}\n</tool_call> So.", SAVED, "So."),
    Odd("hermes", "a bracket too many", f"<tool_call>{JSON_SAVE}}}\n</tool_call>", SAVED),
    Odd("hermes", "a fence", f"<tool_call>\n```json\n{JSON_SAVE}\n```\n</tool_call>", SAVED),
    Odd("hermes", "OpenAI's form", f'<tool_call>{{"type": "function", "function": {JSON_SAVE}}}</tool_call>', SAVED),
    Odd("hermes", "a misspelled key", JSON_SAVE.replace("arg", "ar").join(["<tool_call>", "</tool_call>"]), [], "*"),
    Odd("hermes", "an unknown tool", '<tool_call>{"name": "x", "arguments": {"a": 1}}</tool_call>', [("x", {"a": 1})]),
    Odd("hermes", "no tool", '<tool_call>{"name": "Ann", "age": 3}</tool_call>', [], "*"),
    Odd("hermes", "no end of the JSON", '<tool_call>\n{"name"', [], "*"),
    Odd(
        "hermes",
        "raw line breaks and quotes",
        '<tool_call>{"name": "save", "arguments": {"path": "a\n\tb", "text": "say "hi" \\d"}}</tool_call>',
        [("save", {"path": "a\n\tb", "text": 'say "hi" \\d'})],
    ),
    Odd(
        "hermes",
        "Python's spelling",
        "<tool_call>{'name': 'find', 'arguments': {'query': {'a': 'it\\'s \"x\"', 'b': None}, 'exact': True,}}",
        [("find", {"query": {"a": 'it\'s "x"', "b": None}, "exact": True})],
    ),
    Odd("glm45", "JSON within the tag", f"<tool_call>\n{JSON_SAVE}\n</tool_call>", SAVED),
    Odd(
        "glm45",
        "the end of a value is missing",
        "<tool_call>save\n<arg_key>path</arg_key>\n<arg_value>a\n<arg_key>text</arg_key>\n<arg_value>b</arg_value>\n</tool_call>",
        [("save", {"path": "a", "text": "b"})],
    ),
    Odd(
        "glm45",
        "the end of a key is missing",
        "<tool_call>save<arg_key>path\n<arg_value>a</arg_value></tool_call>",
        SAVED,
    ),
    Odd("glm45", "no end", "<tool_call>save<arg_key>path</arg_key><arg_value>a", SAVED),
    Odd(
        "glm45",
        "the end within a text",
        "<tool_call>save<arg_key>path</arg_key><arg_value>a</arg_value>b</arg_value></tool_call>",
        [("save", {"path": "a</arg_value>b"})],
    ),
    Odd(
        "glm45",
        "no end of the first call",
        "<tool_call>now\n<tool_call>save<arg_key>path</arg_key><arg_value>a</arg_value></tool_call>",
        BOTH,
    ),
    Odd("glm45", "no call", "Write <tool_call>a text</tool_call>", [], "Write <tool_call>a text</tool_call>"),
    Odd("openai", "no arguments", "<|channel|>commentary to=functions.now<|message|><|call|>", NOW),
    Odd("openai", "no message", "<|channel|>commentary to=functions.now <|constrain|>json<|call|>", NOW),
    Odd(
        "openai",
        "no end of the reasoning",
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hello<|return|>",
        [],
        "Hello",
        "Hm.",
    ),
    Odd("openai", "no object", "<|channel|>commentary to=python<|message|>print(1)<|call|>", [], "print(1)"),
    Odd("openai", "text without a header", "Hello<|return|>", [], "Hello"),
    Odd(
        "openai",
        "a raw line break",
        '<|channel|>commentary to=functions.save<|message|>{"path": "a\nb"}<|call|>',
        [("save", {"path": "a\nb"})],
    ),
    Odd("llama3_json", "a person", '{"name": "Ann", "age": 3}', [], "*"),
    Odd("llama3_json", "a person with parameters", '{"name": "Ann", "parameters": {"age": 3}}', [], "*"),
    Odd("llama3_json", "a tool's name alone", '{"name": "now"}', [], "*"),
    Odd("llama3_json", "a list", f"[{JSON_NOW}, {JSON_SAVE}]", BOTH),
    Odd("llama3_json", "a list of others", '[{"name": "Ann", "age": 3}]', [], "*"),
    Odd("llama3_json", "text behind", JSON_SAVE + " is the call", SAVED, "is the call"),
    Odd("pythonic", "no tool", "[print(a=1)]", [], "*"),
    Odd("pythonic", "a raw line break", "[save(path='a\nb')]", [("save", {"path": "a\nb"})]),
    Odd("mistral", "without a list", f"[TOOL_CALLS]{JSON_SAVE}", SAVED),
    Odd("mistral", "without the end of the list", f"[TOOL_CALLS][{JSON_NOW}, {JSON_SAVE}", BOTH),
    Odd("mistral", "no arguments", "[TOOL_CALLS]now[ARGS]", NOW),
    Odd("mistral", "spaces", '[TOOL_CALLS] save [ARGS] {"path": "a"}', SAVED),
    Odd("mistral", "text in the list", f"[TOOL_CALLS][{JSON_SAVE}, and more]", SAVED, "and more]"),
    Odd(
        "kimi_k2",
        "singular marks",
        f"<|tool_call_section_begin|>{KIMI % ('now', 0, '{}')}<|tool_call_section_end|>",
        NOW,
    ),
    Odd("kimi_k2", "no marks around", KIMI % ("now", 0, "{}") + KIMI % ("save", 1, '{"path": "a"}'), BOTH),
    Odd("kimi_k2", "no arguments", "<|tool_call_begin|>functions.now:0<|tool_call_end|>", NOW),
    Odd(
        "kimi_k2",
        "no end of the first",
        KIMI[:-17] % ("now", 0, "{}") + KIMI % ("save", 1, '{"path": "a"}'),
        BOTH,
    ),
    Odd(
        "deepseek_v3",
        "no fence",
        f'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{SEP}save\n{{"path": "a"}}<｜tool▁call▁end｜>',
        SAVED,
    ),
    Odd("deepseek_v3", "the form of hermes", f"<tool_call>\n{JSON_SAVE}\n</tool_call>", SAVED),
    Odd(
        "deepseek_v3",
        "the form of V3.1",
        f'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>save{SEP}{{"path": "a"}}<｜tool▁call▁end｜>',
        SAVED,
    ),
    Odd(
        "deepseek_v31",
        "a type",
        f'<｜tool▁call▁begin｜>function{SEP}save{SEP}{{"path": "a"}}<｜tool▁call▁end｜>',
        SAVED,
    ),
    Odd(
        "deepseek_v31",
        "no object",
        f"<｜tool▁call▁begin｜>save{SEP}text<｜tool▁call▁end｜>",
        [],
        f"<｜tool▁call▁begin｜>save{SEP}text",
    ),
    Odd(
        "gemma",
        "no end of the first",
        '<|tool_call>call:now{}<|tool_call>call:save{"path": "a"}<tool_call|>',
        BOTH,
    ),
    Odd(
        "gemma",
        "words without quotes",
        "<|tool_call>call:save{path:New York,text:True}<tool_call|>",
        [("save", {"path": "New York", "text": True})],
    ),
]
THINK = "<think>\n"
IN_REASONING = [
    Odd("qwen3_coder", "a call", f"I call it.\n{QWEN_NOW}", NOW, "", "I call it.", "qwen3", THINK),
    Odd("hermes", "a call", f"I call it.\n<tool_call>{JSON_NOW}</tool_call>", NOW, "", "I call it.", "qwen3", THINK),
    Odd("glm45", "a call", "I call it.\n<tool_call>now</tool_call>", NOW, "", "I call it.", "glm45", THINK),
    Odd("mistral", "a call", f"I call it.[TOOL_CALLS][{JSON_NOW}]", NOW, "", "I call it.", "deepseek_r1", THINK),
    Odd(
        "deepseek_v31",
        "a call",
        f"I call it.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now{SEP}{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        NOW,
        "",
        "I call it.",
        "deepseek_r1",
    ),
    Odd(
        "hermes",
        "a mark that is quoted, and a call",
        f"I write <tool_call> now.\n<tool_call>{JSON_NOW}</tool_call>",
        NOW,
        "",
        "I write <tool_call> now.",
        "qwen3",
        THINK,
    ),
    Odd("hermes", "a mark that is quoted", "I write <tool_call>", [], "", "I write <tool_call>", "qwen3", THINK),
    Odd(
        "hermes",
        "a call that is quoted",
        f"I write <tool_call>{JSON_NOW}</tool_call> or so",
        [],
        "",
        f"I write <tool_call>{JSON_NOW}</tool_call> or so",
        "qwen3",
        THINK,
    ),
    Odd(
        "hermes",
        "a call that is quoted, and an answer",
        f"I write <tool_call>{JSON_NOW}</tool_call>\n</think>\n\nHello",
        [],
        "Hello",
        f"I write <tool_call>{JSON_NOW}</tool_call>",
        "qwen3",
        THINK,
    ),
    Odd(
        "hermes",
        "a call, and the end",
        f"Hm.\n<tool_call>{JSON_NOW}</tool_call>\n</think>\n",
        NOW,
        "",
        "Hm.",
        "qwen3",
        THINK,
    ),
    Odd("mistral", "marks of its own", "[THINK]Hm.[/THINK]Hello", [], "Hello", "Hm.", "mistral"),
]


def check(odd: Odd, pieces: list[str]) -> None:
    case: dict[str, Any] = {"reasoning_parser": odd.parser, "prompt": odd.prompt}
    content, reasoning, calls = parse(odd.family, case, pieces)
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == odd.calls
    assert (content, reasoning) == (odd.text if odd.content == "*" else odd.content, odd.reasoning)


@pytest.mark.parametrize("odd", [pytest.param(odd, id=f"{odd.family}: {odd.name}") for odd in ODD + IN_REASONING])
def test_an_odd_answer(odd: Odd) -> None:
    """It says the same wherever it is cut into pieces."""
    check(odd, [odd.text])
    check(odd, list(odd.text))
    for at in range(len(odd.text)):
        check(odd, [odd.text[:at], odd.text[at:]])


INSERTED = ('"', "'", "\n", "{", "}", ",", ":", "]", "\\", "<", "</parameter>", "<tool_call>", "</tool_call>", " x ")


def damaged(text: str, draw: random.Random) -> str:
    """The text with parts left out, doubled or added."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        at, size = draw.randrange(len(text) + 1), draw.choice((1, 1, 2, 5, 12, 30))
        middle = draw.choice(("", "", text[at : at + size] * 2, text[at : at + size] + draw.choice(INSERTED)))
        text = text[:at] + middle + text[at + size :]
    return text


@pytest.mark.parametrize("family", TOOL_FORMATS)
def test_arguments_are_objects_in_json_however_an_answer_is_damaged(family: str) -> None:
    draw = random.Random(family)
    cases: list[Any] = [case.values[1] for case in CASES if case.values[0] == family]
    for _ in range(150):
        case = draw.choice(cases)
        text = damaged(case["text"], draw)
        whole = parse(family, {**case, "calls": []}, [text])
        assert parse(family, {**case, "calls": []}, cut(text, draw)) == whole, text
        for _, _, arguments in whole[2]:
            assert isinstance(json.loads(arguments), dict), text


HALF = 'x = "' + "a" * 40
CUT = {
    "hermes": '<tool_call>{"name": "save", "arguments": {"path": "' + HALF,
    "llama3_json": '{"name": "save", "parameters": {"path": "' + HALF,
    "mistral": '[TOOL_CALLS]save[ARGS]{"path": "' + HALF,
    "qwen3_coder": f"<tool_call>\n<function=save>\n<parameter=path>\n{HALF}",
    "glm45": f"<tool_call>save<arg_key>path</arg_key><arg_value>{HALF}",
    "kimi_k2": '<|tool_call_begin|>functions.save:0<|tool_call_argument_begin|>{"path": "' + HALF,
    "deepseek_v3": f'<｜tool▁call▁begin｜>function{SEP}save\n```json\n{{"path": "{HALF}',
    "deepseek_v31": f'<｜tool▁call▁begin｜>save{SEP}{{"path": "{HALF}',
    "openai": '<|channel|>commentary to=functions.save<|message|>{"path": "' + HALF,
}


@pytest.mark.parametrize("family", CUT)
def test_a_call_that_a_limit_cuts_stays_open(family: str) -> None:
    """Half of a file is no file: a client sees by the arguments that they are not all there."""
    parser = AnswerFormat(TOOL_FORMATS[family]).parser("", TOOLS)
    assert parser is not None
    _, _, [(_, name, arguments)] = said(parser.push(CUT[family]) + parser.finish(cut=True))
    assert name == "save"
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2', {"a": [1, 2]}),
        ("{a: b, 'c': (1, 2)}", {"a": "b", "c": [1, 2]}),
        ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
        ('{"a": "x"\n"b": 2}', {"a": "x", "b": 2}),
        ('{"a": , "b"}', {"a": None, "b": None}),
        ('{"a": "\\ud800", "b": "\\ud83d\\ude00\\x41\\u12"}', {"a": "\ufffd", "b": "\U0001f600A\\u12"}),
        ('{"a": NaN, "b": +1, "c": 007, "d": 1e999}', {"a": "NaN", "b": 1, "c": "007", "d": "1e999"}),
        ('{"a": [[1}', {"a": [[1]]}),
        ('["a"]', None),
        ('{"a": 1} and', None),
    ],
)
def test_json_is_repaired(text: str, value: Any) -> None:
    mended = repaired(text)
    assert (None if mended is None else json.loads(mended)) == value


def test_valid_json_is_passed_on_as_it_stands() -> None:
    text = '{ "a" : [ 1.50, -0e3, "\\u00e9 \\/ , \\" }: ", {"b":null} , [ ] ],\n "": true }'
    assert repaired(text) == text


def test_a_template_tells_the_form_of_its_reasoning() -> None:
    chosen = choose_format("{% for c in m.tool_calls %}<｜tool▁calls▁begin｜>{{ c }}\n```json{% endfor %}</think>")
    assert not chosen.in_prompt and chosen.tools.name == "deepseek_v3"
    assert chosen.reasoning is REASONING_FORMATS["qwen3"]
    assert choose_format("{{ '[/THINK]' }}").reasoning is REASONING_FORMATS["mistral"]


def test_a_tool_without_parameters_gets_no_arguments() -> None:
    without: list[dict[str, Any]] = [{}, {"parameters": None}, {"parameters": {"type": "object", "properties": {}}}]
    assert all(schema_of({"function": tool})["additionalProperties"] is False for tool in without)
    assert schema_of({"function": {"name": "f", "parameters": {"type": "object"}}}) == {"type": "object"}
