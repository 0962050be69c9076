"""StepLimits and ScheduledStep: the argument of a scheduler's `schedule`, and its result."""

from __future__ import annotations

from sys import maxsize
from typing import Generic, NamedTuple, TypeVar

from weft.engine.core.step import EngineStep

StepT = TypeVar("StepT", bound=EngineStep)


class StepLimits(NamedTuple):
    """Limits on one step. Limits on tokens follow measured times (`pace.py`).

    `prompt_tokens` limits the tokens of prompts while other requests decode. In such steps, CACHED_TOKENS tokens of the
    prefix cache count as one token. Under the policy "fair" all tokens of a step are limited: with a newcomer's prompt
    to `step_tokens`, without one to `busy_tokens` as well. Unless `speculating`, no draft tokens are proposed.
    `others_decode` is True if requests of another attention group, which takes the same steps, await their next token.
    """

    prompt_tokens: int = maxsize
    step_tokens: int = maxsize
    busy_tokens: int = maxsize
    speculating: bool = True
    others_decode: bool = False


UNLIMITED = StepLimits()


class ScheduledStep(NamedTuple, Generic[StepT]):
    """A step for the ranks, and what it tells the caller.

    `started` are the ids of the requests for which it is the first step. `prompt_tokens` is the number of prompt tokens
    as they are limited, of several groups the largest. `newcomer_tokens` is the number of tokens to compute of the
    shortest newcomer's prompt that it admits, 0 without a newcomer.
    """

    step: StepT
    started: list[str]
    prompt_tokens: int
    newcomer_tokens: int
