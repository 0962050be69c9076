"""Answers in the harmony format of gpt-oss: messages in channels, each with a header."""

from __future__ import annotations

import re

from weft.serving.parsers.reader import Reader, Steps
from weft.serving.parsers.schemas import ToolSchemas

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
FIRST_WORD = re.compile(r"[A-Za-z]+")


def harmony(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """Reasoning in the channel analysis, calls in messages to functions.NAME, the answer in all others."""
    content = False  # some has been said
    while (yield from reader.peek(1)):
        header, mark = yield from reader.text_until(MESSAGE, *ENDS)
        if mark is None:
            # No header at all: the model has answered without the format.
            reader.content("" if CHANNEL in header or START in header else header)
            return
        if mark != MESSAGE:
            continue
        channel = FIRST_WORD.match(header.partition(CHANNEL)[2].strip())
        recipient = RECIPIENT.search(header)
        if recipient is not None and recipient[1] not in ("assistant", "user"):
            reader.begin_call(recipient[1])
            emit = reader.arguments
        elif channel is not None and channel[0] == "analysis":
            emit = reader.reasoning
        else:
            if content:
                reader.content("\n")
            content, emit = True, reader.content
        yield from reader.until((*ENDS, START), emit)
