"""prepare_chat: from a chat request to a tokenized prompt, with its tools, constraints and parsers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request

from weft.api.conversation.answer_grammar import answer_grammar
from weft.api.conversation.answer_ids import StreamState, check_state
from weft.api.conversation.client_tools import ClientTools, chat_tools, functions_called
from weft.api.conversation.tools import ToolUse, add_tools_message, call_form, read_tools
from weft.api.observe.prefix_debug import PrefixReport
from weft.api.parsers.choose import AnswerFormat
from weft.api.parsers.reader import StreamParser
from weft.api.service.continuation import answered_ids
from weft.api.service.openai_types import ChatRequest
from weft.api.service.sampling import sampling_fields
from weft.api.service.service import Service
from weft.api.service.structured import wanted_output
from weft.engine.core.params import MAX_LOGPROBS
from weft.engine.frontend.collector import Collector
from weft.engine.frontend.prompt import Prompt
from weft.engine.templates.limits import LIMITS
from weft.errors import RequestError


class PreparedChat(msgspec.Struct, frozen=True):
    """A checked and tokenized chat request. `state`: the state of a stream that another server began."""

    body: ChatRequest
    model: str
    collectors: list[Collector]
    format: AnswerFormat
    use: ToolUse
    state: StreamState | None = None

    @property
    def parsed(self) -> bool:
        """True if the answer's text may hold more than content."""
        return bool(self.use.tools) or self.format.reasoning is not None or self.format.harmony

    @property
    def most_calls(self) -> int:
        """Number of tool calls that the answer may have."""
        return sys.maxsize if self.body.parallel_tool_calls is not False else 1

    @property
    def named_tool(self) -> str | None:
        """The tool that the caller wants to be called."""
        return self.use.named

    def report(self, service: Service, request: Request) -> PrefixReport | None:
        """Report for the answer on its prompt's place in the prefix cache; to be created before the submission."""
        return service.prefix_report(request, self.collectors[0], self.body.messages, self.use.tools)

    def new_parser(self, prompt: str) -> StreamParser | None:
        """A parser for one choice of the rendered `prompt`; None if the answer is text only."""
        return self.format.parser(prompt, self.use.callable)


async def prepare_chat(
    service: Service,
    body: ChatRequest,
    state: StreamState | None = None,
    *,
    tools: ClientTools | None = None,
    clips: bool = False,
) -> PreparedChat:
    """Check a request, render its messages and tokenize them. Raises RequestError and HttpError.

    `tools` are the tools of an API with its own forms. `clips`: max_tokens is reduced to the context, as in APIs whose
    clients always send it.
    """
    check_state(state)
    model = service.resolve_model(body.model)
    fields = sampling_fields(body)
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            "top_logprobs needs logprobs to be true", param="top_logprobs", code="top-logprobs-without-logprobs"
        )
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
        if not 0 <= fields["logprobs"] <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs is {body.top_logprobs}; it must be from 0 to {MAX_LOGPROBS}",
                param="top_logprobs",
                code="invalid-parameter",
            )
    use = _tool_use(service, body, tools)
    sampling_params = service.frontend.sampling_params(fields, max_tokens=None)
    service.check_capacity(1, sampling_params)
    answer_format = service.answer_format
    messages, arguments = _template_input(service, body, use, answer_format)
    prompt = await service.frontend.chat_prompt(messages, **arguments)
    prompt = replace(prompt, cache_salt=body.cache_salt, answered=answered_ids(body, service.frontend.vocab))
    prepared = PreparedChat(body, model, [], answer_format, use, state)
    shown = service.frontend.special_ids(answer_format.marks) if prepared.parsed else frozenset()
    grammar = await _grammar(service, prepared, prompt)
    prepared.collectors.extend(
        service.create_collectors(
            [prompt],
            sampling_params,
            priority=body.priority,
            shown=shown,
            grammar=grammar,
            wanted_tokens=fields["max_tokens"],
            clips=clips,
        )
    )
    return prepared


def _tool_use(service: Service, body: ChatRequest, given: ClientTools | None = None) -> ToolUse:
    given = given or chat_tools(body.tools or ())
    use = read_tools(given, body.tool_choice)
    for kind in given.left_out:
        service.notes.add(f"tool {kind}", f"tools of type {kind!r:.80} are left out: no such tool is run or known here")
    return use


async def _grammar(service: Service, prepared: PreparedChat, prompt: Prompt) -> str:
    """The checked text of the answer's grammar; "" if the answer is free."""
    wanted, param = wanted_output(prepared.body)
    if wanted is None and not prepared.use.forced:
        return ""
    tokenizer = service.frontend.require_tokenizer("a grammar", param or "tool_choice")
    several = prepared.body.parallel_tool_calls is not False and prepared.use.named is None

    def make() -> str:
        return answer_grammar(prepared.format, prepared.use, wanted, tokenizer, prompt.text or "", several=several)

    grammar = await service.frontend.examiner.build(make)
    await service.frontend.examiner.check(grammar, "tools" if prepared.use.forced else param)
    return grammar


def _template_input(
    service: Service, body: ChatRequest, use: ToolUse, answer_format: AnswerFormat
) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
    """The messages and the keyword arguments of `Frontend.chat_prompt`."""
    arguments = service.template_arguments(body)
    variables: dict[str, Any] = arguments["template_variables"]
    variables |= {**_effort(body.reasoning_effort), **(body.chat_template_kwargs or {})}
    messages = functions_called(body.messages)
    arguments["call_form"] = form = call_form(answer_format.tools)
    if not use.tools:
        return messages, arguments
    if answer_format.in_prompt:
        variables["tools"] = use.tools
        return messages, arguments
    return add_tools_message(messages, use.tools, form), arguments


def continue_last(body: ChatRequest) -> None:
    """Let the answer continue the last message, if it is the assistant's and calls no tool.

    Anthropic's and Ollama's APIs do the same, without a field for it.
    """
    last = body.messages[-1] if body.messages else None
    if isinstance(last, Mapping) and last.get("role") == "assistant" and not last.get("tool_calls"):
        body.continue_final_message, body.add_generation_prompt = True, False


def _effort(effort: str | None) -> dict[str, Any]:
    """Variables of chat templates for an effort: harmony reads its name, others only whether to think at all."""
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


async def count_prompt(service: Service, body: ChatRequest, tools: ClientTools | None = None) -> int:
    """Number of tokens of a request's prompt, which may be longer than the model can read."""
    messages, arguments = _template_input(service, body, _tool_use(service, body, tools), service.answer_format)
    _, ids = await service.frontend.encode_chat(messages, least=LIMITS.tokenize_characters, **arguments)
    return len(ids)
