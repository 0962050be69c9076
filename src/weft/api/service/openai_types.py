"""Request and response types of the OpenAI API, with vLLM's additional fields."""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import UNSET, Struct, UnsetType


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingRequest(Struct, kw_only=True):
    """Fields that both completion endpoints accept. None counts as absent: OpenAI's clients send it.

    `return_token_ids`: send the token ids of the answer, and with its beginning the prompt's ids. `continue_token_ids`:
    the beginning of a streamed answer of another server; this server streams the rest. Even an empty list means that
    the prompt's ids are not sent.
    """

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    continue_token_ids: list[int] | None = None


class TemplateRequest(Protocol):
    """The fields of a request that control the chat template."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


class ChatRequest(SamplingRequest, kw_only=True):
    """A chat request. `messages` are checked when they are rendered, `tools` by `api.conversation.tools`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Struct, kw_only=True):
    """Request to tokenize a text (`prompt`) or a conversation (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """Logprobs of the legacy endpoint: one list per property.

    `text_offset` counts characters of the choice's text. `top_logprobs` includes the sampled token even if it is not
    among the likeliest.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class FunctionCall(Struct, kw_only=True, omit_defaults=True):
    name: str | None = None
    arguments: str


class CustomCall(Struct, kw_only=True):
    name: str
    input: str


class ChatToolCall(Struct, kw_only=True):
    """A call of a function, or of a custom tool."""

    id: str
    type: str = "function"
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class ChatToolCallDelta(Struct, kw_only=True):
    """A part of a tool call; the first has its id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class ChatMessage(Struct, kw_only=True):
    role: str
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCallDelta] | None = None


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A whole response, or one chunk of a stream: the legacy endpoint uses one type for both."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
