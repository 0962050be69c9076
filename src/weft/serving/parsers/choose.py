"""Chooses the parsers of a model's answers: by name, or by what its chat template writes."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weft.errors import ConfigError, nearest_name
from weft.serving.parsers import tool_formats
from weft.serving.parsers.reader import Reader, Steps, StreamParser
from weft.serving.parsers.reasoning import KIMI_CALLS, beginning, plain, think
from weft.serving.parsers.schemas import ToolSchemas

LETTERS = string.ascii_letters + string.digits
ToolParse = Callable[[Reader, ToolSchemas], Steps[None]]


def random_text(length: int) -> str:
    """Random letters and digits."""
    return "".join(secrets.choice(LETTERS) for _ in range(length))


def call_id() -> str:
    """A new id of a tool call."""
    return "call_" + random_text(24)


@dataclass(frozen=True)
class ToolFormat:
    """A family's form of tool calls. `marks` are the special tokens that belong to it; `ids` makes ids of calls."""

    name: str
    parse: ToolParse
    marks: tuple[str, ...] = ()
    make_id: Callable[[], str] = call_id


@dataclass(frozen=True)
class ReasoningFormat:
    """A family's form of reasoning. `always`: it reasons without a mark in the prompt or the answer."""

    name: str
    always: bool = False
    ends: tuple[str, ...] = ()
    marks: tuple[str, ...] = ("<think>", "</think>")


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    item.name: item for item in (ToolFormat("hermes", tool_formats.hermes, ("<tool_call>", "</tool_call>")),)
}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    item.name: item
    for item in (
        ReasoningFormat("qwen3"),
        ReasoningFormat("deepseek_r1", always=True),
        ReasoningFormat("glm45"),
        ReasoningFormat("kimi_k2", ends=(KIMI_CALLS,)),
    )
}


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes tool calls and reasoning. `in_prompt`: its template shows tools to the model."""

    tools: ToolFormat = field(default_factory=lambda: TOOL_FORMATS["hermes"])
    reasoning: ReasoningFormat | None = None
    in_prompt: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that the parsers must see."""
        return self.tools.marks + (self.reasoning.marks if self.reasoning else ())

    def parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> StreamParser | None:
        """The parser of one answer to a rendered prompt; None if the answer is nothing but text.

        Without `tools`, calls are text like any other.
        """
        parse: Callable[[Reader], Steps[None]] = plain
        if tools:
            parse = partial(self.tools.parse, tools=ToolSchemas(tools))  # type: ignore[call-arg]
        if self.reasoning is not None:
            begin = beginning(prompt, self.reasoning.always)
            return StreamParser(partial(think, begin=begin, rest=parse, ends=self.reasoning.ends))
        return StreamParser(parse) if tools else None


def choose_format(template: str | None, tools: str | None = None, reasoning: str | None = None) -> AnswerFormat:
    """The format of a model with the chat template `template`; `tools` and `reasoning` name parsers instead.

    Raises ConfigError for a name that is not known.
    """
    source = template or ""
    return AnswerFormat(
        tools=_named(TOOL_FORMATS, tools, "--tool-call-parser") if tools else _tools_of(source),
        reasoning=_named(REASONING_FORMATS, reasoning, "--reasoning-parser") if reasoning else _reasoning_of(source),
        in_prompt="tools" in source,
    )


def _tools_of(source: str) -> ToolFormat:
    return TOOL_FORMATS["hermes"]


def _reasoning_of(source: str) -> ReasoningFormat | None:
    return REASONING_FORMATS["qwen3"] if "</think>" in source else None


def _named(known: Mapping[str, Any], name: str, flag: str) -> Any:
    if name not in known:
        suggestion = nearest_name(name, known, {})
        raise ConfigError(
            f"{flag} {name!r:.80} is not known{suggestion}; known: {', '.join(known)}", code="unknown-parser"
        )
    return known[name]
