"""Request and Output: what goes into the core and what comes out, token ids only."""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.core.params import SamplingParams
from weft.core.step import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one prompt. `params.n` is 1's business no longer: the client has expanded it.

    `key` is the 64-bit key of its random stream, from seed and choice index; `stop_ids` are all ids that end
    it (the model's own unless ignore_eos, and stop_token_ids). Lower `priority` runs first under that policy.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    key: int = 0
    stop_ids: tuple[int, ...] = ()
    priority: int = 0


class Output(msgspec.Struct, array_like=True):
    """What a step brought for one request: usually one token; the last one carries the reason.

    `stop_reason` is the id that ended it, None for the model's own end tokens. `cached_tokens` are prompt
    tokens that came from the prefix cache. `prompt_logprobs` are those of prompt positions 1.. and come once, with
    the first token, as does `scheduled_s`: when it first took part in a step, by this host's monotonic clock. `error`
    says why a request could not go on, where the reason is "error".
    """

    id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    scheduled_s: float | None = None
    error: str | None = None


class Stats(msgspec.Struct, kw_only=True):
    """The core at one moment, and its counters since start. Requests, tokens, blocks.

    `computed_tokens` are those of all steps; of `draft_tokens` so many were `accepted_tokens`; `step_sizes[b]`
    counts the steps of more than 2^(b-1) tokens, up to 2^b.
    """

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    computed_tokens: int = 0
    step_sizes: list[int] = msgspec.field(default_factory=lambda: [0] * 32)
