"""Anthropic's requests as requests of a chat: blocks, tools, thinking."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.api.anthropic.types import (
    AnthropicMessage,
    AnthropicTool,
    Block,
    CountRequest,
    MessagesRequest,
    OutputConfig,
    OutputFormat,
    Thinking,
    ToolChoice,
)
from weft.api.conversation.chat_prompt import PreparedChat, continue_last, count_prompt, prepare_chat
from weft.api.service.openai_types import ChatRequest
from weft.api.service.sampling import check_lengths
from weft.api.service.service import Service
from weft.engine.templates.messages import result_text
from weft.errors import RequestError

BILLING = "x-anthropic-billing-header:"
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


@dataclass(frozen=True)
class PreparedMessages:
    """A checked request."""

    body: MessagesRequest
    chat: PreparedChat

    @property
    def shows_thinking(self) -> bool:
        thinking = self.body.thinking
        return thinking is not None and thinking.type != "disabled"


async def prepare_messages(service: Service, content: bytes) -> PreparedMessages:
    """Check a body of /v1/messages and tokenize its prompt. Raises RequestError and HttpError."""
    body = service.decode_body(content, MessagesRequest)
    common = common_request(body)
    common.max_tokens, common.stream = body.max_tokens, body.stream
    common.temperature, common.top_p, common.top_k = body.temperature, body.top_p, body.top_k
    common.stop, common.seed, common.cache_salt = body.stop_sequences, body.seed, body.cache_salt
    common.continue_token_ids = body.continue_token_ids
    lengths = {"stop": body.stop_sequences}
    check_lengths(lengths, vocab=service.frontend.vocab, max_model_len=service.frontend.max_model_len)
    return PreparedMessages(body, await prepare_chat(service, common, body.stream_state, clips=True))


async def count_tokens(service: Service, content: bytes) -> int:
    """Number of tokens of the prompt that a body of /v1/messages/count_tokens describes."""
    body = service.decode_body(content, CountRequest)
    service.resolve_model(body.model)
    return await count_prompt(service, common_request(body))


def common_request(body: CountRequest) -> ChatRequest:
    """The request in the form of all chats, with the fields that its prompt depends on. Raises RequestError."""
    messages: list[dict[str, Any]] = []
    system = _text(_without_billing(body.system), "system") if body.system else ""
    if system:
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{number}]")
    common = ChatRequest(model=body.model, messages=messages)
    common.tools = [_tool(tool) for tool in body.tools or ()] or None
    if body.tool_choice is not None:
        common.tool_choice = _tool_choice(body.tool_choice)
        common.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    common.chat_template_kwargs = _thinking(body.thinking)
    config = body.output_config or OutputConfig()
    _set_output(common, config.effort, config.format or body.output_format)
    continue_last(common)
    return common


def _without_billing(system: str | Sequence[Block]) -> str | Sequence[Block]:
    """The system blocks without Claude Code's first one: it differs in each request, and no prefix would be cached."""
    if isinstance(system, str):
        return system
    return [block for block in system if not (block.text or "").startswith(BILLING)]


def _thinking(thinking: Thinking | None) -> dict[str, Any]:
    """Variables of chat templates: without `thinking` a model does not reason, if its template has a switch."""
    thinks = thinking is not None and thinking.type != "disabled"
    return {"enable_thinking": thinks, "thinking": thinks}


def _set_output(common: ChatRequest, effort: str | None, wanted: OutputFormat | None) -> None:
    if effort is not None:
        if effort not in EFFORTS:
            raise RequestError(
                f"output_config.effort is {effort!r:.60}; it can be {', '.join(EFFORTS)}",
                param="output_config.effort",
                code="unknown-effort",
            )
        common.reasoning_effort = EFFORTS[effort]
    if wanted is not None:
        common.response_format = {"type": wanted.type, "json_schema": {"name": "output", "schema": wanted.schema}}


def _messages(message: AnthropicMessage, place: str) -> Iterable[dict[str, Any]]:
    """A message in the form of all chats: tool results are separate messages."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant_message(message.content, place)]
    made: list[dict[str, Any]] = []
    texts: list[str] = []
    for number, block in enumerate(message.content):
        where = f"{place}.content[{number}]"
        if block.type == "tool_result":
            made.append(_result_message(block, where))
        else:
            texts.append(_block_text(block, where))
    if texts or not made:
        made.append({"role": message.role, "content": "\n".join(texts)})
    return made


def _assistant_message(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                continue
            case "tool_use":
                arguments = msgspec.json.encode(block.input or {}).decode()
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                texts.append(_block_text(block, f"{place}.content[{number}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _result_message(block: Block, place: str) -> dict[str, Any]:
    if not block.tool_use_id:
        raise RequestError(f"{place} needs a tool_use_id", param="messages", code="tool-result-without-id")
    content = result_text(block.content)
    text = f"Error: {content}" if block.is_error else content
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _text(content: str | Sequence[Block], place: str) -> str:
    """The text of a content, whose blocks may hold nothing else."""
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{place}[{number}]") for number, block in enumerate(content))


def _block_text(block: Block, place: str) -> str:
    if block.type != "text" or block.text is None:
        raise RequestError(
            f"{place} is of type {block.type!r:.80}; this model takes text, thinking, tool_use and tool_result",
            param="messages",
            code="content-part-not-text",
        )
    return block.text


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        return {"type": tool.type}  # run by Anthropic's servers: left out
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema or {"type": "object"}}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)
