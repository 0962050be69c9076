"""Schemas and answers of `scripts/bench structured`. Nothing here imports Weft: another environment reads them too."""

from __future__ import annotations

import json
from typing import Any

SMALL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
# The same with bounds that few texts come near to.
WIDE: dict[str, Any] = {
    **SMALL,
    "properties": {
        **SMALL["properties"],
        "name": {"type": "string", "maxLength": 80},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 60}, "minItems": 1, "maxItems": 3},
    },
}


def many(schema: dict[str, Any]) -> dict[str, Any]:
    """A list that is so long that no answer ends before its limit of tokens."""
    return {"type": "array", "items": schema, "minItems": 40, "maxItems": 60}


FORMS = [
    {"type": "string", "maxLength": 20},
    {"type": "integer", "minimum": -1000, "maximum": 1000},
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
]
BIG: dict[str, Any] = {
    "type": "object",
    "properties": {f"field_{number}": {"anyOf": FORMS} for number in range(60)},
    "required": [f"field_{number}" for number in range(60)],
    "additionalProperties": False,
}
PEOPLE = [
    {"name": "Ada Lovelace", "age": 36, "tags": ["math", "poet"], "ok": True},
    {"name": "Bob", "age": 7, "tags": ["a"], "ok": False},
    {"name": "Grace", "age": 85, "tags": ["navy", "cobol", "bugs"], "ok": True},
    {"name": "Jürgen", "age": 120, "tags": ["größer", "x-y z"], "ok": False},
]
ANSWERS = [json.dumps(person, ensure_ascii=False) for person in PEOPLE]
