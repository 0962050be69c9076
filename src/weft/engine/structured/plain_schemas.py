"""Schemas as the compiler takes them: without what asks nothing, and with other words for what it cannot say itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from weft.engine.structured.finite_names import names_of
from weft.engine.structured.references import as_address
from weft.errors import RequestError

NESTING = 128  # lists and objects of a schema inside each other
# The largest bound of a number whose grammar the library can write; answers within it are also within larger ones.
MAX_BOUND = 9_200_000_000_000_000_000
MAX_EXPANDED = 64  # names of a pattern that become properties, unless the schema lists all of them anyway
# Formats that are kept. Others are annotations, as JSON Schema has it, and as generators write them.
FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"])
DRAFT = re.compile(r"https?://json-schema\.org/(?:draft[-/](?P<draft>0[467]|2019-09|2020-12)/)?(?:hyper-)?schema#?")
ADDRESSES = {
    **{draft: f"http://json-schema.org/draft-{draft}/schema#" for draft in ("04", "06", "07")},
    **{draft: f"https://json-schema.org/draft/{draft}/schema" for draft in ("2019-09", "2020-12")},
}
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SINGLE = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
LISTED = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
IN_PLACE = frozenset(
    ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas")
)
VALUES = frozenset(("const", "default", "enum", "example", "examples"))  # keywords whose null is a value
ANNOTATIONS = frozenset(("$comment", "description", "title"))
COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
# Bounds, with the sign of the direction in which a smaller absolute value asks for more.
UPPER, LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
EMPTY = ("dependencies", "dependentRequired", "dependentSchemas", "patternProperties")

Schema = dict[str, Any]


def plain_schema(schema: Any, depth: int = 0) -> Any:
    """A schema for the compiler: the same values follow it, but for numbers beyond MAX_BOUND. Raises RequestError."""
    if not isinstance(schema, Mapping):
        return schema
    if depth > NESTING:
        raise RequestError(f"the schema is nested more than {NESTING} deep", code="grammar-too-large")
    plain = {key: value for key, value in schema.items() if value is not None or key in VALUES}
    for key in plain.keys() & _KEYWORDS:
        plain[key] = _inner(key, plain[key], depth + 1)
    for rewrite in _REWRITES:
        rewrite(plain)
    return plain


def _inner(key: str, value: Any, depth: int) -> Any:
    """The value of a keyword with plain schemas in it."""
    if key in NAMED and isinstance(value, Mapping):
        return {name: plain_schema(part, depth) for name, part in value.items()}
    if isinstance(value, list) and key in LISTED:
        return [plain_schema(part, depth) for part in value]
    return plain_schema(value, depth) if key in SINGLE or key == "items" else value


def _name_draft(schema: Schema) -> None:
    match = DRAFT.fullmatch(address) if isinstance(address := schema.pop("$schema", None), str) else None
    if match is not None and match["draft"]:
        schema["$schema"] = ADDRESSES[match["draft"]]


def _mend_reference(schema: Schema) -> None:
    if isinstance(reference := schema.get("$ref"), str):
        schema["$ref"] = as_address(reference)


def _leave_out_formats(schema: Schema) -> None:
    if isinstance(format := schema.get("format"), str) and format not in FORMATS:
        del schema["format"]


def _leave_out_empty(schema: Schema) -> None:
    """Leave out keywords whose value asks nothing."""
    for key in [key for key in EMPTY if schema.get(key) == {}]:
        del schema[key]
    if schema.get("uniqueItems") is False or _is_at_most(schema.get("maxItems"), 1):
        schema.pop("uniqueItems", None)
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        schema.pop("contains", None)
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    if schema.get("not") is False:
        del schema["not"]
    if "if" not in schema or all(schema.get(key, True) in (True, {}) for key in ("then", "else")):
        for key in ("if", "then", "else"):
            schema.pop(key, None)


def _is_at_most(value: Any, most: int) -> bool:
    return isinstance(value, int | float) and value <= most


def _bound_counts(schema: Schema) -> None:
    """Write whole numbers as such: some generators write 10.0."""
    for key in COUNTS:
        if isinstance(value := schema.get(key), float) and value.is_integer():
            schema[key] = int(value)


def _bound_numbers(schema: Schema) -> None:
    """Write bounds that the library can keep: draft 4's in the form of later drafts, large ones smaller."""
    for exclusive, plain in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(flag := schema.get(exclusive), bool):
            del schema[exclusive]
            if flag and plain in schema:
                schema[exclusive] = schema.pop(plain)
    for keys, sign in ((UPPER, 1), (LOWER, -1)):
        for key in keys:
            value = schema.get(key)
            if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) <= MAX_BOUND:
                continue
            if (value > 0) != (sign > 0):
                raise RequestError(
                    f"{key} {value!r:.40} leaves only numbers that are too large; the limit is {MAX_BOUND:,}",
                    code="invalid-grammar",
                )
            schema[key] = sign * MAX_BOUND


def _restrict_names(schema: Schema) -> None:
    """Say `propertyNames` by the properties themselves, as far as it asks anything."""
    names = schema.get("propertyNames")
    if not isinstance(names, Mapping):
        if names is True:
            del schema["propertyNames"]
        return
    limits = {key: value for key, value in names.items() if key not in ANNOTATIONS | {"$schema"}}
    if limits.get("type") == "string":
        del limits["type"]
    others = schema.get("additionalProperties", True)
    listed = (
        [limits["const"]] if limits.keys() == {"const"} else limits.get("enum") if limits.keys() == {"enum"} else None
    )
    if not limits:
        del schema["propertyNames"]
    elif isinstance(listed, list) and "patternProperties" not in schema:
        properties = schema.get("properties", {})
        schema["properties"] = {name: properties.get(name, others) for name in listed if isinstance(name, str)}
        schema["additionalProperties"] = False
        del schema["propertyNames"]
    elif limits.keys() == {"pattern"} and not schema.keys() & {"properties", "patternProperties"}:
        schema["patternProperties"] = {limits["pattern"]: others}
        schema["additionalProperties"] = False
        del schema["propertyNames"]


def _expand_patterns(schema: Schema) -> None:
    """Make properties of patterns that few names match: the library would go on after the last of these names."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, Mapping):
        return
    given = schema.get("properties")
    properties = dict(given) if isinstance(given, Mapping) else {}
    kept: Schema = {}
    for pattern, part in patterns.items():
        names = names_of(pattern)
        if names is None or (len(names) > MAX_EXPANDED and not names <= properties.keys()):
            kept[pattern] = part
            continue
        for name in sorted(names):
            properties[name] = {"allOf": [properties[name], part]} if name in properties else part
    del schema["patternProperties"]
    if kept:
        schema["patternProperties"] = kept
    if properties:
        schema["properties"] = properties


def _evaluate(schema: Schema) -> None:
    """Say the unevaluated ones to be additional ones, where that is the same."""
    for key, additional in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if key not in schema:
            continue
        if additional in schema or schema[key] in (True, {}):
            del schema[key]  # all are evaluated
        elif not schema.keys() & IN_PLACE:
            schema[additional] = schema.pop(key)


_REWRITES: tuple[Callable[[Schema], None], ...] = (
    _name_draft,
    _mend_reference,
    _leave_out_formats,
    _leave_out_empty,
    _bound_counts,
    _bound_numbers,
    _evaluate,
    _restrict_names,
    _expand_patterns,
)
_KEYWORDS = frozenset((*NAMED, *SINGLE, *LISTED))
