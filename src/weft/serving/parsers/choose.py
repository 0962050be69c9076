"""Chooses the parsers of a model's answers: by name, or by what its chat template writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.errors import ConfigError, nearest_name
from weft.serving.parsers import grammars, harmony, text_formats, tool_formats
from weft.serving.parsers.pythonic import END as PYTHON_END
from weft.serving.parsers.pythonic import START as PYTHON_START
from weft.serving.parsers.pythonic import pythonic
from weft.serving.parsers.reader import Reader, Steps, StreamParser
from weft.serving.parsers.reasoning import THINK, THINK_END, Begin, beginning, plain, think
from weft.serving.parsers.schemas import ToolSchemas

# A template that names the tools in an expression or a statement.
SHOWS_TOOLS = re.compile(r"\{[%{][^%}]*\btools\b")
ToolParse = Callable[[Reader, ToolSchemas], Steps[None]]


@dataclass(frozen=True)
class ToolFormat:
    """A family's form of tool calls: its parser, its grammar, and the special tokens that belong to it.

    A template has this form if it contains all of `signs`. A call that has no id gets `id_prefix` and `id_letters`
    letters: Mistral's templates want nine.
    """

    name: str
    parse: ToolParse
    calls: grammars.Calls
    signs: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    id_prefix: str = "call_"
    id_letters: int = 24


@dataclass(frozen=True)
class ReasoningFormat:
    """A family's form of reasoning between <think> and </think>.

    `always`: it reasons without a mark in the prompt or the answer. `ends`: further marks that end it.
    """

    name: str
    always: bool = False
    ends: tuple[str, ...] = ()
    marks: tuple[str, ...] = (THINK, THINK_END)


XML_MARKS = ("<tool_call>", "</tool_call>")
GLM_MARKS = (*XML_MARKS, text_formats.KEY, text_formats.KEY_END, text_formats.VALUE, text_formats.VALUE_END)
LLAMA_MARKS = (tool_formats.PYTHON_TAG,)
MISTRAL_MARKS = (tool_formats.MISTRAL_CALLS, tool_formats.MISTRAL_ARGS, tool_formats.MISTRAL_ID)

# In the order in which a template is compared with them: one format's signs may be part of another's.
FORMATS = (
    ToolFormat("openai", harmony.harmony, grammars.OPENAI, (harmony.CHANNEL, harmony.MESSAGE), harmony.MARKS),
    ToolFormat("kimi_k2", tool_formats.kimi_k2, grammars.KIMI_K2, (tool_formats.KIMI_CALLS,), tool_formats.KIMI_MARKS),
    ToolFormat(
        "deepseek_v3",
        tool_formats.deepseek_v3,
        grammars.DEEPSEEK_V3,
        (tool_formats.DEEPSEEK_CALLS, "```json"),
        tool_formats.DEEPSEEK_MARKS,
    ),
    ToolFormat(
        "deepseek_v31",
        tool_formats.deepseek_v31,
        grammars.DEEPSEEK_V31,
        (tool_formats.DEEPSEEK_CALLS,),
        tool_formats.DEEPSEEK_MARKS,
    ),
    ToolFormat("glm45", text_formats.glm45, grammars.GLM45, (text_formats.KEY,), GLM_MARKS),
    ToolFormat("qwen3_coder", text_formats.qwen3_coder, grammars.QWEN3_CODER, ("<function=", "<parameter="), XML_MARKS),
    ToolFormat(
        "mistral", tool_formats.mistral, grammars.MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]"), MISTRAL_MARKS, "", 9
    ),
    ToolFormat("mistral", tool_formats.mistral, grammars.MISTRAL, ("[TOOL_CALLS]",), MISTRAL_MARKS, "", 9),
    ToolFormat("gemma", text_formats.gemma, grammars.GEMMA4, ("<|tool_call>",), text_formats.GEMMA_MARKS),
    ToolFormat(
        "gemma", text_formats.gemma, grammars.FUNCTION_GEMMA, ("<start_function_call>",), text_formats.GEMMA_MARKS
    ),
    ToolFormat("hermes", tool_formats.hermes, grammars.HERMES, ("<tool_call>",), XML_MARKS),
    ToolFormat("pythonic", pythonic, grammars.PYTHONIC, ("func_name1(",), (PYTHON_START, PYTHON_END)),
    ToolFormat("llama3_json", tool_formats.llama3_json, grammars.LLAMA3_JSON, ("python_tag",), LLAMA_MARKS),
    ToolFormat("llama3_json", tool_formats.llama3_json, grammars.LLAMA3_JSON, ('"parameters": ',), LLAMA_MARKS),
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
HARMONY = ReasoningFormat("openai_gptoss", marks=harmony.MARKS)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    item.name: item
    for item in (
        ReasoningFormat("qwen3"),
        ReasoningFormat("deepseek_r1", always=True),
        HARMONY,
        ReasoningFormat("glm45"),
        ReasoningFormat("kimi_k2", ends=(tool_formats.KIMI_CALLS,)),
    )
}


@dataclass(frozen=True)
class AnswerFormat:
    """A model's form of tool calls and reasoning. `in_prompt`: its template shows tools to the model."""

    tools: ToolFormat = field(default_factory=lambda: HERMES)
    reasoning: ReasoningFormat | None = None
    in_prompt: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that the parsers must see."""
        return self.tools.marks + (self.reasoning.marks if self.reasoning else ())

    @property
    def harmony(self) -> bool:
        """True if answers are messages in channels, whose reasoning and calls are parsed together."""
        return self.reasoning is HARMONY or self.tools.name == "openai"

    def begin(self, prompt: str) -> Begin:
        """Return how the answer to a rendered prompt begins."""
        return Begin.NONE if self.reasoning is None else beginning(prompt, self.reasoning.always)

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
            begin, ends = self.begin(prompt), self.reasoning.ends
            return StreamParser(lambda reader: think(reader, begin, rest, ends))
        return StreamParser(rest) if tools else None


def choose_format(template: str | None, tools: str | None = None, reasoning: str | None = None) -> AnswerFormat:
    """The format of a model with the chat template `template`; `tools` and `reasoning` name parsers instead.

    Raises ConfigError for a name that is not known.
    """
    source = template or ""
    if tools is None:
        tool_format = next((item for item in FORMATS if all(sign in source for sign in item.signs)), HERMES)
    else:
        name = _check_known(TOOL_ALIASES.get(tools, tools), TOOL_FORMATS, "--tool-call-parser")
        named = [item for item in FORMATS if item.name == name]
        tool_format = next((item for item in named if all(sign in source for sign in item.signs)), named[-1])
    if reasoning is None:
        reasoning_format = _reasoning_of(source, tool_format)
    else:
        reasoning_format = REASONING_FORMATS[_check_known(reasoning, REASONING_FORMATS, "--reasoning-parser")]
    return AnswerFormat(tool_format, reasoning_format, in_prompt=SHOWS_TOOLS.search(source) is not None)


def _reasoning_of(source: str, tools: ToolFormat) -> ReasoningFormat | None:
    if tools.name == "openai":
        return HARMONY
    if THINK_END not in source:
        return None
    return REASONING_FORMATS.get(tools.name, REASONING_FORMATS["qwen3"])


def _check_known(name: str, known: Mapping[str, Any], flag: str) -> str:
    if name not in known:
        suggestion = nearest_name(name, known)
        raise ConfigError(
            f"{flag} {name!r:.80} is not known{suggestion}; known: {', '.join(known)}", code="unknown-parser"
        )
    return name
