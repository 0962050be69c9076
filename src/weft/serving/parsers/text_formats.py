"""Tool calls whose arguments are text between marks: qwen3_coder, glm45 and gemma.

The formats are those of the models' published chat templates.
"""

from __future__ import annotations

import re
from typing import Any

from weft.serving.parsers.between import Between
from weft.serving.parsers.json_text import MAX_DEPTH, from_json, to_json
from weft.serving.parsers.reader import Reader, Steps
from weft.serving.parsers.schemas import ToolSchemas

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
GEMMA_CALLS = {"<start_function_call>": "<end_function_call>", "<|tool_call>": "<tool_call|>"}
GEMMA_QUOTES = ("<escape>", '<|"|>')
GEMMA_MARKS = (*GEMMA_CALLS, *GEMMA_CALLS.values(), *GEMMA_QUOTES)
GEMMA_NAME = re.compile(r"[^:{}\[\],\s]+")
GEMMA_KEY = re.compile(r"[^:{}\[\],]+")
GEMMA_LITERAL = re.compile(r"[^{}\[\],<\s]+")


class ArgumentWriter:
    """Writes a call's arguments, one by one, as a JSON object."""

    def __init__(self, reader: Reader, tools: ToolSchemas, name: str) -> None:
        self._reader, self._tools, self._name = reader, tools, name
        self._written = False
        reader.begin_call(name)

    def add(self, key: str, text: str) -> None:
        """Write an argument that is given as text."""
        before = ", " if self._written else "{"
        value = self._tools.encode(self._name, key, text)
        self._reader.arguments(f"{before}{to_json(key)}: {value}")
        self._written = True

    def end(self) -> None:
        """Close the object."""
        self._reader.arguments("}" if self._written else "{}")


def qwen3_coder(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>; the outer marks may lack."""
    between = Between(reader)
    while (mark := (yield from reader.until((CALL, FUNCTION), between.say))) is not None:
        if mark == CALL:
            reader.record()
            yield from reader.skip()
            if (yield from reader.accept(FUNCTION)) is None:
                between.say(CALL + reader.recorded())
                continue
            reader.recorded()
        name, mark = yield from reader.text_until(">")
        between.call()
        if mark is None:
            break
        yield from _qwen_arguments(reader, ArgumentWriter(reader, tools, name.strip()))
        yield from reader.skip()
        yield from reader.accept(CALL_END)
    between.end()


def _qwen_arguments(reader: Reader, writer: ArgumentWriter) -> Steps[None]:
    while True:
        _, mark = yield from reader.text_until(PARAMETER, FUNCTION_END)
        if mark != PARAMETER:
            if mark is not None:
                writer.end()
            return
        key, _ = yield from reader.text_until(">")
        value, mark = yield from reader.text_until(PARAMETER_END)
        if mark is None:
            return
        writer.add(key.strip(), value.removeprefix("\n").removesuffix("\n"))


def glm45(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """<tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each argument, </tool_call>."""
    between = Between(reader)
    while (yield from reader.until((CALL,), between.say)) is not None:
        between.call()
        name, mark = yield from reader.text_until(KEY, CALL_END)
        if mark is None:
            break
        writer = ArgumentWriter(reader, tools, name.strip())
        while mark == KEY:
            key, _ = yield from reader.text_until(KEY_END)
            yield from reader.text_until(VALUE)
            value, mark = yield from reader.text_until(VALUE_END)
            if mark is None:
                break
            writer.add(key.strip(), value)
            _, mark = yield from reader.text_until(KEY, CALL_END)
        if mark is not None:
            writer.end()
    between.end()


def gemma(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """call:NAME{KEY:VALUE, ...} between marks; a VALUE is a quoted text, a literal, {...} or [...]."""
    between = Between(reader)
    while (mark := (yield from reader.until(tuple(GEMMA_CALLS), between.say))) is not None:
        end = GEMMA_CALLS[mark]
        reader.record()
        yield from reader.skip()
        yield from reader.accept("call:")
        name = yield from reader.skip(GEMMA_NAME)
        if not name or (yield from reader.peek(1)) != "{":
            between.say(mark + reader.recorded())
            continue
        reader.recorded()
        between.call()
        reader.begin_call(name)
        value = yield from _gemma_value(reader)
        reader.arguments(to_json(value))
        yield from reader.text_until(end)
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
    literal = yield from reader.skip(GEMMA_LITERAL)
    try:
        return from_json(literal)
    except ValueError:
        return literal


def _gemma_object(reader: Reader, depth: int) -> Steps[dict[str, Any]]:
    made: dict[str, Any] = {}
    while True:
        yield from reader.skip(SEPARATORS)
        if (yield from reader.accept("}")) is not None:
            return made
        quote = yield from reader.accept(*GEMMA_QUOTES)
        if quote is not None:
            key, _ = yield from reader.text_until(quote)
        else:
            key = (yield from reader.skip(GEMMA_KEY)).rstrip()
        yield from reader.skip()
        if (yield from reader.accept(":")) is None:
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
