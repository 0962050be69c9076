"""Arguments of a schema in Lark: the required arguments, and each of the others or not, in the schema's order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

from weft.api.parsers.alternatives import alternatives, refused
from weft.api.parsers.rules import Rules


def object_of(schema: Any) -> Mapping[str, Any]:
    """The first plain schema of a tool's arguments that is a schema of objects."""
    plain = alternatives(schema, schema)
    return next((item for item in plain if item.get("type", "object") == "object"), {})


def parts_of(schema: Mapping[str, Any]) -> tuple[dict[str, Any], Set[str]]:
    """The schemas of an object's members, and its required keys. Keys without a schema may have any value."""
    properties, required = schema.get("properties"), schema.get("required")
    parts = dict(properties) if isinstance(properties, Mapping) else {}
    needed = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    additional = schema.get("additionalProperties", True)
    for key in needed:
        if key not in parts and additional is False:
            raise refused(f"{key!r:.80} is required, and neither in properties nor allowed as an additional property")
        parts.setdefault(key, additional)
    return {key: part for key, part in parts.items() if part is not False or key in needed}, frozenset(needed)


def row(items: Mapping[str, str], needed: Set[str]) -> str:
    """Lark for the items, each of which ends by itself."""
    return " ".join(f"({item})" if key in needed else f"({item})?" for key, item in items.items())


def separated(rules: Rules, items: Mapping[str, str], needed: Set[str], separator: str) -> str:
    """Lark for the required items, then each of the others or not. Each item, and each rest of the items, is a rule."""
    must = [rules.add(item) for key, item in items.items() if key in needed]
    may = [rules.add(item) for key, item in items.items() if key not in needed]
    if must:
        return f" {separator} ".join(must) + "".join(f" ({separator} {item})?" for item in may)
    rest, firsts = "", list[str]()
    for item in reversed(may):
        firsts.append(f"{item} {rest}".rstrip())
        rest = rules.add(f"({separator} {item})? {rest}".rstrip())
    return f"({' | '.join(reversed(firsts))})?" if firsts else ""


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
