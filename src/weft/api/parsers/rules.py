"""Rules: a grammar in Lark while its rules are collected, and Lark of JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from weft.engine.structured.grammar import MAX_CHARACTERS, with_options
from weft.errors import RequestError

Tool = Mapping[str, Any]
Mark = Callable[[str], str]  # Lark of a mark: its token, if it is a special one


RULE_CHARACTERS = 32  # characters that a rule counts in addition to its body
ANYTHING = "(?s:.*)"  # expression of any text


class Rules:
    """Rules of a grammar, with names that are not taken yet. `mark` gives the Lark of a special token's text."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.lines: list[str] = []
        self._characters = 0

    def add(self, body: str, attributes: str = "") -> str:
        """Add a rule; returns its name."""
        name = f"rule{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        self._count(body)
        return name

    def reserve(self) -> str:
        """Name of a rule whose body comes later, by `fill`: it may name itself."""
        return self.add("")

    def fill(self, name: str, body: str) -> None:
        """Set the body of a rule whose name is reserved."""
        self.lines[int(name.removeprefix("rule"))] = f"{name}: {body}"
        self._count(body)

    def _count(self, body: str) -> None:
        self._characters += len(body) + RULE_CHARACTERS
        if self._characters > MAX_CHARACTERS:
            raise RequestError(
                f"the grammar of the tools is too large; the limit is {MAX_CHARACTERS:,} characters",
                param="tools",
                code="grammar-too-large",
            )

    def text_until(self, mark: str) -> str:
        """Lark for any text up to a mark, and that."""
        token = self.mark(mark)
        return f"/{ANYTHING}/ {token}" if is_token(token) else self.add(f"/{ANYTHING}{escaped(mark)}/", "[lazy]")

    def terminal(self, body: str) -> str:
        """Add a terminal, whose expressions may be joined by & and |; returns its name."""
        name = f"TEXT{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        self._count(body)
        return name


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments; a tool without parameters gets none."""
    schema = tool["function"].get("parameters") or {}
    if not schema or (
        schema.get("properties") == {} and schema.keys() <= {"type", "properties", "required", "$schema"}
    ):
        return {**schema, "type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **schema} if "type" not in schema else schema


def json_rule(schema: Any) -> str:
    """Lark for JSON of a schema. Keywords that the compiler does not know are left out of account."""
    return "%json " + json.dumps(with_options(schema, param="tools", lenient=True), ensure_ascii=False)


def is_token(lark: str) -> bool:
    """Return True for the Lark of a special token."""
    return lark.startswith("<[")


def escaped(text: str) -> str:
    """Expression of a text, for Lark."""
    special = "\\/.^$|?*+()[]{}"
    return "".join(f"\\{letter}" if letter in special else "\\n" if letter == "\n" else letter for letter in text)
