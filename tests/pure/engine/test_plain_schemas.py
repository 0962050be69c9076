"""Schemas as generators write them: what asks nothing is no reason to refuse, and each answer follows its schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from tests.pure.api.test_forced_calls import vocabulary, walk
from weft.engine.core.params import StructuredOutputsParams
from weft.engine.structured.finite_names import names_of
from weft.engine.structured.grammar import body_of, grammar_text
from weft.engine.structured.plain_schemas import MAX_BOUND, plain_schema
from weft.engine.structured.references import as_address, steps_of
from weft.errors import RequestError

BOOLEAN, INTEGER, TEXT = {"type": "boolean"}, {"type": "integer"}, {"type": "string", "maxLength": 3}
FORMATS = [
    *(
        "path",
        "file-path",
        "directory-path",
        "password",
        "binary",
        "byte",
        "json-string",
        "ipv4network",
        "ipvanyaddress",
    ),
    *("uri-reference", "iri", "url", "regex", "base64", "base64url", "jwt", "color", "textarea", "idn-email", "cuid2"),
    *("json-pointer", "uri-template", "decimal", "char", "phone", "date-time-local", "int64", "uint8", "double"),
]


def holding(value: Any, **more: Any) -> dict[str, Any]:
    """A schema of an object that has to have such a value."""
    return {"type": "object", "properties": {"a": value}, "required": ["a"], "additionalProperties": False, **more}


ASKS_NOTHING: dict[str, Any] = {
    **{f"format {name}": holding({**TEXT, "format": name}) for name in FORMATS},
    "format without a type": holding({"format": "int64", "enum": [1]}),
    "uniqueItems false": holding({"type": "array", "items": BOOLEAN, "maxItems": 2, "uniqueItems": False}),
    "one item is unique": holding({"type": "array", "items": BOOLEAN, "maxItems": 1, "uniqueItems": True}),
    "no item has to be": holding({"type": "array", "items": BOOLEAN, "maxItems": 1, "contains": {}, "minContains": 0}),
    "unevaluatedProperties": holding(BOOLEAN, unevaluatedProperties=False),
    "unevaluatedProperties alone": {**holding(BOOLEAN, unevaluatedProperties=False), "additionalProperties": False},
    "unevaluatedItems": holding({"type": "array", "prefixItems": [BOOLEAN], "items": False, "unevaluatedItems": False}),
    "empty keywords": holding(
        BOOLEAN, dependentRequired={}, dependencies={}, dependentSchemas={}, patternProperties={}
    ),
    "if without then": holding({**TEXT, "if": {"minLength": 1}}),
    "not false": holding({**BOOLEAN, "not": False}),
    "null keywords": holding({**TEXT, "pattern": None, "minLength": None, "default": None}),
    "whole floats": holding({"type": "string", "minLength": 1.0, "maxLength": 2.0}),
    "names of a record": holding(
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": BOOLEAN, "maxProperties": 0}
    ),
    "names of an enum": holding(
        {"type": "object", "propertyNames": {"type": "string", "enum": ["x", "y"]}, "additionalProperties": BOOLEAN}
    ),
    "names of a pattern": holding(
        {"type": "object", "propertyNames": {"pattern": "^[xy]$"}, "additionalProperties": BOOLEAN}
    ),
    "largest double": holding({"type": "number", "maximum": 1.7976931348623157e308}),
    "largest float": holding({"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}),
    "1e22": holding({"type": "number", "minimum": 0, "maximum": 1e22}),
    "int64": holding({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
    "uint64": holding({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}),
    "uint32 of schemars": holding({"type": "integer", "format": "uint32", "minimum": 0.0}),
    "annotations": holding(
        {
            **BOOLEAN,
            "title": "A",
            "$comment": "c",
            "examples": [True],
            "deprecated": True,
            "readOnly": True,
            "nullable": True,
            "contentEncoding": "base64",
            "contentMediaType": "image/png",
            "$anchor": "a",
            "x-order": 1,
            "xml": {},
        },
        **{"$id": "https://example.org/a", "discriminator": {"propertyName": "a"}, "externalDocs": {}},
    ),
}
for address in (
    "http://json-schema.org/schema#",
    "https://json-schema.org/draft-07/schema#",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2020-12/schema#",
    "https://spec.openapis.org/oas/3.1/dialect/base",
    "https://example.org/own-dialect",
):
    ASKS_NOTHING[f"$schema {address}"] = holding(BOOLEAN, **{"$schema": address})
for name in ("R<s>", "Größe", "a b", "List[int]", "a/b", "Map~x", "50%", "{}", "a^b", "`1", "a|b"):
    escaped = name.replace("~", "~0").replace("/", "~1")
    ASKS_NOTHING[f"$ref {name}"] = holding({"$ref": f"#/$defs/{escaped}"}, **{"$defs": {name: BOOLEAN}})
ASKS_NOTHING["$ref escaped"] = holding({"$ref": "#/definitions/a%20b%C3%BC"}, definitions={"a bü": BOOLEAN})
ASKS_NOTHING["$ref to the whole"] = {**holding({"anyOf": [{"$ref": "#"}, {"type": "null"}]})}
ASKS_NOTHING["$ref by name"] = {"$id": "T0", **holding({"type": "array", "items": {"$ref": "T0"}, "maxItems": 1})}

PATTERNS: dict[str, Any] = {
    "its own property": holding(
        {"type": "integer", "minimum": 0, "maximum": 100}, patternProperties={"^a$": {"multipleOf": 5}}
    ),
    "an optional property": {
        "type": "object",
        "properties": {"a": INTEGER},
        "additionalProperties": False,
        "patternProperties": {"^a$": {"type": "integer", "maximum": 9}},
    },
    "two names": {"type": "object", "additionalProperties": False, "patternProperties": {"^(a|b)$": INTEGER}},
    "two needed names": {
        "type": "object",
        "required": ["a", "b"],
        "additionalProperties": False,
        "patternProperties": {"^(?:a|b)$": INTEGER},
    },
    "a class": {"type": "object", "additionalProperties": False, "patternProperties": {"^[ab]_?\\d$": BOOLEAN}},
    "two patterns": {
        "type": "object",
        "additionalProperties": False,
        "patternProperties": {
            "^a$|^b$": {"type": "integer", "minimum": 1},
            "^[bc]$": {"type": "integer", "maximum": 5},
        },
    },
    "names without end": holding(INTEGER, patternProperties={"^a": {"type": "integer", "maximum": 9}}),
    "none": {"type": "object", "additionalProperties": False, "patternProperties": {"^a$": False}},
}


def grammar_of(schema: Any) -> str:
    return grammar_text(body_of(StructuredOutputsParams.convert({"json": schema})))


@pytest.mark.parametrize("name", [*ASKS_NOTHING, *PATTERNS])
def test_answers_follow_the_schema(name: str) -> None:
    schema = ASKS_NOTHING.get(name, PATTERNS.get(name))
    words, draw = vocabulary((), False), random.Random(name)
    for _ in range(8 if name in PATTERNS else 2):
        answer = json.loads(walk(words.compiler.compile(grammar_of(schema), []).result(), words, draw))
        if not name.startswith(("$schema", "$ref", "null")):  # which jsonschema would fetch, or refuses
            jsonschema.validate(answer, schema)


@pytest.mark.parametrize(
    "schema",
    [
        holding({"type": "array", "items": INTEGER, "uniqueItems": True}),
        holding({"type": "array", "contains": INTEGER}),
        holding({**TEXT, "not": {"const": "a"}}),
        holding({"if": {"type": "string"}, "then": {"minLength": 1}}),
        holding({"type": "object", "propertyNames": {"maxLength": 3}}),
        holding({"allOf": [{"type": "object", "properties": {"b": TEXT}}], "unevaluatedProperties": False}),
        {"type": "object", "dependentRequired": {"a": ["b"]}},
    ],
)
def test_keywords_that_ask_something_stay(schema: Any) -> None:
    """They are refused by the compiler."""
    with pytest.raises(RequestError) as caught:
        vocabulary((), False).compiler.compile(grammar_of(schema), []).result()
    assert caught.value.code == "invalid-grammar"


def test_overlapping_schemas_of_one_of_are_refused_in_a_users_words() -> None:
    with pytest.raises(RequestError) as caught:
        vocabulary((), False).compiler.compile(grammar_of({"oneOf": [INTEGER, {"type": "number"}]}), []).result()
    assert "oneOf" in str(caught.value) and "coerce" not in str(caught.value)


def test_bounds() -> None:
    assert plain_schema({"minimum": 3, "exclusiveMinimum": True}) == {"exclusiveMinimum": 3}
    assert plain_schema({"maximum": 3, "exclusiveMaximum": False}) == {"maximum": 3}
    assert plain_schema({"exclusiveMaximum": 1e300, "minimum": -1e300}) == {
        "exclusiveMaximum": MAX_BOUND,
        "minimum": -MAX_BOUND,
    }
    for beyond in (1e20, 10**400):
        with pytest.raises(RequestError) as caught:
            grammar_of({"type": "number", "minimum": beyond})
        assert caught.value.code == "invalid-grammar"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("^a$", {"a"}),
        ("^(a|b)$", {"a", "b"}),
        ("^a$|^b$", {"a", "b"}),
        ("(?:^a$|^b$)", {"a", "b"}),
        ("^[a-c]\\.x?$", {"a.", "b.", "c.", "a.x", "b.x", "c.x"}),
        ("^(ab){1,2}$", {"ab", "abab"}),
        ("^$", {""}),
        ("^a|b$", None),
        ("a", None),
        ("^a", None),
        ("^a*$", None),
        ("^.$", None),
        ("^[^a]$", None),
        ("^\\w$", None),
        ("^(?=a)a$", None),
        ("^[a-z]{9}$", None),
        ("^a{999999999}$", None),
        ("^(a$", None),
        ("^a$b", None),
        ("^" + "(" * 50 + "a" + ")" * 50 + "$", None),
        ("^" + "a?" * 60 + "$", None),
        ("^" + "a?" * 8 + "$", {"a" * count for count in range(9)}),
    ],
)
def test_names_of_patterns(pattern: str, names: set[str] | None) -> None:
    assert names_of(pattern) == names


def test_references() -> None:
    assert steps_of("#/$defs/a%20b~1c~0") == ["$defs", "a b/c~"]
    assert steps_of("#") == steps_of("other#/x") == []
    assert as_address("#/$defs/List[ü]%20 100%") == "#/$defs/List%5B%C3%BC%5D%20%20100%25"
