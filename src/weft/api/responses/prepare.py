"""Requests of /v1/responses as requests of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.api.conversation.chat_prompt import PreparedChat, prepare_chat
from weft.api.conversation.client_tools import SHELL, SHELL_PARAMETERS, ClientTools, encode_input, response_tools
from weft.api.responses.types import InputItem, InputPart, ResponsesRequest, TextFormat
from weft.api.service.openai_types import ChatRequest
from weft.api.service.service import Service
from weft.engine.templates.messages import result_text
from weft.errors import RequestError
from weft.http.body import Notes

LOGPROBS = "message.output_text.logprobs"
# Items that a client may ask to include. None of the second kind exist here, and their absence changes no text.
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
SHELL_FIELDS = frozenset(SHELL_PARAMETERS["properties"])  # of a shell's action, that the model has given
WITH_TOOLS = ("additional_tools", "tool_search_output")  # items that add tools to the request
TEXT_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True)
class PreparedResponse:
    """A checked request."""

    body: ResponsesRequest
    chat: PreparedChat


async def prepare_response(service: Service, content: bytes) -> PreparedResponse:
    """Check a body and tokenize its conversation. Raises RequestError and HttpError."""
    body = service.decode_body(content, ResponsesRequest)
    check_stateless(body)
    given = body.input if isinstance(body.input, list) else []
    later = [tool for item in given if item.type in WITH_TOOLS for tool in item.tools or ()]
    tools = response_tools([*(body.tools or ()), *later])
    common = ChatRequest(model=body.model, messages=read_input(body, tools, service.notes))
    common.max_completion_tokens, common.stream = body.max_output_tokens, body.stream
    common.temperature, common.top_p, common.top_k = body.temperature, body.top_p, body.top_k
    common.seed, common.priority, common.cache_salt = body.seed, body.priority, body.cache_salt
    common.chat_template_kwargs = body.chat_template_kwargs
    common.tool_choice = body.tool_choice
    common.parallel_tool_calls = body.parallel_tool_calls
    if body.reasoning is not None:
        common.reasoning_effort = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        common.response_format = _format(body.text.format)
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        common.logprobs, common.top_logprobs = True, body.top_logprobs
    common.continue_token_ids = body.continue_token_ids
    if common.logprobs and body.continue_token_ids:
        raise RequestError(
            "continue_token_ids needs a response without logprobs: its last events repeat all of them",
            param="continue_token_ids",
            code="continuation-not-possible",
        )
    return PreparedResponse(body, await prepare_chat(service, common, body.stream_state, tools=tools))


def check_stateless(body: ResponsesRequest) -> None:
    """Raise RequestError for a request that needs what earlier ones said, or that is to be kept."""
    kept: dict[str, object] = {
        "store": body.store,
        "background": body.background,
        "previous_response_id": body.previous_response_id,
        "conversation": body.conversation,
        "prompt": body.prompt,
    }
    for name, value in kept.items():
        if value:
            raise RequestError(
                f"{name} is not supported: nothing is kept between requests; send the whole conversation as input",
                param=name,
                code="unsupported-field",
            )
    if body.truncation not in (None, "disabled", "auto"):
        raise RequestError(
            f"truncation is {body.truncation!r:.60}; it is auto or disabled", param="truncation", code="invalid-field"
        )
    for name in body.include or ():
        if name not in INCLUDED:
            raise RequestError(
                f"include has {name!r:.80}; it can have {', '.join(INCLUDED)}", param="include", code="unknown-include"
            )


def read_input(body: ResponsesRequest, tools: ClientTools, notes: Notes) -> list[dict[str, Any]]:
    """The conversation as messages; everything from the model between two other messages is one message."""
    if body.truncation == "auto":
        notes.add("truncation", "truncation 'auto' is left out: a conversation that is too long is refused")
    reader = _InputReader(tools, notes)
    if body.instructions:
        reader.messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        reader.messages.append({"role": "user", "content": body.input})
    else:
        for number, item in enumerate(body.input):
            reader.add(item, f"input[{number}]")
    reader.end_turn()
    return reader.messages


class _InputReader:
    """Gathers messages; `_turn` is the model's last message."""

    def __init__(self, tools: ClientTools, notes: Notes) -> None:
        self._tools, self._notes = tools, notes
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] = {}

    def end_turn(self) -> None:
        """Add a text of the model."""
        if self._turn:
            self.messages.append({"role": "assistant", "content": None, **self._turn})
            if "tool_calls" not in self._turn:
                self.messages[-1]["content"] = self._turn.get("content", "")
        self._turn = {}

    def add(self, item: InputItem, place: str) -> None:
        match item.type:
            case "message" if item.role == "assistant":
                if "content" in self._turn or "tool_calls" in self._turn:
                    self.end_turn()
                self._turn["content"] = _text(item.content, f"{place}.content")
            case "message":
                self.end_turn()
                self.messages.append({"role": item.role, "content": _message_text(item, f"{place}.content")})
            case "reasoning":
                self._add_reasoning(item)
            case "function_call":
                self._add_call(item, place, _json_text(item.arguments))
            case "custom_tool_call":
                self._add_call(item, place, encode_input(item.input or ""))
            case "local_shell_call":
                action = {name: value for name, value in (item.action or {}).items() if name in SHELL_FIELDS}
                item.name, item.call_id = SHELL, item.call_id or item.id
                self._add_call(item, place, msgspec.json.encode(action).decode())
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                self.end_turn()
                id = _required(item.call_id or item.id, f"{place}.call_id")
                self.messages.append({"role": "tool", "tool_call_id": id, "content": result_text(item.output)})
            case "additional_tools":
                pass  # `prepare_response` has read them
            case kind:
                self._notes.add(
                    f"item {kind}",
                    f"items of type {kind!r:.80} are left out of conversations: nothing is kept between requests, and "
                    "no tool runs here",
                )

    def _add_call(self, item: InputItem, place: str, arguments: str) -> None:
        """Add a call to what the model has said, by the name that it knows."""
        name = self._tools.model_name(_required(item.name, f"{place}.name"), item.namespace)
        function = {"name": name, "arguments": arguments or "{}"}
        id = _required(item.call_id, f"{place}.call_id")
        self._turn.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})

    def _add_reasoning(self, item: InputItem) -> None:
        """Add reasoning as the model wrote it; reasoning that only OpenAI's servers can read is left out."""
        if self._turn:
            self.end_turn()
        parts = item.content if isinstance(item.content, list) and item.content else item.summary or ()
        text = "\n".join(part.text or "" for part in parts)
        if text:
            self._turn["reasoning_content"] = text


def _text(content: str | Sequence[InputPart] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*TEXT_PARTS, "refusal") or text is None:
            raise RequestError(
                f"{place}[{number}] is of type {part.type!r:.80}; this model takes text only",
                param="input",
                code="content-part-not-text",
            )
        texts.append(text)
    return "\n".join(texts)


def _json_text(arguments: object) -> str:
    """A call's arguments as the text that they should be."""
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()


def _message_text(item: InputItem, place: str) -> str:
    """The text of a message that is not the model's, which has some content."""
    if item.content is None:
        raise _missing(place)
    return _text(item.content, place)


def _required(value: str | None, place: str) -> str:
    if not value:
        raise _missing(place)
    return value


def _missing(place: str) -> RequestError:
    return RequestError(f"{place} is missing", param="input", code="field-missing")


def _format(text: TextFormat) -> dict[str, Any]:
    if text.type != "json_schema":
        return {"type": text.type}
    schema = {"name": text.name, "schema": text.schema, "strict": text.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}
