"""Reasoning between <think> and </think>: qwen3, deepseek_r1, glm45 and kimi_k2."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from weft.serving.parsers.between import Trimmed
from weft.serving.parsers.reader import Reader, Steps

THINK, THINK_END = "<think>", "</think>"


class Begin(Enum):
    """The ways in which an answer may begin, by what the prompt ends with."""

    INSIDE = "inside"  # the prompt has begun the reasoning
    OPTIONAL = "optional"  # the answer may begin with it
    NONE = "none"  # the prompt has ended it


def beginning(prompt: str, always: bool) -> Begin:
    """Return how the answer to a rendered prompt begins. `always`: the model reasons without being told to."""
    end = prompt[-64:].rstrip()
    if end.endswith(THINK):
        return Begin.INSIDE
    if end.endswith(THINK_END):
        return Begin.NONE
    return Begin.INSIDE if always else Begin.OPTIONAL


def think(
    reader: Reader, begin: Begin, rest: Callable[[Reader], Steps[None]], ends: tuple[str, ...] = ()
) -> Steps[None]:
    """Reasoning, and then what `rest` parses. The marks in `ends` end the reasoning too, and belong to the rest."""
    if begin is not Begin.NONE:
        spaces = yield from reader.skip()
        opened = yield from reader.accept(THINK)
        if opened is None and begin is Begin.OPTIONAL:
            reader.unread(spaces)
        else:
            mark = yield from reader.until((THINK_END, *ends), Trimmed(reader.reasoning).say)
            if mark in ends:
                reader.unread(mark)
            else:
                yield from reader.skip()
    yield from rest(reader)


def plain(reader: Reader) -> Steps[None]:
    """An answer that is text and nothing else."""
    while (yield from reader.peek(1)):
        reader.content(reader.rest())
