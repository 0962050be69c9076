"""Tool calls in JSON between marks: hermes, llama3_json, mistral, deepseek_v3, deepseek_v31 and kimi_k2.

The formats come from the models' published chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from weft.api.parsers.between import Between
from weft.api.parsers.json_calls import CALL, CALL_END, CallReader, is_odd_end, read_arguments, read_calls
from weft.api.parsers.reader import Reader, Steps
from weft.api.parsers.schemas import ToolSchemas


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
KIMI_SECTION, KIMI_SECTION_END = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"  # written by some models
KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)
NAME = re.compile(r"[^\s{}\[\]()<>\"'`]+")
SEPARATORS = re.compile(r"[ \t\r\n;,\]]+")
LIST_START = re.compile(r"[ \t\r\n\[]+")


def hermes(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""
    between, called = Between(reader), False
    while True:
        mark = yield from reader.until((CALL, CALL_END) if called else (CALL,), between.say)
        if mark is None:
            break
        if mark == CALL and not (called and (yield from reader.ahead(is_odd_end(reader)))):
            called = (yield from read_calls(reader, tools, between, mark)) or called
    between.end()


def llama3_json(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """{"name": ..., "parameters": {...}} as the whole answer; several are separated by ";", or a list."""
    between = Between(reader)
    reader.record()
    yield from reader.skip()
    yield from reader.accept(PYTHON_TAG)
    yield from reader.skip(LIST_START)
    while (yield from CallReader(reader, tools, strict=True).read_call()):
        between.call()
        yield from reader.skip(SEPARATORS)
        reader.record()
        yield from reader.accept(PYTHON_TAG)
        yield from reader.skip()
    between.say(reader.recorded())
    while (yield from reader.peek(1)):
        between.say(reader.rest())
    between.end()


def mistral(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]NAME[ARGS]{...} for each call."""
    between = Between(reader)
    while (yield from reader.until((MISTRAL_CALLS,), between.say)) is not None:
        reader.record()
        yield from reader.skip()
        if (yield from reader.peek(1)) in ("[", "{"):
            yield from read_calls(reader, tools, between, MISTRAL_CALLS + reader.recorded())
        elif (yield from _named_call(reader, tools)):
            between.call()
        else:
            between.say(MISTRAL_CALLS + reader.recorded())
    between.end()


def _named_call(reader: Reader, tools: ToolSchemas) -> Steps[bool]:
    name = yield from reader.skip(NAME)
    id: str | None = None
    yield from reader.skip()
    if (yield from reader.accept(MISTRAL_ID)) is not None:
        id = yield from reader.skip(NAME)
        yield from reader.skip()
    yield from reader.accept(MISTRAL_ARGS)
    yield from reader.skip()
    return (yield from _arguments(reader, tools, name, id, (MISTRAL_CALLS,)))


def deepseek(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """Calls between DeepSeek's marks.

    Since V3.1, a call is a name and JSON; in V3 it is a type, and then a name and a ```json block. Distills of R1 also
    write calls as hermes does.
    """
    yield from _marked_calls(reader, tools, DEEPSEEK_MARKS, partial(_deepseek_call, reader, tools), (CALL,))


def kimi_k2(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """An id as functions.NAME:INDEX and JSON in each call, between Kimi's marks."""
    around = (KIMI_SECTION, KIMI_SECTION_END)
    yield from _marked_calls(reader, tools, KIMI_MARKS, partial(_kimi_call, reader, tools), around)


def _marked_calls(
    reader: Reader,
    tools: ToolSchemas,
    marks: CallMarks,
    read_call: Callable[[str], Steps[bool]],
    others: tuple[str, ...],
) -> Steps[None]:
    """Read calls between marks. `read_call` gets the text before a call's separator, and reads the rest.

    The marks around a list of calls and at the ends of calls are optional. `others` are further marks, CALL among them
    of calls in JSON.
    """
    between = Between(reader)
    ends = (marks.call, marks.call_end, marks.calls_end)
    while (mark := (yield from reader.until((*ends, marks.calls, *others), between.say))) is not None:
        if mark == CALL:
            if (yield from read_calls(reader, tools, between, mark)):
                yield from reader.accept(CALL_END)
            continue
        between.call()
        if mark != marks.call:
            continue
        reader.record()
        head, end = yield from reader.text_until(marks.separator, *ends)
        if end in ends:
            reader.unread(end)
        if (yield from read_call(head)):
            yield from reader.skip()
            yield from reader.accept("```")
        else:
            between.say(mark + reader.recorded())
    between.end()


def _deepseek_call(reader: Reader, tools: ToolSchemas, head: str) -> Steps[bool]:
    name = head.strip()
    if name == "function" and name not in tools:  # the type
        yield from reader.skip()
        name = yield from reader.skip(NAME)
        yield from reader.accept(DEEPSEEK_SEP)
    yield from reader.skip()
    yield from reader.accept("```json")
    yield from reader.skip()
    return (yield from _arguments(reader, tools, name, None, (*DEEPSEEK_MARKS, "```")))


def _kimi_call(reader: Reader, tools: ToolSchemas, head: str) -> Steps[bool]:
    id = head.strip()
    match = KIMI_ID.fullmatch(id)
    yield from reader.skip()
    return (yield from _arguments(reader, tools, match[1] if match else id, id, KIMI_MARKS))


def _arguments(reader: Reader, tools: ToolSchemas, name: str, id: str | None, ends: tuple[str, ...]) -> Steps[bool]:
    """Read a call's arguments; a tool may be called without any before one of `ends`. False if there is no call."""
    if name and (yield from read_arguments(reader, partial(reader.begin_call, name, id))):
        return True
    is_last = (yield from reader.ahead(reader.accept(*ends))) is not None
    if name not in tools or not (is_last or (not reader.cut and (yield from reader.ends()))):
        return False
    reader.begin_call(name, id)
    reader.arguments("{}")
    return True
