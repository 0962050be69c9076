"""Request and response types of Anthropic's /v1/messages (docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from weft.api.conversation.answer_ids import StreamState


class Block(Struct, kw_only=True):
    """A part of a message that comes in; each `type` has some of the fields."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class AnthropicMessage(Struct, kw_only=True):
    role: str
    content: str | list[Block]


class AnthropicTool(Struct, kw_only=True):
    """A tool of the client's. Tools of Anthropic's servers have another `type` and are left out."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """`budget_tokens` is accepted and limits nothing: `max_tokens` limits reasoning and answer together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(Struct, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Struct, kw_only=True):
    """A conversation whose tokens are to be counted. `output_format` is an earlier name of `output_config.format`."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """A request to answer. `cache_salt` is vLLM's; the others are for streams that another server continues."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    seed: int | None = None
    return_token_ids: bool | None = None
    continue_token_ids: list[int] | None = None
    stream_state: StreamState | None = None


class AnthropicUsage(Struct, kw_only=True):
    """Numbers of tokens. Prompt tokens that the cache had are in `cache_read_input_tokens` only."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class TextBlock(Struct, kw_only=True):
    type: str = "text"
    text: str


class ThinkingBlock(Struct, kw_only=True):
    """Reasoning. A model's own has no signature."""

    type: str = "thinking"
    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, kw_only=True):
    type: str = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class AnthropicAnswer(Struct, kw_only=True):
    """An answer; while it is streamed, its beginning."""

    id: str
    type: str = "message"
    role: str = "assistant"
    content: list[Any]
    model: str
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage


class TokenCount(Struct):
    input_tokens: int


class ContentDelta(Struct, kw_only=True):
    """New text of a block, by its `type`."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class EndDelta(Struct, kw_only=True):
    stop_reason: str | None
    stop_sequence: str | None


class StreamEvent(Struct, kw_only=True):
    """An event of a stream; each `type` has some of the fields."""

    type: str
    message: AnthropicAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Any = UNSET
    delta: Any = UNSET  # Delta or EndDelta
    usage: AnthropicUsage | UnsetType = UNSET
