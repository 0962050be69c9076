"""Tool calls in JSON, read while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from weft.api.parsers.between import Between
from weft.api.parsers.json_text import without_halves
from weft.api.parsers.lenient_json import COMMAS, LITERAL, has_key, read_text, read_value, repaired
from weft.api.parsers.reader import Reader, Steps
from weft.api.parsers.schemas import ToolSchemas

CALL, CALL_END = "<tool_call>", "</tool_call>"
ARGUMENT_KEYS = ("arguments", "parameters")
ABOUT_CALL_KEYS = ("type", "id", "index", "tool_call_id")  # members that are neither the name nor arguments
NO_ARGUMENTS = ("", "null", "None")  # texts in place of arguments that mean: no arguments
QUOTES = ('"', "'")
MAX_WRAPPERS = 2  # objects around a call, as in {"type": "function", "function": {...}}

BETWEEN_CALLS = re.compile(r"[ \t\r\n,;\[\]}]+")  # also brackets of a list, and superfluous brackets
FENCES = ("```json", "```")
AFTER_CALLS = ("", "<", "[", "]", "`")  # what may follow a call without arguments whose bracket is missing


class CallReader:
    """Reads a tool call that is one JSON object: a name and arguments, in any order.

    The arguments go to the reader's events as they arrive, if the name is already known. With `strict`, for formats
    without marks around a call, an object is a call only with arguments and the name of a tool. Otherwise either of
    them is enough, but an object without arguments may have no member that could be misspelled arguments.
    """

    def __init__(self, reader: Reader, tools: ToolSchemas, *, strict: bool = False) -> None:
        self._reader, self._tools, self._strict = reader, tools, strict
        self._name: str | None = None
        self._waiting: str | None = None  # arguments that came before the name
        self._has_others = False  # members that may be misspelled arguments
        self._begun = False

    def read_call(self) -> Steps[bool]:
        """Read the object. Returns False if no JSON object or no call follows; the reader has emitted no event then."""
        if (yield from self._reader.accept("{")) is None:
            return False
        return (yield from self._read_members(0)) or self._begun

    def _read_members(self, depth: int) -> Steps[bool]:
        """Read up to the end of an object; an end that is missing is not asked for."""
        while True:
            yield from self._reader.skip(COMMAS)
            if (yield from self._reader.accept("}")) is not None:
                return self._end()
            ahead = yield from self._reader.peek(1)
            if ahead not in QUOTES and not (yield from self._reader.ahead(has_key(self._reader))):
                is_last = self._begun or self._waiting is not None or ahead in AFTER_CALLS
                return is_last and not self._reader.cut and self._end()
            if not (yield from self._read_member(depth)):
                return False

    def _read_member(self, depth: int) -> Steps[bool]:
        reader = self._reader
        is_quoted = (yield from reader.peek(1)) in QUOTES
        key = (yield from self._text_value()) if is_quoted else (yield from reader.skip(LITERAL))
        yield from reader.skip()
        if key is None or (yield from reader.accept(":")) is None:
            return False
        yield from reader.skip()
        ahead = yield from reader.peek(1)
        if key == "function" and ahead == "{" and depth < MAX_WRAPPERS:
            yield from reader.take(1)
            return (yield from self._read_members(depth + 1))
        if key in ("name", "function") and ahead in QUOTES:
            self._name = yield from self._text_value()
            return self._name is not None
        if key in ARGUMENT_KEYS and not self._begun:
            return (yield from self._read_arguments(ahead))
        self._has_others |= key not in ABOUT_CALL_KEYS
        return (yield from read_value(reader, _leave_out))

    def _read_arguments(self, ahead: str) -> Steps[bool]:
        known = bool(self._name) and (not self._strict or self._name in self._tools)
        if known and ahead == "{":
            self._begin()
            return (yield from read_value(self._reader, self._reader.arguments))
        if ahead == '"':  # an object that was written as a text
            self._waiting = yield from self._text_value()
            return self._waiting is not None
        parts: list[str] = []
        whole = yield from read_value(self._reader, parts.append)
        self._waiting = "".join(parts)
        return whole

    def _begin(self) -> None:
        assert self._name is not None
        self._reader.begin_call(self._name)
        self._begun = True

    def _end(self) -> bool:
        if self._begun:
            return True
        known = self._name in self._tools
        if self._waiting is None:
            arguments = None if self._strict or self._has_others or not known else "{}"
        else:
            arguments = arguments_of(self._waiting)
        if not self._name or arguments is None or (self._strict and not known):
            return False
        self._begin()
        self._reader.arguments(arguments)
        return True

    def _text_value(self) -> Steps[str | None]:
        """Read a text in quotes; None for anything else."""
        if (yield from self._reader.peek(1)) not in QUOTES:
            return None
        parts: list[str] = []
        if not (yield from read_text(self._reader, parts.append)):
            return None
        return without_halves(json.loads("".join(parts)))


def _leave_out(text: str) -> None:
    """Emit nothing."""


def arguments_of(text: str) -> str | None:
    """Arguments that are written as a text, as JSON; None if they are no object."""
    return "{}" if text.strip() in NO_ARGUMENTS else repaired(text)


def read_arguments(reader: Reader, begin: Callable[[], None]) -> Steps[bool]:
    """Read an object of arguments; `begin` begins their call. Returns False, and reads nothing, if none follows."""
    if (yield from reader.peek(1)) != "{":
        return False
    begin()
    yield from read_value(reader, reader.arguments)
    return True


def read_calls(reader: Reader, tools: ToolSchemas, between: Between, mark: str) -> Steps[bool]:
    """Read the calls behind a mark. Returns False if there is none; what is read is then text, as the mark is."""
    called = False
    reader.record()
    yield from _skip_between(reader)
    while (yield from CallReader(reader, tools).read_call()):
        called = True
        between.call()
        reader.recorded()
        yield from _skip_between(reader)
        reader.record()
    between.say(("" if called else mark) + reader.recorded())
    return called


def is_odd_end(reader: Reader) -> Steps[bool]:
    """Return True if an opening mark that is read ends a call: nothing follows, or the mark of another call."""
    yield from reader.skip()
    return (yield from reader.accept(CALL)) is not None or (yield from reader.ends())


def _skip_between(reader: Reader) -> Steps[None]:
    """Skip what stands around the calls of one mark."""
    yield from reader.skip(BETWEEN_CALLS)
    if (yield from reader.accept(*FENCES)) is not None:
        yield from reader.skip(BETWEEN_CALLS)
