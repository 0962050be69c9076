"""Chooses the parsers of a model's answers: by name, or by what its chat template writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.api.parsers import gemma_format, grammars, harmony, tagged_formats, tool_formats
from weft.api.parsers.json_calls import CALL, CALL_END
from weft.api.parsers.pythonic import END as PYTHON_END
from weft.api.parsers.pythonic import START as PYTHON_START
from weft.api.parsers.pythonic import pythonic
from weft.api.parsers.reader import Reader, Steps, StreamParser
from weft.api.parsers.reasoning import MISTRAL_THINK, MISTRAL_THINK_END, Begin, ReasoningFormat, plain, think
from weft.api.parsers.schemas import ToolSchemas
from weft.errors import ConfigError, nearest_name

# A template that names the tools in an expression or a statement.
SHOWS_TOOLS = re.compile(r"\{[%{][^%}]*\btools\b")
ToolParse = Callable[[Reader, ToolSchemas], Steps[None]]


@dataclass(frozen=True)
class ToolFormat:
    """A family's form of tool calls: its parser, its grammar, and the special tokens that belong to it.

    A template has this form if it contains all of `signs`. `begins`: marks with which calls begin. A call that has no
    id gets `id_prefix` and `id_letters` letters: Mistral's templates want nine.
    """

    name: str
    parse: ToolParse
    calls: grammars.Calls
    signs: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    id_prefix: str = "call_"
    id_letters: int = 24


XML_MARKS = (CALL, CALL_END)
GLM_MARKS = (*XML_MARKS, tagged_formats.KEY, tagged_formats.KEY_END, tagged_formats.VALUE, tagged_formats.VALUE_END)
MISTRAL_CALLS = (tool_formats.MISTRAL_CALLS,)
MISTRAL_MARKS = (*MISTRAL_CALLS, tool_formats.MISTRAL_ARGS, tool_formats.MISTRAL_ID)
DEEPSEEK_CALLS = (tool_formats.DEEPSEEK_CALLS, tool_formats.DEEPSEEK_CALL, CALL)
DEEPSEEK_MARKS = (*tool_formats.DEEPSEEK_MARKS, *XML_MARKS)
KIMI_CALLS = (tool_formats.KIMI_CALLS, tool_formats.KIMI_SECTION, tool_formats.KIMI_CALL)
KIMI_MARKS = (*tool_formats.KIMI_MARKS, tool_formats.KIMI_SECTION, tool_formats.KIMI_SECTION_END)
GEMMA_MARKS = gemma_format.GEMMA_MARKS


def _mistral(calls: grammars.Calls, *signs: str) -> ToolFormat:
    marks = (MISTRAL_CALLS, MISTRAL_MARKS)
    return ToolFormat("mistral", tool_formats.mistral, calls, signs, *marks, id_prefix="", id_letters=9)


def _gemma(calls: grammars.Calls, begin: str) -> ToolFormat:
    return ToolFormat("gemma", gemma_format.gemma, calls, (begin,), tuple(gemma_format.GEMMA_CALLS), GEMMA_MARKS)


def _deepseek(name: str, calls: grammars.Calls, *signs: str) -> ToolFormat:
    signs = (tool_formats.DEEPSEEK_CALLS, *signs)
    return ToolFormat(name, tool_formats.deepseek, calls, signs, DEEPSEEK_CALLS, DEEPSEEK_MARKS)


def _llama(sign: str) -> ToolFormat:
    tag = (tool_formats.PYTHON_TAG,)
    return ToolFormat("llama3_json", tool_formats.llama3_json, grammars.LLAMA3_JSON, (sign,), tag, tag)


# In the order in which a template is compared with them: one format's signs may be part of another's.
FORMATS = (
    ToolFormat("openai", harmony.harmony, grammars.OPENAI, (harmony.CHANNEL, harmony.MESSAGE), (), harmony.MARKS),
    ToolFormat("kimi_k2", tool_formats.kimi_k2, grammars.KIMI_K2, (tool_formats.KIMI_CALLS,), KIMI_CALLS, KIMI_MARKS),
    _deepseek("deepseek_v3", grammars.DEEPSEEK_V3, "```json"),
    _deepseek("deepseek_v31", grammars.DEEPSEEK_V31),
    ToolFormat("glm45", tagged_formats.glm45, grammars.GLM45, (tagged_formats.KEY,), (CALL,), GLM_MARKS),
    ToolFormat(
        "qwen3_coder",
        tagged_formats.qwen3_coder,
        grammars.QWEN3_CODER,
        ("<function=", "<parameter="),
        (CALL, tagged_formats.FUNCTION),
        XML_MARKS,
    ),
    _mistral(grammars.MISTRAL_NAMED, "[TOOL_CALLS]", "[ARGS]"),
    _mistral(grammars.MISTRAL, "[TOOL_CALLS]"),
    _gemma(grammars.GEMMA4, "<|tool_call>"),
    _gemma(grammars.FUNCTION_GEMMA, "<start_function_call>"),
    ToolFormat("hermes", tool_formats.hermes, grammars.HERMES, (CALL,), (CALL,), XML_MARKS),
    ToolFormat("pythonic", pythonic, grammars.PYTHONIC, ("func_name1(",), (PYTHON_START,), (PYTHON_START, PYTHON_END)),
    _llama("python_tag"),
    _llama('"parameters": '),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {item.name: item for item in FORMATS}
HERMES = TOOL_FORMATS["hermes"]
# vLLM's names for the parsers of single models of a family.
TOOL_ALIASES = {
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "functiongemma": "gemma",
    "gemma4": "gemma",
}
HARMONY = ReasoningFormat("openai_gptoss", harmony.CHANNEL, harmony.MESSAGE)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    item.name: item
    for item in (
        ReasoningFormat("qwen3"),
        ReasoningFormat("deepseek_r1", always=True),
        HARMONY,
        ReasoningFormat("glm45"),
        ReasoningFormat("kimi_k2", ends=(tool_formats.KIMI_CALLS, tool_formats.KIMI_SECTION)),
        ReasoningFormat("mistral", MISTRAL_THINK, MISTRAL_THINK_END),
    )
}


@dataclass(frozen=True)
class AnswerFormat:
    """A model's form of tool calls and reasoning. `in_prompt`: its template shows tools to the model.

    If it does not, Weft's system message describes the tools and asks for calls in the form `tools.name`.
    """

    tools: ToolFormat = field(default_factory=lambda: HERMES)
    reasoning: ReasoningFormat | None = None
    in_prompt: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that the parsers must see."""
        if self.harmony:
            return harmony.MARKS
        return self.tools.marks + (self.reasoning.marks if self.reasoning else ())

    @property
    def harmony(self) -> bool:
        """True if answers are messages in channels, whose reasoning and calls are parsed together."""
        return self.reasoning is HARMONY or self.tools.name == "openai"

    def begin(self, prompt: str) -> Begin:
        """Return how the answer to a rendered prompt begins."""
        return Begin.NONE if self.reasoning is None else self.reasoning.begin(prompt)

    def parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> StreamParser | None:
        """The parser of one answer to a rendered prompt; None if the answer is nothing but text.

        Without `tools`, calls are text like any other.
        """
        schemas = ToolSchemas(tools)
        if self.harmony:
            return StreamParser(lambda reader: harmony.harmony(reader, schemas))

        def rest(reader: Reader) -> Steps[None]:
            return self.tools.parse(reader, schemas) if tools else plain(reader)

        if self.reasoning is not None:
            reasoning, begin = self.reasoning, self.begin(prompt)
            calls = self.tools.begins if tools else ()
            return StreamParser(lambda reader: think(reader, reasoning, begin, rest, calls))
        return StreamParser(rest) if tools else None


def choose_format(template: str | None, tools: str | None = None, reasoning: str | None = None) -> AnswerFormat:
    """The format of a model with the chat template `template`; `tools` and `reasoning` name parsers instead.

    Raises ConfigError for a name that is not known.
    """
    source = template or ""
    in_prompt = SHOWS_TOOLS.search(source) is not None
    if tools is None:
        tool_format = next((item for item in FORMATS if _has_signs(source, item)), HERMES)
    else:
        name = _check_known(TOOL_ALIASES.get(tools, tools), TOOL_FORMATS, "--tool-call-parser")
        named = [item for item in FORMATS if item.name == name]
        tool_format = next((item for item in named if _has_signs(source, item)), named[-1])
    if reasoning is None:
        reasoning_format = _reasoning_of(source, tool_format)
    else:
        reasoning_format = REASONING_FORMATS[_check_known(reasoning, REASONING_FORMATS, "--reasoning-parser")]
    return AnswerFormat(tool_format, reasoning_format, in_prompt=in_prompt)


def _has_signs(source: str, item: ToolFormat) -> bool:
    return all(sign in source for sign in item.signs)


def _reasoning_of(source: str, tools: ToolFormat) -> ReasoningFormat | None:
    if tools.name == "openai":
        return HARMONY
    names = (tools.name, "qwen3", "mistral")  # the family's own form first
    shown = [REASONING_FORMATS[name] for name in names if name in REASONING_FORMATS]
    return next((item for item in shown if item.end in source), None)


def _check_known(name: str, known: Mapping[str, Any], flag: str) -> str:
    if name not in known:
        suggestion = nearest_name(name, known)
        raise ConfigError(
            f"{flag} {name!r:.80} is not known{suggestion}; known: {', '.join(known)}", code="unknown-parser"
        )
    return name
