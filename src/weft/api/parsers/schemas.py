"""ToolSchemas: what the parsers need to know of a request's tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.api.parsers.json_text import from_json, from_python, to_json
from weft.engine.structured.references import steps_of

TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
MAX_REFERENCES = 16  # references in a row, each only to the next


def resolve(schema: Any, root: Any) -> Any:
    """A schema without a reference to a definition of `root`; as it is if there is no such definition."""
    resolved = schema
    for _ in range(MAX_REFERENCES):
        reference = resolved.get("$ref") if isinstance(resolved, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return resolved
        target = root
        for name in steps_of(reference):
            target = target.get(name) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            return resolved
        resolved = {**target, **{key: value for key, value in resolved.items() if key != "$ref"}}
    return resolved


class ToolSchemas:
    """A request's tools: their names, and the parameters of each.

    Formats whose arguments are plain text need them: only the schema tells 5 from "5".
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self._properties = {function["name"]: _properties(function) for function in functions}
        self._parameters = {function["name"]: function.get("parameters") for function in functions}

    def __contains__(self, name: object) -> bool:
        return name in self._properties

    def may_have(self, tool: str, key: str) -> bool:
        """Return True unless the tool's schema lists its parameters, and this is none of them."""
        properties = self._properties.get(tool)
        return not properties or key in properties

    def encode(self, tool: str, key: str, text: str) -> str:
        """The JSON of an argument that is written as plain text, in JSON's spelling or Python's.

        It is a string if the schema says so, or if the text is no value of the schema's type.
        """
        types = self._types(tool, key)
        if types == {"string"}:
            return to_json(text)
        try:
            value = from_json(text)
        except (ValueError, RecursionError):
            return self._encode_python(types, text)
        if "string" in types and not isinstance(value, dict | list) and not types & types_of(value):
            return to_json(text)
        return text.strip()

    def _encode_python(self, types: set[str], text: str) -> str:
        """The JSON of a text that is none, as a value in Python's spelling if the types allow that."""
        if types == {"boolean"} and text.strip().lower() in ("true", "false"):
            return text.strip().lower()
        try:
            value = from_python(text)
        except ValueError:
            return to_json(text)
        is_literal = isinstance(value, bool | None) and "string" not in types
        is_structure = isinstance(value, dict | list) and (not types or bool(types & types_of(value)))
        return to_json(value) if is_literal or is_structure else to_json(text)

    def _types(self, tool: str, key: str) -> set[str]:
        """Types that the schema allows for an argument; none if it does not say."""
        return schema_types(self._properties.get(tool, {}).get(key), self._parameters.get(tool))


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def schema_types(schema: object, root: object, depth: int = 0) -> set[str]:
    """Names of the types that a schema allows; none if it does not say."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return set()
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return {item for item in types if isinstance(item, str)}
    if "const" in schema:
        return types_of(schema["const"])
    if isinstance(values := schema.get("enum"), list):
        return set().union(*map(types_of, values))
    parts = [part for key in ("anyOf", "oneOf") if isinstance(part := schema.get(key), list)]
    return set().union(*(schema_types(item, root, depth + 1) for part in parts for item in part))


def types_of(value: object) -> set[str]:
    """Names of JSON Schema's types that a value has."""
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case None:
            return {"null"}
        case list():
            return {"array"}
        case _:
            return {"object"}
