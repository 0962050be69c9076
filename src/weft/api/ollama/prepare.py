"""Ollama's requests as requests of a chat: messages, options, format and thinking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from weft.api.conversation.answer_ids import check_state
from weft.api.conversation.chat_prompt import PreparedChat, continue_last, prepare_chat
from weft.api.conversation.tools import ToolUse
from weft.api.ollama.names import requested_name, resolve_served
from weft.api.ollama.types import AnswerRequest, GenerateRequest, OllamaChatRequest, OllamaMessage, OllamaOptions
from weft.api.parsers.choose import AnswerFormat
from weft.api.service.continuation import answered_ids
from weft.api.service.openai_types import ChatRequest
from weft.api.service.sampling import check_lengths, sampling_fields
from weft.api.service.service import Service
from weft.api.service.structured import wanted_output
from weft.engine.core.params import OTHER_NAMES
from weft.engine.templates.messages import name_part
from weft.errors import RequestError

# Options that would change the answer and that Weft does not have, and their values without effect.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"mirostat": (0,), "tfs_z": (1,), "typical_p": (0, 1)}


@dataclass(frozen=True)
class Prepared:
    """A checked request. `chat` is None if it asks for no answer, but only for the model to be loaded."""

    name: str
    body: AnswerRequest
    chat: PreparedChat | None
    shows_reasoning: bool


async def prepare_ollama_chat(service: Service, content: bytes) -> Prepared:
    """Check a body of /api/chat, and tokenize its messages."""
    body = service.decode_body(content, OllamaChatRequest)
    name = requested_name(body)
    common = _common(service, body)
    if not body.messages:
        return Prepared(name, body, None, shows_reasoning=False)
    common.messages = [_message(message) for message in body.messages]
    common.tools = body.tools or None
    continue_last(common)
    chat = await prepare_chat(service, common, body.stream_state, clips=True)
    return Prepared(name, body, chat, shows_reasoning=body.think is not False)


async def prepare_generate(service: Service, content: bytes) -> Prepared:
    """Check a body of /api/generate, and tokenize its prompt."""
    body = service.decode_body(content, GenerateRequest)
    name = requested_name(body)
    _refuse(body.template, "template", "the model's own chat template is used; `raw` leaves it out")
    _refuse(body.context, "context", "send the earlier messages to /api/chat instead")
    _refuse(body.images, "images", "this model reads text only")
    _refuse(body.suffix, "suffix", "models do not fill in here")
    common = _common(service, body)
    if not body.prompt:
        return Prepared(name, body, None, shows_reasoning=False)
    if body.raw or service.frontend.template_source is None:
        return Prepared(name, body, await _prepare_raw(service, common, body), shows_reasoning=False)
    system = [{"role": "system", "content": body.system}] if body.system else []
    common.messages = [*system, {"role": "user", "content": body.prompt}]
    chat = await prepare_chat(service, common, body.stream_state, clips=True)
    return Prepared(name, body, chat, shows_reasoning=body.think is not False)


async def _prepare_raw(service: Service, common: ChatRequest, body: GenerateRequest) -> PreparedChat:
    """A prompt without template, whose answer is plain text."""
    fields = sampling_fields(common) | {"structured_outputs": wanted_output(common)[0]}
    if common.logprobs:
        fields["logprobs"] = common.top_logprobs or 0
    params = service.frontend.sampling_params(fields, max_tokens=None)
    check_state(body.stream_state)
    prompt = service.frontend.parse_prompt(body.prompt or "")
    prompt = replace(prompt, answered=answered_ids(common, service.frontend.vocab))
    grammar = await service.frontend.answer_grammar(params)
    collectors = service.create_collectors(
        [prompt], params, priority=None, grammar=grammar, wanted_tokens=fields["max_tokens"], clips=True
    )
    return PreparedChat(common, common.model or "", collectors, AnswerFormat(), ToolUse(), body.stream_state)


def _common(service: Service, body: AnswerRequest) -> ChatRequest:
    """The request in the form of all chats, still without messages."""
    own = resolve_served(service, requested_name(body))
    common = ChatRequest(model=own, messages=[], **option_fields(service, body.options or OllamaOptions()))
    if common.seed in (None, -1):
        common.seed = body.seed
    common.stream, common.continue_token_ids = body.stream is not False, body.continue_token_ids
    common.logprobs, common.top_logprobs = body.logprobs, body.top_logprobs
    if body.logprobs is None and body.top_logprobs:
        common.logprobs = True
    common.response_format = response_format(body.format)
    if body.think is False:
        common.reasoning_effort = "none"
    elif isinstance(body.think, str):
        common.reasoning_effort = body.think
    elif body.think:
        common.chat_template_kwargs = {"enable_thinking": True, "thinking": True}
    return common


def option_fields(service: Service, options: OllamaOptions) -> dict[str, Any]:
    """Sampling fields for a request's options. Raises RequestError."""
    for name, harmless in UNSUPPORTED.items():
        given = getattr(options, name)
        if given is not None and given not in harmless:
            raise RequestError(
                f"the option {name} is not supported; leave it out", param=f"options.{name}", code="unsupported-field"
            )
    given = (name for name in options.__struct_fields__ if name not in UNSUPPORTED)
    values = {OTHER_NAMES.get(name, name): getattr(options, name) for name in given}
    fields = {field: value for field, value in values.items() if value is not None}
    if fields.get("max_tokens", 1) <= 0:
        del fields["max_tokens"]  # -1 and 0: no limit, -2: until the context is full
    check_lengths(fields, vocab=service.frontend.vocab, max_model_len=service.frontend.max_model_len)
    return fields


def response_format(wanted_format: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """OpenAI's `response_format` for Ollama's `format`. Raises RequestError."""
    if not wanted_format:
        return None
    if isinstance(wanted_format, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": wanted_format}}
    if wanted_format != "json":
        raise RequestError(
            f'format is {wanted_format!r:.60}; it must be "json" or a JSON schema',
            param="format",
            code="unknown-format",
        )
    return {"type": "json_object"}


def _message(message: OllamaMessage) -> dict[str, Any]:
    """A message in the form of all chats."""
    common: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.images and message.role == "tool":
        common["content"] = "\n".join(text for text in (common["content"], name_part("image")) if text)
    else:
        _refuse(message.images, "images", "this model reads text only")
    if message.thinking:
        common["reasoning_content"] = message.thinking
    if message.tool_calls:
        common["tool_calls"] = [
            {
                "id": call.id if isinstance(call.id, str) else f"call_{number}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for number, call in enumerate(message.tool_calls)
        ]
    if message.tool_name:
        common["name"] = message.tool_name
    if message.tool_call_id:
        common["tool_call_id"] = message.tool_call_id
    return common


def _refuse(value: object, field: str, way_out: str) -> None:
    if value:
        raise RequestError(f"{field} is not supported; {way_out}", param=field, code="unsupported-field")
