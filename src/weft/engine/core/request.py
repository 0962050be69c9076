"""Request and Output: what enters and leaves the core, in token ids only. Stats: the core's gauges and counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from weft.engine.core.identity import PLAIN, RequestIdentity
from weft.engine.core.params import SamplingParams
from weft.engine.core.step import Pooling, SlotFailure, TokenLogprobs
from weft.engine.core.token_ids import NO_IDS, TokenIds
from weft.errors import QueueFullError, RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of one prompt. `params.n` is ignored: the client has already expanded it.

    `key` is the 64-bit key of the request's random stream, made from the seed and the choice's index. `stop_ids` are
    all token ids that end the request: the model's own, unless ignore_eos is set, and stop_token_ids. Under the policy
    "priority", lower values of `priority` run first. Only requests of one `identity` share KV blocks. `answered` is the
    beginning of an answer from another engine: the request continues it as after a preemption, and its limits count
    these tokens. Such a request has no prompt logprobs. `grammar` constrains the answer, "" does not. With `pooling`
    there is no answer: the request ends with the step that computes the end of its prompt. Under the policy "fair",
    owners share the tokens of the steps in proportion to their `weight`.
    """

    id: str
    prompt: TokenIds
    params: SamplingParams
    key: int = 0
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    identity: RequestIdentity = PLAIN
    answered: TokenIds = NO_IDS
    grammar: str = ""
    pooling: Pooling | None = None
    owner: int = 0
    weight: float = 1.0

    @property
    def length(self) -> int:
        """Number of tokens to prefill."""
        return len(self.prompt) + len(self.answered)


class Output(msgspec.Struct, array_like=True):
    """New tokens of one request from one step, usually a single token. The last Output has a `finish_reason`.

    `stop_reason` is the id from stop_token_ids that ended the request, None for the model's own end tokens.
    `cached_tokens` is the number of prompt tokens that came from the prefix cache. `prompt_logprobs` covers the prompt
    positions from 1 on. It comes once, with the first token, and so does `scheduled_s`: the time of the request's first
    step, by this host's monotonic clock. `error` is the reason if `finish_reason` is "error". `replica` is the number
    of the engine, which the client sets. `pooled` are the float32 numbers, in little-endian bytes, of a request with
    `pooling`.
    """

    id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    scheduled_s: float | None = None
    error: SlotFailure | None = None
    replica: int = 0
    pooled: bytes | None = None


class Stats(msgspec.Struct, kw_only=True):
    """Gauges of the core at one moment, and counters since its start, in requests, tokens and blocks.

    `computed_tokens` is the number of tokens of all steps. `starved_steps` counts the `steps` in which a request stayed
    in the queue although a slot was free, since it did not fit in the KV cache. `accepted_tokens` counts the
    `draft_tokens` that equalled the sampled token. `step_sizes[b]` is the number of steps with more than 2^(b-1) and at
    most 2^b tokens. `sleep_level` is 0 for an engine that is awake.
    """

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    sleep_level: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    starved_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    computed_tokens: int = 0
    step_sizes: list[int] = msgspec.field(default_factory=lambda: [0] * 32)


GAUGES = ("running", "waiting", "blocks_used", "blocks_total", "sleep_level")


def sum_stats(several: Sequence[Stats]) -> Stats:
    """The stats of several engines together; the level of sleep is the highest."""
    total = Stats(step_sizes=[sum(sizes) for sizes in zip(*(stats.step_sizes for stats in several), strict=True)])
    for name in set(Stats.__struct_fields__) - {"step_sizes", "sleep_level"}:
        setattr(total, name, sum(getattr(stats, name) for stats in several))
    total.sleep_level = max(stats.sleep_level for stats in several)
    return total


def counters_only(stats: Stats) -> Stats:
    """The counters of an engine that has ended, whose gauges are 0."""
    return msgspec.structs.replace(stats, **dict.fromkeys(GAUGES, 0))


def duplicate_id_error(id: str) -> RequestError:
    """The error for a request with the id of another unfinished request."""
    return RequestError(
        f"a request {id!r} is running already; ids must differ", param="request_id", code="duplicate-request-id"
    )


def queue_full_error(waiting: int, limit: int) -> QueueFullError:
    """The error for a request that arrives while `waiting` others wait; the limit is `limit`."""
    return QueueFullError(
        f"{waiting} requests wait already, at most {limit} may; try again later, or raise --max-num-queued-reqs",
        code="queue-full",
    )


def prompt_too_long_error(
    tokens: int, max_model_len: int, *, param: str = "prompt", answers: bool = True, characters: int = 0
) -> RequestError:
    """Return the error for a prompt that exceeds the context, in the words by which agents know when to compact.

    Clients of OpenAI's API look for "maximum context length is N tokens", clients of Anthropic's for "prompt is too
    long: N tokens > M maximum". If `characters` is given, the prompt was not tokenized, and `tokens` is its smallest
    possible length.
    """
    least, unread = ("at least ", f" ({characters:,} characters)") if characters else ("", "")
    return RequestError(
        f"prompt is too long: {least}{tokens} tokens > {max_model_len - answers} maximum{unread}; this model's maximum "
        f"context length is {max_model_len} tokens{', answer included' * answers}: send less, or serve a model with "
        "a longer context",
        param=param,
        code="prompt-too-long",
    )


def check_prompt_length(
    length: int, max_model_len: int, needed_blocks: int, num_blocks: int, *, answers: bool = True
) -> None:
    """Raise RequestError for a prompt of `length` tokens that can never run under these limits.

    If the request `answers`, its prompt leaves room for one token at least.
    """
    if not length:
        raise RequestError("the prompt is empty; give at least one token", param="prompt", code="empty-prompt")
    if length > max_model_len - answers:
        raise prompt_too_long_error(length, max_model_len, answers=answers)
    if needed_blocks > num_blocks:
        raise RequestError(
            f"the prompt has {length} tokens and needs {needed_blocks} KV blocks, the cache has {num_blocks}; "
            "send a shorter one, or give the cache more memory (--kv-cache-memory-bytes)",
            param="prompt",
            code="prompt-exceeds-cache",
        )
