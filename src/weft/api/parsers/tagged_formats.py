"""Tool calls whose arguments are text between marks: qwen3_coder and glm45.

The formats come from the models' published chat templates.
"""

from __future__ import annotations

import re
from functools import partial

from weft.api.parsers.between import Between
from weft.api.parsers.json_calls import CALL, CALL_END, is_odd_end, read_arguments, read_calls
from weft.api.parsers.json_text import to_json
from weft.api.parsers.marked_values import ValueForm, ValueReader
from weft.api.parsers.reader import Reader, Steps
from weft.api.parsers.schemas import ToolSchemas

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
NAME = re.compile(r"[^\s<>{}\[\](),:]+")
KEY_TEXT = re.compile(r"[^<>\n]+")
AROUND_NAMES = " \t\r\"'"


class ArgumentWriter:
    """Writes a call's arguments, one by one, as a JSON object."""

    def __init__(self, reader: Reader, tools: ToolSchemas, name: str) -> None:
        self._reader, self._tools, self._name = reader, tools, name
        self._written: set[str] = set()
        reader.begin_call(name)

    def may_follow(self, key: str | None, next_key: str) -> bool:
        """Return True if `next_key` may follow the argument `key`: another argument of the tool, not written yet."""
        return next_key != key and next_key not in self._written and self._tools.may_have(self._name, next_key)

    def add(self, key: str, text: str) -> None:
        """Write an argument that is given as text."""
        before = ", " if self._written else "{"
        value = self._tools.encode(self._name, key, text)
        self._reader.arguments(f"{before}{to_json(key)}: {value}")
        self._written.add(key)

    def end(self) -> None:
        """Close the object."""
        self._reader.arguments("}" if self._written else "{}")


def _qwen_key(reader: Reader) -> Steps[str | None]:
    key = yield from reader.skip(KEY_TEXT)
    return key.strip(AROUND_NAMES) if (yield from reader.accept(">")) is not None else None


def _qwen_head(reader: Reader, mark: str) -> Steps[str | None]:
    """Read the tool's name and what ends it."""
    if mark == CALL:
        yield from reader.skip()
        if (yield from reader.accept(FUNCTION)) is None:
            return None
    name = (yield from reader.skip(NAME)).strip(AROUND_NAMES)
    spaces = yield from reader.skip()
    has_end = (yield from reader.accept(">")) is not None
    if has_end or (yield from reader.peek(1)) == "<":
        return name
    return name if spaces and not (yield from reader.ends()) else None


def _glm_key(reader: Reader) -> Steps[str | None]:
    key = yield from reader.skip(KEY_TEXT)
    yield from reader.skip()
    end = yield from reader.accept(KEY_END, VALUE)
    if end == KEY_END:
        yield from reader.skip()
        yield from reader.accept(VALUE)
    return key.strip() if end is not None else None


def _glm_head(reader: Reader, mark: str) -> Steps[str | None]:
    """Read the tool's name, if a key, JSON or the end of the call follows."""
    yield from reader.skip()
    name = yield from reader.skip(NAME)
    yield from reader.skip()
    follows = yield from reader.ahead(reader.accept(KEY, CALL_END, CALL, "{"))
    is_last = follows is None and not reader.cut and (yield from reader.ends())
    return name if follows is not None or is_last else None


def _odd_end(tag: str) -> re.Pattern[str]:
    """Expression of what stands at the end of a value without its mark: an odd form of that, or a line break."""
    return re.compile(rf"\n?[ \t]*</?\s*{tag}\w*\s*/?>?\s*\Z|\n\Z")


QWEN = ValueForm(
    PARAMETER_END,
    PARAMETER,
    closings=(FUNCTION_END, CALL_END),
    openings=(FUNCTION, CALL),
    read_key=_qwen_key,
    read_head=_qwen_head,
    odd_end=_odd_end("param"),
    own_lines=True,
)
GLM = ValueForm(
    VALUE_END,
    KEY,
    closings=(CALL_END,),
    openings=(CALL,),
    read_key=_glm_key,
    read_head=_glm_head,
    odd_end=_odd_end("arg_"),
)


def qwen3_coder(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>; the outer marks may lack."""
    yield from _tagged_calls(reader, tools, QWEN)


def glm45(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """<tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each argument, </tool_call>."""
    yield from _tagged_calls(reader, tools, GLM)


def _tagged_calls(reader: Reader, tools: ToolSchemas, form: ValueForm) -> Steps[None]:
    between, called = Between(reader), False
    while True:
        mark = yield from reader.until((*form.openings, *(form.closings if called else ())), between.say)
        if mark is None:
            break
        if mark in form.closings or (called and mark == CALL and (yield from reader.ahead(is_odd_end(reader)))):
            continue  # of a call before
        is_json = mark == CALL and (yield from reader.ahead(_is_json(reader)))
        read = read_calls(reader, tools, between, mark) if is_json else _tagged_call(reader, tools, between, mark, form)
        called = (yield from read) or called
    between.end()


def _is_json(reader: Reader) -> Steps[bool]:
    yield from reader.skip()
    return (yield from reader.peek(1)) in ("{", "[", "`")


def _tagged_call(reader: Reader, tools: ToolSchemas, between: Between, mark: str, form: ValueForm) -> Steps[bool]:
    """Read the call behind a mark. Returns False if none follows; what is read is then text, as the mark is.

    An unknown name counts as a tool's name only within the outer marks, before arguments.
    """
    reader.record()
    name = yield from form.read_head(reader, mark)
    has_arguments = yield from reader.ahead(_has_arguments(reader, form, required=name not in tools))
    if not name or not has_arguments or (name not in tools and mark != CALL):
        between.say(mark + reader.recorded())
        return False
    between.call()
    yield from reader.skip()
    if (yield from read_arguments(reader, partial(reader.begin_call, name))):
        return True
    between.say((yield from _tagged_arguments(reader, ArgumentWriter(reader, tools, name), form)))
    return True


def _has_arguments(reader: Reader, form: ValueForm, *, required: bool) -> Steps[bool]:
    """Return True if arguments follow, or nothing but the end of a call for which they are not `required`."""
    yield from reader.skip()
    if not required and (yield from reader.peek(1)) == "{":
        return True
    text, mark = yield from reader.text_until(form.next, *form.closings, *form.openings)
    return mark == form.next if required else mark == form.next or not text.strip()


def _tagged_arguments(reader: Reader, writer: ArgumentWriter, form: ValueForm) -> Steps[str]:
    """Read a call's arguments and its end; returns the text outside of them, such as an unfinished key."""
    beside: list[str] = []
    while (mark := (yield from reader.until((form.next, *form.closings, *form.openings), beside.append))) == form.next:
        reader.record()
        key = yield from form.read_key(reader)
        head = reader.recorded()
        value = yield from ValueReader(reader, form, partial(writer.may_follow, key)).read_value()
        if value is None:
            return ""  # cut
        if key is None:
            beside.append(f"{form.next}{head}\n{value}")
        else:
            writer.add(key, value)
    if mark is not None or not reader.cut:
        writer.end()
    if mark in form.openings:
        reader.unread(mark)
    return "".join(beside).strip()
