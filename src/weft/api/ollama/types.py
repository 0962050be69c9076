"""Request and response types of Ollama's API (docs/api.md of github.com/ollama/ollama). Durations are nanoseconds."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from weft.api.conversation.answer_ids import StreamState


class ModelRequest(Struct, kw_only=True):
    """A request about one model; old clients say `name`."""

    model: str | None = None
    name: str | None = None


class PullRequest(ModelRequest, kw_only=True):
    """`insecure` is accepted and changes nothing: HF_ENDPOINT says where models come from."""

    stream: bool | None = None
    insecure: bool | None = None


class ShowRequest(ModelRequest, kw_only=True):
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


class ModelDetails(Struct, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelRow(Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ModelList(Struct):
    models: list[ModelRow]


class RunningRow(Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class RunningList(Struct):
    models: list[RunningRow]


class ShowAnswer(Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    license: str = ""


class VersionAnswer(Struct):
    version: str


class PullStatus(Struct, kw_only=True):
    """One step of a download; `total` and `completed` are bytes of the file with this `digest`."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class ToolCallFunction(Struct, kw_only=True):
    """A call of a tool; its `arguments` are an object. Clients send back what other servers gave them, too."""

    name: str
    arguments: dict[str, Any] | str | None = {}
    index: int | UnsetType = UNSET


class OllamaToolCall(Struct, kw_only=True):
    function: ToolCallFunction
    id: str | UnsetType = UNSET


class OllamaMessage(Struct, kw_only=True):
    """A message of a conversation."""

    role: str
    content: str | None = ""
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaOptions(Struct, kw_only=True):
    """Parameters of an answer by Ollama's names; parameters of a model's loading are ignored.

    `num_predict` sets no limit unless it is above 0. The last three are refused unless they ask for nothing.
    """

    seed: int | None = None
    num_predict: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    temperature: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None


class AnswerRequest(ModelRequest, kw_only=True):
    """Fields of /api/chat and /api/generate. `keep_alive` of 0 unloads the model, until the next request.

    `options` are the model's parameters by Ollama's names. `format` is "json" or a JSON schema. `think`: if the model
    is to reason, or how much. The last four fields are Weft's, for streams that another server continues; `seed`
    applies if `options` have no seed.
    """

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    shift: bool | None = None
    seed: int | None = None
    return_token_ids: bool | None = None
    continue_token_ids: list[int] | None = None
    stream_state: StreamState | None = None


class OllamaChatRequest(AnswerRequest, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(AnswerRequest, kw_only=True):
    """A request to answer one prompt. `raw`: the prompt is not put into the chat template."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[str] | None = None


class AnswerMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaTokenLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class PositionLogprobs(OllamaTokenLogprob, kw_only=True):
    top_logprobs: list[OllamaTokenLogprob]


class AnswerPart(Struct, kw_only=True):
    """Fields of every part of an answer; the last part has counts and times."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[PositionLogprobs] | UnsetType = UNSET


class ChatAnswer(AnswerPart, kw_only=True):
    message: AnswerMessage


class GenerateAnswer(AnswerPart, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET
