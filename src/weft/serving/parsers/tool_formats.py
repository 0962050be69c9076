"""Tool calls in JSON between marks: hermes, llama3_json, mistral, deepseek_v3, deepseek_v31 and kimi_k2.

The formats are those of the models' published chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from weft.serving.parsers.between import Between
from weft.serving.parsers.json_text import CallReader, read_value
from weft.serving.parsers.reader import Reader, Steps
from weft.serving.parsers.schemas import ToolSchemas


class CallMarks(NamedTuple):
    """Marks of a list of calls, each of which has a separator before its arguments."""

    calls: str
    calls_end: str
    call: str
    call_end: str
    separator: str


PYTHON_TAG = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_ARGS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DEEPSEEK_MARKS = CallMarks(DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEP)
KIMI_CALLS, KIMI_CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END, KIMI_ARGS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
KIMI_MARKS = CallMarks(KIMI_CALLS, KIMI_CALLS_END, KIMI_CALL, KIMI_CALL_END, KIMI_ARGS)
KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)
NAME = re.compile(r"[^\s{}\[\]()<>\"']+")


def hermes(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""
    between = Between(reader)
    while (yield from reader.until(("<tool_call>",), between.say)) is not None:
        reader.record()
        yield from reader.skip()
        if (yield from CallReader(reader).read_call()):
            reader.recorded()
            between.call()
            yield from reader.text_until("</tool_call>")
        else:
            between.say("<tool_call>" + reader.recorded())
    between.end()


def llama3_json(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """{"name": ..., "parameters": {...}} as the whole answer; several are separated by ";"."""
    between = Between(reader)
    reader.record()
    yield from reader.skip()
    yield from reader.accept(PYTHON_TAG)
    yield from reader.skip()
    while (yield from CallReader(reader).read_call()):
        between.call()
        reader.record()
        yield from reader.skip(SEPARATORS)
        yield from reader.accept(PYTHON_TAG)
    between.say(reader.recorded())
    yield from _say_rest(reader, between)


SEPARATORS = re.compile(r"[ \t\r\n;,]+")


def _say_rest(reader: Reader, between: Between) -> Steps[None]:
    while (yield from reader.peek(1)):
        between.say(reader.rest())
    between.end()


def mistral(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]NAME[ARGS]{...} for each call."""
    between = Between(reader)
    while (yield from reader.until((MISTRAL_CALLS,), between.say)) is not None:
        reader.record()
        yield from reader.skip()
        if (yield from reader.accept("[")) is not None:
            called = yield from _call_list(reader)
        else:
            called = yield from _named_call(reader)
        text = reader.recorded()
        if called:
            between.call()
        else:
            between.say(MISTRAL_CALLS + text)
    between.end()


def _call_list(reader: Reader) -> Steps[bool]:
    """Read calls up to the end of their list. False if the first is none."""
    called = False
    while True:
        yield from reader.skip(SEPARATORS)
        if (yield from reader.accept("]")) is not None or not (yield from CallReader(reader).read_call()):
            return called
        called = True


def _named_call(reader: Reader) -> Steps[bool]:
    name = yield from reader.skip(NAME)
    id: str | None = None
    if (yield from reader.accept(MISTRAL_ID)) is not None:
        id = yield from reader.skip(NAME)
    yield from reader.accept(MISTRAL_ARGS)
    yield from reader.skip()
    if not name or (yield from reader.peek(1)) != "{":
        return False
    reader.begin_call(name, id)
    yield from read_value(reader, reader.arguments)
    return True


def deepseek_v3(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """A name and a ```json block in each call, between DeepSeek's marks."""
    yield from _deepseek(reader, typed=True)


def deepseek_v31(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """A name and JSON in each call, between DeepSeek's marks."""
    yield from _deepseek(reader, typed=False)


def _deepseek(reader: Reader, *, typed: bool) -> Steps[None]:
    yield from _marked_calls(reader, DEEPSEEK_MARKS, partial(_deepseek_call, reader, typed=typed))


def _marked_calls(reader: Reader, marks: CallMarks, read_call: Callable[[str], Steps[None]]) -> Steps[None]:
    """Read lists of calls between marks. `read_call` gets the text before a call's separator, and reads the rest."""
    between = Between(reader)
    while (yield from reader.until((marks.calls,), between.say)) is not None:
        between.call()
        while True:
            _, mark = yield from reader.text_until(marks.call, marks.calls_end)
            if mark != marks.call:
                break
            head, mark = yield from reader.text_until(marks.separator, marks.call_end)
            if mark == marks.separator:
                yield from read_call(head)
    between.end()


def _deepseek_call(reader: Reader, head: str, *, typed: bool) -> Steps[None]:
    name = head
    if typed:  # what came before the mark is the type, and the name has a line of its own
        name, _ = yield from reader.text_until("\n")
        yield from reader.skip()
        yield from reader.accept("```json")
    yield from reader.skip()
    yield from _arguments(reader, name.strip(), None)
    yield from reader.text_until(DEEPSEEK_CALL_END)


def _arguments(reader: Reader, name: str, id: str | None) -> Steps[None]:
    """Read a call's arguments. A call without an object is none."""
    if not name:
        return
    ahead = yield from reader.peek(1)
    if ahead == "{":
        reader.begin_call(name, id)
        yield from read_value(reader, reader.arguments)
    elif ahead == "<":  # the mark that ends the call
        reader.begin_call(name, id)
        reader.arguments("{}")


def kimi_k2(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """An id as functions.NAME:INDEX and JSON in each call, between Kimi's marks."""
    yield from _marked_calls(reader, KIMI_MARKS, partial(_kimi_call, reader))


def _kimi_call(reader: Reader, head: str) -> Steps[None]:
    yield from reader.skip()
    id = head.strip()
    match = KIMI_ID.fullmatch(id)
    yield from _arguments(reader, match[1] if match else id, id)
    yield from reader.text_until(KIMI_CALL_END)
