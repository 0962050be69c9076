"""Forced calls whose arguments are text: their grammars follow the schema, stay small, and refuse what is no schema."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.pure.api.test_forced_calls import FAMILIES, begin, vocabulary
from tests.pure.api.test_parsers import said
from weft.api.conversation.answer_grammar import answer_grammar
from weft.api.conversation.tools import ToolUse
from weft.api.parsers.choose import AnswerFormat
from weft.api.parsers.gemma_grammars import function_gemma
from weft.engine.sandbox.isolated import run_blocking
from weft.errors import RequestError

QWEN = next(item for item in FAMILIES.values() if item.name == "qwen3_coder")
GLM = next(item for item in FAMILIES.values() if item.name == "glm45")
PYTHONIC = next(item for item in FAMILIES.values() if item.name == "pythonic")
GEMMA = next(item for item in FAMILIES.values() if item.calls.call is function_gemma)
HERMES = next(item for item in FAMILIES.values() if item.name == "hermes")
TEXTUAL = [QWEN, GLM, PYTHONIC, GEMMA]
SPECIAL = pytest.mark.parametrize("special", [True, False], ids=["marks are tokens", "marks are text"])


def tools(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def one(part: Any, **beside: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": part}, "required": ["x"], "additionalProperties": False, **beside}


def takes(family: Any, parameters: Any, call: str, special: bool = True) -> bool:
    """True if the grammar lets a model write this call."""
    words = vocabulary(tuple(family.marks), special)
    matcher = begin(AnswerFormat(family), ToolUse(tools(parameters), "required"), words, several=False)
    ids = words.tokenizer.encode(call, add_special_tokens=False)
    return bool(matcher.count_valid(ids) == len(ids) and [matcher.accept(id) for id in ids] and matcher.ended)


def qwen(value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"


def glm(value: str) -> str:
    return f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


def gemma(members: str) -> str:
    return f"<start_function_call>call:f{{{members}}}<end_function_call>"


def size(family: Any, parameters: Any) -> int:
    words = vocabulary(tuple(family.marks), True)
    use = ToolUse(tools(parameters), "required")

    def make() -> str:
        return answer_grammar(AnswerFormat(family), use, None, words.tokenizer, "", several=False)

    return len(run_blocking(words.examiner.build(make)))


def problem(family: Any, parameters: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        takes(family, parameters, "")
    return caught.value


def arguments(family: Any, parameters: Any, call: str) -> Any:
    parser = AnswerFormat(family).parser("", tools(parameters))
    assert parser is not None
    ((_, _, given),) = said(parser.push(call) + parser.finish())[2]
    return json.loads(given)


@pytest.mark.parametrize("family", TEXTUAL, ids=lambda item: item.name)
def test_a_grammar_grows_with_its_schema_only(family: Any) -> None:
    def nested(wide: int, deep: int) -> Any:
        inner = nested(wide, deep - 1) if deep else {"type": "string"}
        return {"type": "object", "properties": {f"key{at}": inner if at < 2 else {} for at in range(wide)}}

    assert size(family, nested(40, 0)) < 2.5 * size(family, nested(20, 0))
    assert size(GEMMA, nested(10, 6)) < 60_000


def test_more_than_the_limit_is_refused_at_once() -> None:
    begun = time.thread_time()
    wide = {"type": "object", "properties": {f"key{at}": {"const": "x" * 600 + str(at)} for at in range(1000)}}
    assert problem(GEMMA, wide).code == "grammar-too-large"
    names = [{"allOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(40)]
    defs = {f"d{at}": part for at, part in enumerate([*names, {"type": "string"}])}
    with pytest.raises(RequestError):
        size(GEMMA, one({"$ref": "#/$defs/d0"}, **{"$defs": defs}))
    assert time.thread_time() - begun < 5


def test_an_argument_carries_only_the_definitions_it_reaches() -> None:
    defs = {f"d{at}": {"type": "object", "properties": {"a": {"const": "q" * 100}}} for at in range(30)}
    parts = {f"k{at}": {"$ref": f"#/$defs/d{at}"} for at in range(30)}
    assert size(QWEN, {"type": "object", "properties": parts, "$defs": defs}) < 20_000
    chain = {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}}, "b": {"type": "integer"}}
    assert takes(QWEN, one({"$ref": "#/$defs/a"}, **{"$defs": chain}), qwen("[1,2]"))


@SPECIAL
@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\(?[0-9]{3}\)?$", ["(123)", "123"], ["12", "x"]),
        ("^[^|]+$", ["ab"], ["a|b"]),
        ("^(a)|(b)$", ["ax", "xb"], ["xa", "bx"]),
        ("^a$|^b$", ["a", "b"], ["ab", "xa"]),
        ("(^a|b$)", ["ax", "xb"], ["xa"]),
        ("(?i)^abc$", ["aBc"], ["abcd"]),
        (r"^[\]|]{2}$", ["]|"], ["]"]),
        ("^a/b$", ["a/b"], ["ab"]),
        (r"\$$", ["x$"], ["x"]),
    ],
)
def test_a_pattern_holds_with_its_anchors(pattern: str, good: list[str], bad: list[str], special: bool) -> None:
    schema = one({"type": "string", "pattern": pattern})
    expected = [True] * len(good) + [False] * len(bad)
    assert [takes(QWEN, schema, qwen(text), special) for text in (*good, *bad)] == expected
    assert [takes(GLM, schema, glm(text), special) for text in (*good, *bad)] == expected


@pytest.mark.parametrize("family", [*TEXTUAL, HERMES], ids=lambda item: item.name)
@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": r"\bfoo\b"},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "minItems": 5, "maxItems": 2},
    ],
    ids=json.dumps,
)
def test_what_cannot_be_compiled_is_refused_as_in_formats_of_json(family: Any, part: Any) -> None:
    error = problem(family, one(part))
    assert (error.code, error.param) in [("invalid-grammar", "tools"), ("invalid-grammar", "structured_outputs")]
    assert family is HERMES or "$.properties.x" in str(error)


def test_huge_bounds_are_refused() -> None:
    assert problem(GEMMA, one({"type": "array", "minItems": 10**9})).code == "grammar-too-large"
    assert problem(QWEN, one({"type": "string", "minLength": 10**9})).code == "grammar-too-large"


def test_a_format_and_combinators_beside_a_type_hold() -> None:
    date = one({"type": "string", "format": "date"})
    assert [takes(QWEN, date, qwen(text)) for text in ("2024-02-29", "today")] == [True, False]
    quote = "<escape>{}<escape>"
    assert [takes(GEMMA, date, gemma("x:" + quote.format(text))) for text in ("2024-02-29", "today")] == [True, False]
    assert [takes(PYTHONIC, date, f"[f(x='{text}')]") for text in ("today",)] == [False]
    for part in (
        {"type": "string", "anyOf": [{"const": "a"}, {"maxLength": 0}]},
        {"type": "string", "allOf": [{"maxLength": 1}, {"pattern": "^a?$"}]},
    ):
        assert [takes(QWEN, one(part), qwen(text)) for text in ("a", "", "b", "aa")] == [True, True, False, False]
    assert not takes(QWEN, one({"type": "string", "const": "a"}), qwen("b"))


def test_gemma_follows_all_of_and_what_stands_beside_any_of() -> None:
    place = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema = one({"allOf": [{"$ref": "#/$defs/place"}], "description": "v1"}, **{"$defs": {"place": place}})
    assert [takes(GEMMA, schema, gemma(text)) for text in ("x:{n:1}", "x:{}", "x:1")] == [True, False, False]
    either = one(
        {
            **place,
            "required": [],
            "properties": {"n": {"const": 1}, "m": {"const": 2}},
            "anyOf": [{"required": ["n"]}, {"required": ["m"]}],
        }
    )
    texts = ("x:{n:1}", "x:{m:2}", "x:{}", "x:{n:1,m:2}")
    assert [takes(GEMMA, either, gemma(text)) for text in texts] == [True, True, False, True]


def test_gemma_tells_types_and_their_keywords_apart() -> None:
    schema = one({"type": ["string", "integer"], "allOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"minimum": 5}]})
    texts = ("x:<escape>ab<escape>", "x:7", "x:<escape>a<escape>", "x:4")
    assert [takes(GEMMA, schema, gemma(text)) for text in texts] == [True, True, False, False]


def test_gemma_writes_typed_maps() -> None:
    whole = one({"type": "object", "additionalProperties": {"type": "integer"}})
    assert [takes(GEMMA, whole, gemma(text)) for text in ("x:{a:1,b:2}", "x:{}", "x:{a:true}")] == [True, True, False]
    none = one({"type": "object", "additionalProperties": False})
    assert [takes(GEMMA, none, gemma(text)) for text in ("x:{}", "x:{a:1}")] == [True, False]


def test_what_stands_beside_a_reference_is_its_own() -> None:
    text = {"$ref": "#/$defs/t"}
    parts = {"a": {**text, "maxLength": 1}, "b": text, "c": {**text, "maxLength": 2}}
    schema = {"type": "object", "properties": parts, "required": [*parts], "$defs": {"t": {"type": "string"}}}

    def call(*texts: str) -> str:
        return gemma(",".join(f"{key}:<escape>{text}<escape>" for key, text in zip("abc", texts, strict=True)))

    tried = [("p", "qqqq", "rr"), ("pp", "q", "r"), ("p", "q", "rrr")]
    assert [takes(GEMMA, schema, call(*texts)) for texts in tried] == [True, False, False]


@pytest.mark.parametrize("wrap", [lambda inner: {"type": "array", "items": inner}, lambda inner: {"const": [inner]}])
def test_a_deep_schema_is_refused(wrap: Any) -> None:
    part: Any = {"type": "integer"}
    for _ in range(400):
        part = wrap(part) if "const" not in part else {"const": [part["const"]]}
    assert problem(GEMMA, one(part)).param == "tools"
    loop = {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}
    with pytest.raises(RequestError):
        size(GEMMA, one({"$ref": "#/$defs/a"}, **{"$defs": loop}))


def test_a_required_key_without_a_schema_takes_any_value() -> None:
    schema = {"type": "object", "required": ["x"]}
    assert takes(QWEN, schema, qwen("[1]")) and takes(GLM, schema, glm("5")) and takes(GEMMA, schema, gemma("x:5"))
    assert takes(PYTHONIC, schema, "[f(x=5)]") and not takes(PYTHONIC, schema, "[f()]")


@SPECIAL
@pytest.mark.parametrize("key", ["a ", "a:b", "a,b", " a", "", "ü"])
def test_gemmas_keys_come_back(key: str, special: bool) -> None:
    schema = {"type": "object", "properties": {key: {"const": {key: 1}}}, "required": [key]}
    written = key if key == "ü" else f"<escape>{key}<escape>"
    call = gemma(f"{written}:{{{written}:1}}")
    assert takes(GEMMA, schema, call, special)
    assert arguments(GEMMA, schema, call) == {key: {key: 1}}


@SPECIAL
def test_choices_are_empty_or_hold_a_mark(special: bool) -> None:
    calls = [(QWEN, qwen, "</parameter>"), (GLM, glm, "</arg_value>")]
    for family, write, mark in calls:
        schema = one({"enum": ["", f"a{mark}b", "c"]})
        texts = ("", "c", f"a{mark}b")
        assert [takes(family, schema, write(text), special) for text in texts] == [True, True, False]
        assert arguments(family, schema, write("")) == {"x": ""}
        assert mark in str(problem(family, one({"const": f"a{mark}b"})))
    schema = one({"enum": ["", "a<escape>b", "c"]})
    texts = ("", "c", "a<escape>b")
    assert [takes(GEMMA, schema, gemma(f"x:<escape>{text}<escape>"), special) for text in texts] == [True, True, False]
    assert arguments(GEMMA, schema, gemma("x:<escape><escape>")) == {"x": ""}
    assert "<escape>" in str(problem(GEMMA, one({"const": "a<escape>b"})))


@SPECIAL
def test_a_text_ends_where_the_parser_ends_it(special: bool) -> None:
    for part in ({"type": "string"}, {"type": "string", "maxLength": 99}):
        texts = ("a\nb", "a<b", "a</parameter>b", "a</parameter>")
        assert [takes(QWEN, one(part), qwen(text), special) for text in texts] == [True, True, False, False]


def test_a_schema_may_contain_itself() -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#"}, "n": {"type": "integer"}}, "required": []}
    values = ('{"n":1}', '{"x":{"n":2}}', '{"n":"1"}')
    assert [takes(QWEN, schema, qwen(value)) for value in values] == [True, True, False]
    assert [takes(GEMMA, schema, gemma(text)) for text in ("x:{x:{n:1}}", "x:{n:true}")] == [True, False]
