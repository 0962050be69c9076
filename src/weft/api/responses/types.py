"""Request, response and event types of OpenAI's /v1/responses."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from weft.api.conversation.answer_ids import StreamState


class InputPart(Struct, kw_only=True):
    """A part of a content that comes in; `type` is input_text, output_text, text, refusal or reasoning_text."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, kw_only=True):
    """An item of a conversation: a message, a call of a tool, its result, reasoning, or more tools."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: Any = None
    tools: list[dict[str, Any]] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class TextFormat(Struct, kw_only=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct, kw_only=True):
    """`summary` is accepted; the reasoning is sent as it is, and no summary of it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesStreamOptions(Struct, kw_only=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(Struct, kw_only=True):
    """A request to answer. The last three fields are Weft's, for streams that another server continues."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    cache_salt: str | None = None
    seed: int | None = None
    priority: int | None = None
    top_k: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    continue_token_ids: list[int] | None = None
    stream_state: StreamState | None = None


class TopTokenLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TextLogprob(TopTokenLogprob, kw_only=True):
    top_logprobs: list[TopTokenLogprob]


class OutputText(Struct, kw_only=True):
    type: str = "output_text"
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)


class ReasoningText(Struct, kw_only=True):
    type: str = "reasoning_text"
    text: str


class MessageItem(Struct, kw_only=True):
    type: str = "message"
    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, kw_only=True):
    type: str = "reasoning"
    id: str
    status: str
    summary: list[Any] = field(default_factory=list)
    content: list[ReasoningText]


class FunctionCallItem(Struct, kw_only=True):
    type: str = "function_call"
    id: str
    status: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomToolCallItem(Struct, kw_only=True):
    type: str = "custom_tool_call"
    id: str
    status: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


class ShellCallItem(Struct, kw_only=True):
    """A command for the client's local shell. `action` is of type exec."""

    type: str = "local_shell_call"
    id: str
    status: str
    call_id: str
    action: dict[str, Any]


class InputTokensDetails(Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct, kw_only=True):
    reason: str


class ResponseError(Struct, kw_only=True):
    code: str
    message: str


class ResponseObject(Struct, kw_only=True):
    """A response. `output` holds MessageItem, ReasoningItem and items of calls."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[Any] = field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: ReasoningConfig = field(default_factory=ReasoningConfig)
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: TextConfig
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = field(default_factory=list)
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)


class ResponseEvent(Struct, kw_only=True):
    """An event of a stream; each `type` has some of the fields. `item` and `part` are as in the response."""

    type: str
    sequence_number: int = 0
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Any = UNSET
    part: Any = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[TextLogprob] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
