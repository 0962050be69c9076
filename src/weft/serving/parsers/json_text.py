"""JSON values and tool calls in JSON, read while they arrive."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any

from weft.serving.parsers.reader import Reader, Steps, Take

MAX_DEPTH = 64  # levels of lists and objects in arguments that are not JSON yet
ARGUMENT_KEYS = ("arguments", "parameters")

LITERAL = re.compile(r"[A-Za-z0-9+\-.]+")
SEPARATORS = re.compile(r"[ \t\r\n,]+")
PLAIN = re.compile(r'[^"\\]+')  # inside a string
OUTSIDE = re.compile(r'[^"{}\[\]]+')  # of strings and brackets


def to_json(value: Any) -> str:
    """JSON of a value, which any decoder reads: halves of UTF-16 pairs are U+FFFD, numbers without a value are texts.

    Raises ValueError for an integer of more digits than Python writes.
    """
    return without_halves(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False))


def from_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for none, for NaN, and for a number outside a double's range."""
    return json.loads(text, parse_float=_to_float, parse_constant=_to_float)


def without_halves(text: str) -> str:
    """A text in which each half of a UTF-16 pair that stands alone is U+FFFD, as UTF-8 cannot write it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _to_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r:.40} is no number of JSON")
    return value


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case list():
            return [_finite(item) for item in value]
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case _:
            return value


def read_value(reader: Reader, emit: Take) -> Steps[bool]:
    """Read one JSON value and pass its text to `emit` as it comes.

    Returns False if the answer ends within the value, or if no value follows.
    """
    ahead = yield from reader.peek(1)
    if ahead == '"':
        return (yield from _read_string(reader, emit))
    if ahead and ahead in "{[":
        return (yield from _read_container(reader, emit))
    literal = yield from reader.skip(LITERAL)
    emit(literal)
    return bool(literal)


def _read_string(reader: Reader, emit: Take) -> Steps[bool]:
    emit((yield from reader.take(1)))
    while True:
        yield from reader.read_run(PLAIN, emit)
        character = yield from reader.take(1)
        if not character:
            return False
        emit(character)
        if character == '"':
            return True
        emit((yield from reader.take(1)))  # after a backslash


def _read_container(reader: Reader, emit: Take) -> Steps[bool]:
    depth = 0
    while True:
        yield from reader.read_run(OUTSIDE, emit)
        ahead = yield from reader.peek(1)
        if not ahead:
            return False
        if ahead == '"':
            if not (yield from _read_string(reader, emit)):
                return False
            continue
        emit((yield from reader.take(1)))
        depth += (ahead in "{[") - (ahead in "}]")
        if not depth:
            return True


class CallReader:
    """Reads a tool call that is one JSON object: a name and arguments, in any order.

    The arguments go to the reader's events as they come, if the name is known by then. `keys` are the names under
    which arguments are found, `name_key` that of the name.
    """

    def __init__(self, reader: Reader, keys: Collection[str] = ARGUMENT_KEYS, name_key: str = "name") -> None:
        self._reader = reader
        self._keys, self._name_key = keys, name_key
        self._name: str | None = None
        self._waiting: str | None = None  # arguments that came before the name
        self._begun = False

    def read_call(self) -> Steps[bool]:
        """Read the object. Returns False if no JSON object or no call follows; the reader has emitted no event then."""
        if (yield from self._reader.accept("{")) is None:
            return False
        while True:
            yield from self._reader.skip(SEPARATORS)
            if (yield from self._reader.accept("}")) is not None:
                return self._end()
            if not (yield from self._read_member()):
                return self._begun

    def _read_member(self) -> Steps[bool]:
        reader = self._reader
        key = yield from self._text_value()
        yield from reader.skip()
        if key is None or (yield from reader.accept(":")) is None:
            return False
        yield from reader.skip()
        if key == self._name_key:
            self._name = yield from self._text_value()
            return self._name is not None
        if key in self._keys and not self._begun:
            return (yield from self._read_arguments())
        return (yield from read_value(reader, lambda text: None))

    def _read_arguments(self) -> Steps[bool]:
        reader = self._reader
        ahead = yield from reader.peek(1)
        if ahead == '"':  # an object that was written as a text
            text = yield from self._text_value()
            if text is None:
                return False
            self._keep(text)
            return True
        if self._name is not None and ahead == "{":
            self._begin()
            return (yield from read_value(reader, reader.arguments))
        parts: list[str] = []
        whole = yield from read_value(reader, parts.append)
        self._keep("".join(parts))
        return whole

    def _keep(self, arguments: str) -> None:
        self._waiting = arguments if arguments not in ("", "null") else "{}"

    def _begin(self) -> None:
        assert self._name is not None
        self._reader.begin_call(self._name)
        self._begun = True

    def _end(self) -> bool:
        if self._begun:
            return True
        if self._name is None or (self._waiting is not None and not self._waiting.lstrip().startswith("{")):
            return False
        self._begin()
        self._reader.arguments("{}" if self._waiting is None else self._waiting)
        return True

    def _text_value(self) -> Steps[str | None]:
        """Read a JSON string; None for anything else."""
        if (yield from self._reader.peek(1)) != '"':
            return None
        parts: list[str] = []
        if not (yield from _read_string(self._reader, parts.append)):
            return None
        try:
            value: Any = json.loads("".join(parts), strict=False)
        except ValueError:
            return None
        return without_halves(value) if isinstance(value, str) else None
