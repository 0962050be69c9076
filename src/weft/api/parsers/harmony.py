"""Answers in the harmony format of gpt-oss: messages in channels, each with a header."""

from __future__ import annotations

import re
from functools import partial

from weft.api.parsers.json_calls import arguments_of, read_arguments
from weft.api.parsers.reader import Reader, Steps, Take
from weft.api.parsers.schemas import ToolSchemas

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
FIRST_WORD = re.compile(r"[A-Za-z]+")
# The characters of a header; after them, a header without an end becomes text.
HEADER = re.compile(
    rf"\s*(?:{re.escape(START)})?\s*(?:assistant)?\s*(?:to=[^\s<]*)?\s*"
    rf"(?:{re.escape(CHANNEL)}\s*[A-Za-z]*\s*(?:to=[^\s<]*)?\s*(?:{re.escape(CONSTRAIN)})?\s*(?:json)?)?\s*"
)


def harmony(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """Reasoning in the channel analysis, calls in messages to functions.NAME, the answer in all others."""
    contents = _Contents(reader)
    while (yield from reader.peek(1)):
        header, mark = yield from reader.text_until(MESSAGE, *ENDS)
        recipient = RECIPIENT.search(header)
        called = recipient[1] if recipient is not None and recipient[1] not in ("assistant", "user") else ""
        text = HEADER.sub("", header, count=1)
        if called and (mark == MESSAGE or (mark == CALL and not text)):
            yield from _call(reader, called, contents, empty=mark == CALL)
        elif mark != MESSAGE:
            contents.message(header if called and text else text)  # the model has answered without the format
        else:
            channel = FIRST_WORD.match(header.partition(CHANNEL)[2].strip())
            if channel is None or channel[0] != "analysis":
                yield from reader.until((*ENDS, START), contents.begin())
            elif (yield from reader.until((*ENDS, START, CHANNEL), reader.reasoning)) == CHANNEL:
                reader.unread(CHANNEL)  # the end is missing


class _Contents:
    """The content messages, joined."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._said = False

    def begin(self) -> Take:
        """Begin a message; returns what takes its text."""
        if self._said:
            self._reader.content("\n")
        self._said = True
        return self._reader.content

    def message(self, text: str) -> None:
        """Say a whole message, unless it is empty."""
        if text.strip():
            self.begin()(text)


def _call(reader: Reader, name: str, contents: _Contents, *, empty: bool) -> Steps[None]:
    """Read a message to a tool. A message that is no object stays text, and so does text after an object."""
    arguments = "{}"
    if not empty:
        yield from reader.skip()
        has_object = yield from read_arguments(reader, partial(reader.begin_call, name))
        text, mark = yield from reader.text_until(*ENDS, START)
        written = None if has_object else arguments_of(text)
        if written is None or (mark is None and reader.cut):
            contents.message(text)
            return
        arguments = written
    reader.begin_call(name)
    reader.arguments(arguments)
