"""Tool calls as a list of Python calls, as Llama 4 and others write them: [name(key=value, ...), ...]."""

from __future__ import annotations

import ast
import re

from weft.api.parsers.between import Between
from weft.api.parsers.json_text import python_value, to_json
from weft.api.parsers.reader import Reader, Steps
from weft.api.parsers.schemas import ToolSchemas

START, END = "<|python_start|>", "<|python_end|>"
OUTSIDE = re.compile(r"[^\[\](){}'\"]+")
Call = tuple[str, str]  # the name, and the arguments as JSON


def pythonic(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """The whole answer is the list; each call is said once its own end has come."""
    between = Between(reader)
    reader.record()
    yield from reader.skip()
    yield from reader.accept(START)
    yield from reader.skip()
    if (yield from reader.accept("[")) is not None:
        while (call := _parsed((yield from _call_text(reader)), tools)) is not None:
            between.call()
            reader.begin_call(call[0])
            reader.arguments(call[1])
            yield from reader.skip(SEPARATORS)
            if (yield from reader.accept("]")) is not None:
                yield from reader.accept(END)
                reader.record()
                break
            reader.record()
    between.say(reader.recorded())
    while (yield from reader.peek(1)):
        between.say(reader.rest())
    between.end()


def _call_text(reader: Reader) -> Steps[str]:
    """Read one call up to its closing bracket; what has been read if it is none. Line breaks in texts are escaped."""
    parts: list[str] = []
    depth = 0
    while True:
        yield from reader.read_run(OUTSIDE, parts.append)
        character = yield from reader.take(1)
        parts.append(character)
        if character in ("'", '"'):
            yield from _string(reader, character, parts)
            continue
        depth += (character != "" and character in "([{") - (character != "" and character in ")]}")
        if not character or depth <= 0:
            return "".join(parts)


def _string(reader: Reader, quote: str, parts: list[str]) -> Steps[None]:
    inside = INSIDE[quote]
    while True:
        yield from reader.read_run(inside, parts.append)
        character = yield from reader.take(1)
        parts.append("\\n" if character == "\n" else character)
        if character in ("", quote):
            return
        if character == "\\":
            parts.append((yield from reader.take(1)))


def _parsed(text: str, tools: ToolSchemas) -> Call | None:
    """The name and the arguments of a Python call of one of the tools; None for anything else."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(node, ast.Call) or node.args:
        return None
    try:
        arguments = {keyword.arg: python_value(keyword.value) for keyword in node.keywords}
        name = ast.unparse(node.func)
        return None if None in arguments or name not in tools else (name, to_json(arguments))
    except (ValueError, RecursionError):
        return None


SEPARATORS = re.compile(r"[ \t\r\n,]+")
INSIDE = {"'": re.compile(r"[^'\\\n]+"), '"': re.compile(r'[^"\\\n]+')}
