"""RequestOutput: an answer as the caller gets it, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.engine.core.token_ids import TokenIds


@dataclass
class Logprob:
    """Natural log of the probability, rank in the vocabulary (1 = likeliest), and the token as text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class Metrics:
    """Times of a request's events, in seconds on the monotonic clock; None before the event."""

    arrival_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass
class CompletionOutput:
    """One choice. `text` and `token_ids` hold everything generated so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """One prompt, whose token ids are packed in `prompt_ids`, and its choices, in order of their index.

    `pooled` are the float32 numbers of a request for an embedding or a score, in little-endian bytes.
    """

    request_id: str
    prompt: str | None
    prompt_ids: TokenIds
    outputs: list[CompletionOutput]
    metrics: Metrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    pooled: bytes | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt, in a new list."""
        return list(self.prompt_ids)


@dataclass
class EmbeddingOutput:
    """The embedding of one prompt, whose token ids are packed in `prompt_ids`."""

    request_id: str
    embedding: list[float]
    prompt_ids: TokenIds
    num_cached_tokens: int = 0

    @property
    def outputs(self) -> EmbeddingOutput:
        """This output: vLLM's has the embedding one level below."""
        return self

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt, in a new list."""
        return list(self.prompt_ids)
