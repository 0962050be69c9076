"""Tools with all that templates read of them, and that OpenAI's API leaves optional."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

OPTIONAL = ("description", "parameters", "strict")  # fields of a function that clients send as null

MAX_DEPTH = 64  # of schemas within each other that are completed


def drop_nulls(tools: Sequence[Any]) -> list[Any]:
    """Return tools without the optional fields that are null, which templates would print."""
    return [_drop_nulls(tool) for tool in tools]


def _drop_nulls(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or all(function.get(name, "") is not None for name in OPTIONAL):
        return tool
    kept = {key: value for key, value in function.items() if value is not None or key not in OPTIONAL}
    return {**tool, "function": kept}


def complete_tools(tools: Sequence[Any]) -> list[Any]:
    """Return tools with descriptions and parameters, and with texts as defaults, as a template may need them."""
    return [_complete_tool(tool) for tool in tools]


def _complete_tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    parameters = _complete_schema(function.get("parameters") or {}, 0)
    if isinstance(parameters, Mapping):
        parameters = {"type": "object", "properties": {}, **parameters}
    described = {**function, "description": function.get("description") or "", "parameters": parameters}
    return {**tool, "function": described}


def _complete_schema(schema: Any, depth: int) -> Any:
    """A schema whose defaults are texts, and whose properties are objects with a description."""
    if depth > MAX_DEPTH:
        return schema
    if isinstance(schema, list | tuple):
        return [_complete_schema(part, depth + 1) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "default":
            made[key] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        elif key == "properties" and isinstance(value, Mapping):
            made[key] = {name: _complete_property(part, depth + 1) for name, part in value.items()}
        elif key in ("enum", "const", "examples", "required"):
            made[key] = value
        else:
            made[key] = _complete_schema(value, depth + 1)
    return made


def _complete_property(schema: Any, depth: int) -> Any:
    if isinstance(schema, Mapping):
        return {"description": "", **_complete_schema(schema, depth)}
    return {"description": ""} if isinstance(schema, bool) else schema
