"""The text of a grammar, for what a caller wants of an answer.

The text is a list of named grammars in llguidance's JSON form. The answer itself is BODY; what may come before it is
written around it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.engine.core.grammar import PARAM
from weft.engine.core.params import StructuredOutputsParams
from weft.engine.structured.bounds import check_choices, check_lark, check_schema
from weft.engine.structured.plain_schemas import plain_schema
from weft.errors import RequestError

BODY = "body"
# At most one space or line break between JSON tokens: a model that may write more can do so until the end.
JSON_OPTIONS = {"whitespace_pattern": r"[ \n]"}
MAX_CHARACTERS = 512 * 1024
GBNF_CHARACTERS = 64 * 1024  # the library translates it in Python, in quadratic time

Grammar = Mapping[str, Any]  # one of the list


def body_of(wanted: StructuredOutputsParams) -> Grammar:
    """The grammar of an answer. Raises RequestError for values that can be none."""
    if wanted.json is not None:
        schema = read_schema(wanted.json)
        check_schema(schema, PARAM)
        return {"json_schema": with_options(schema)}
    if wanted.json_object:
        return {"json_schema": with_options({"type": "object"})}
    if wanted.choice is not None:
        check_choices(wanted.choice, PARAM)
        # A terminal: as alternatives of a rule, each text would be a state of the parse.
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {choice(wanted.choice)}"}
    if wanted.regex is not None:
        return {"lark_grammar": f"start: {regex(wanted.regex)}"}
    return {"lark_grammar": lark(wanted.grammar or "")}


def grammar_text(body: Grammar, start: str | None = None) -> str:
    """The text of a grammar. `start` is Lark that has the body as @body. Raises RequestError for too much text."""
    grammars = [body] if start is None else [{"lark_grammar": start}, {"name": BODY, **body}]
    text = json.dumps({"grammars": grammars}, ensure_ascii=False)
    if len(text) > MAX_CHARACTERS:
        raise RequestError(
            f"the schema or grammar has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}",
            param=PARAM,
            code="grammar-too-large",
        )
    return text


def with_options(schema: Any, *, param: str = PARAM, **options: Any) -> Any:
    """A schema in the compiler's words, with the settings of that. False and True are schemas too."""
    try:
        schema = plain_schema(schema)
    except RequestError as error:
        raise RequestError(str(error), param=param, code=error.code) from None
    if schema is True:
        schema = {}
    return {**schema, "x-guidance": {**JSON_OPTIONS, **options}} if isinstance(schema, Mapping) else schema


def read_schema(given: Any) -> Any:
    """A JSON schema that may be given as a text."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"json is not a JSON schema: {error!s:.200}", param=PARAM, code="schema-not-json"
            ) from None
    if not isinstance(given, Mapping | bool):
        raise RequestError(f"a JSON schema is an object, not {given!r:.80}", param=PARAM, code="schema-not-object")
    return given


def choice(texts: Sequence[str]) -> str:
    """Lark for a choice of texts."""
    if not texts or not all(texts):
        raise RequestError("choice needs at least one text, and none of them empty", param=PARAM, code="empty-choice")
    return " | ".join(map(quoted, texts))


def quoted(text: str) -> str:
    """Lark for a text."""
    return json.dumps(text, ensure_ascii=False)


def regex(expression: str) -> str:
    """Lark for a regular expression."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(expression, 'd')}/"


def lark(grammar: str) -> str:
    """Lark for a grammar in Lark's or GBNF's form."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if "::=" not in grammar:
        check_lark(grammar, PARAM)
        return grammar
    if len(grammar) > GBNF_CHARACTERS:
        raise RequestError(
            f"the GBNF grammar has {len(grammar):,} characters; the limit is {GBNF_CHARACTERS:,}; Lark may have "
            f"{MAX_CHARACTERS:,}",
            param=PARAM,
            code="grammar-too-large",
        )
    try:
        converted = str(gbnf_to_lark(grammar))
        check_lark(converted, PARAM)
        return converted
    except RequestError:
        raise
    except Exception as error:  # of the library's own class, which its stubs do not name
        raise RequestError(f"grammar is no valid GBNF: {error!s:.500}", param=PARAM, code="invalid-grammar") from None
