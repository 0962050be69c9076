"""ToolSchemas: what the parsers need to know of a request's tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.serving.parsers.json_text import from_json, to_json


class ToolSchemas:
    """The parameters of each tool, for formats whose arguments are plain text: only the schema tells 5 from "5"."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._properties = {tool["function"]["name"]: _properties(tool["function"]) for tool in tools}

    def encode(self, tool: str, key: str, text: str) -> str:
        """The JSON of an argument that is written as plain text.

        It is a string if the schema says so, or if the text is no JSON value of the schema's type.
        """
        types = self._types(tool, key)
        if types == {"string"}:
            return to_json(text)
        try:
            value = from_json(text)
        except (ValueError, RecursionError):
            literal = {"True": "true", "False": "false", "None": "null"}.get(text.strip())
            if literal is not None and "string" not in types:
                return literal
            return to_json(text)
        if "string" in types and not isinstance(value, dict | list) and not types & _types_of(value):
            return to_json(text)
        return text.strip()

    def _types(self, tool: str, key: str) -> set[str]:
        """Types that the schema allows for an argument; none if it does not say."""
        return _schema_types(self._properties.get(tool, {}).get(key))


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _schema_types(schema: object) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return {item for item in types if isinstance(item, str)}
    if isinstance(values := schema.get("enum"), list):
        return set().union(*map(_types_of, values))
    parts = [part for key in ("anyOf", "oneOf") if isinstance(part := schema.get(key), list)]
    return set().union(*(_schema_types(item) for part in parts for item in part))


def _types_of(value: object) -> set[str]:
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
