"""What a request may ask of the sampler, in vLLM's names and with its defaults."""

from __future__ import annotations

from math import isfinite
from typing import Any

import msgspec

from weft.errors import RequestError


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when an answer ends. Immutable; validated when made.

    `temperature` 0 is greedy. `top_k` 0 or -1 means all tokens. `seed` None takes the engine's seed and the
    request's number, so that the same requests in the same order give the same tokens. `max_tokens` None
    means up to the model's length. `logprobs` and `prompt_logprobs` count the alternatives per token beside
    the chosen one (0: only the chosen one). Raises RequestError, naming the field, for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
