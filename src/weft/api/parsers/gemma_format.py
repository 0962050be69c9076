"""Tool calls of Gemma: a name and arguments in Gemma's own form.

The format comes from the models' published chat templates.
"""

from __future__ import annotations

import re
from typing import Any

from weft.api.parsers.between import Between
from weft.api.parsers.json_text import MAX_DEPTH, from_json, to_json
from weft.api.parsers.lenient_json import json_literal, read_text
from weft.api.parsers.reader import Reader, Steps
from weft.api.parsers.schemas import ToolSchemas

GEMMA_CALLS = {"<start_function_call>": "<end_function_call>", "<|tool_call>": "<tool_call|>"}
GEMMA_QUOTES = ("<escape>", '<|"|>')
GEMMA_MARKS = (*GEMMA_CALLS, *GEMMA_CALLS.values(), *GEMMA_QUOTES)
GEMMA_NAME = re.compile(r"[^:{}\[\],\s]+")
GEMMA_KEY = re.compile(r"[^:{}\[\],]+")
GEMMA_LITERAL = re.compile(r"[^{}\[\],<\n]+")


def gemma(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """call:NAME{KEY:VALUE, ...} between marks; a VALUE is a quoted text, a literal, {...} or [...]."""
    between = Between(reader)
    while (mark := (yield from reader.until((*GEMMA_CALLS, *GEMMA_CALLS.values()), between.say))) is not None:
        between.call()
        if mark not in GEMMA_CALLS:
            continue  # of a call before
        reader.record()
        yield from reader.skip()
        yield from reader.accept("call:")
        name = yield from reader.skip(GEMMA_NAME)
        if not name or (yield from reader.peek(1)) != "{":
            between.say(mark + reader.recorded())
            continue
        reader.begin_call(name)
        value = yield from _gemma_value(reader)
        reader.arguments(to_json(value))
    between.end()


def _gemma_value(reader: Reader, depth: int = 0) -> Steps[Any]:
    """Read one value; what the end of the answer cuts off is left out, and what lies deeper than `MAX_DEPTH`."""
    quote = yield from reader.accept(*GEMMA_QUOTES)
    if quote is not None:
        text, _ = yield from reader.text_until(quote)
        return text
    if depth < MAX_DEPTH and (yield from reader.accept("{")) is not None:
        return (yield from _gemma_object(reader, depth + 1))
    if depth < MAX_DEPTH and (yield from reader.accept("[")) is not None:
        return (yield from _gemma_list(reader, depth + 1))
    if (yield from reader.peek(1)) == '"':
        return (yield from _json_text(reader, "[" if depth == 0 else "{"))
    return from_json(json_literal((yield from reader.skip(GEMMA_LITERAL)).rstrip()))


def _json_text(reader: Reader, inside: str) -> Steps[str]:
    """Read a text in JSON's form, which models write in the place of the marks."""
    parts: list[str] = []
    if not (yield from read_text(reader, parts.append, inside)):
        parts.append('"')
    return str(from_json("".join(parts)))


def _gemma_object(reader: Reader, depth: int) -> Steps[dict[str, Any]]:
    made: dict[str, Any] = {}
    while True:
        yield from reader.skip(SEPARATORS)
        if (yield from reader.accept("}")) is not None:
            return made
        reader.record()
        quote = yield from reader.accept(*GEMMA_QUOTES)
        if quote is not None:
            key, _ = yield from reader.text_until(quote)
        elif (yield from reader.peek(1)) == '"':
            key = yield from _json_text(reader, ":")
        else:
            key = (yield from reader.skip(GEMMA_KEY)).rstrip()
        yield from reader.skip()
        text = reader.recorded()
        if (yield from reader.accept(":")) is None:
            reader.unread(text)
            return made
        yield from reader.skip()
        made[key] = yield from _gemma_value(reader, depth)


def _gemma_list(reader: Reader, depth: int) -> Steps[list[Any]]:
    made: list[Any] = []
    while True:
        yield from reader.skip(SEPARATORS)
        if (yield from reader.accept("]")) is not None or not (yield from reader.peek(1)):
            return made
        before = yield from reader.peek(2)
        made.append((yield from _gemma_value(reader, depth)))
        if made[-1] == "" and (yield from reader.peek(2)) == before:
            return made[:-1]  # neither a value nor the end: nothing of it is read


SEPARATORS = re.compile(r"[ \t\r\n,]+")
