"""TokenBudget: the maximum number of tokens of a step (`max_num_batched_tokens`), chosen per model and devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from weft.planner.profiles import Constant, EngineProfile
from weft.planner.work.replica import PlannedReplica

FULL = 0.1  # of each token's time: a step keeps the multipliers busy if doubling its tokens would save less than this
KV_SHARE_FOR_STEP = 0.03  # of the KV cache at the smallest step: the activations of a larger one may take this much


class TokenBudget(NamedTuple):
    """Maximum number of tokens of a step, and the reason for it, as the end of a sentence.

    `bound` names what keeps larger steps away: limit (the largest step of the profile or of the requests), pipeline,
    pause (of answers), weights (smaller steps would read them too often) or kv-cache. It is "" for a budget that is not
    chosen here.
    """

    tokens: int
    reason: str
    bound: str = ""


def with_token_budget(profile: EngineProfile, budget: TokenBudget) -> EngineProfile:
    """The profile with this token budget on cards of any memory size."""
    figure = Constant(budget.tokens, budget.reason)
    return msgspec.structs.replace(
        profile, max_num_batched_tokens=figure, small_num_batched_tokens=figure, hold_up_ms=Constant(0.0, "chosen")
    )


def with_smallest_budget(profile: EngineProfile) -> EngineProfile:
    """The profile with the smallest token budget that it allows, if it leaves a choice."""
    if not profile.hold_up_ms.value:
        return profile
    least = profile.small_num_batched_tokens
    return with_token_budget(profile, TokenBudget(int(least.value), least.source))


def token_budgets(replica: PlannedReplica, profile: EngineProfile, longest: int) -> Iterator[TokenBudget]:
    """Token budgets for the steps of this replica, the best first and the smallest last.

    The caller takes the first whose activations leave at least 1 - KV_SHARE_FOR_STEP of the KV cache that the smallest
    budget leaves. `longest` is the longest request in tokens.

    A step reads prompts as well as the next token of every running request, and all those requests wait for the whole
    step. So the best budget is the largest power of two with which a step full of one prompt takes at most
    `hold_up_ms`. Smaller budgets gain nothing: each step streams the weights again, and launches its kernels
    separately, while steps without prompts replay a graph. Larger ones pause answers long enough for their readers to
    notice. In a pipeline the best budget is the smallest that keeps the multipliers busy, since steps behind a long one
    wait for it in every stage.

    The multipliers are busy if twice the tokens save less than FULL of each token's time. Below that point, weights (of
    experts, of which a token meets only a few) are streamed faster than they are multiplied, and smaller steps would
    delay answers longer in total. So the budget is never below that point. It is at least `small_num_batched_tokens`,
    and at least twice `max_num_seqs`, so that the next tokens of all requests leave room for prompts. It is at most
    `max_num_batched_tokens`, or all tokens of `max_num_seqs` requests of the `longest` length.

    One figure serves every use: offline runs lose nothing by it, since the launches of a step this long are less than
    a hundredth of it.
    """
    limit_s, sequences = profile.hold_up_ms.value * 1e-3, int(profile.max_num_seqs.value)
    piped = len(replica.stages) > 1
    least = max(int(profile.small_num_batched_tokens.value), _power_of_two(2 * sequences))
    most = max(least, min(int(profile.max_num_batched_tokens.value), _power_of_two(sequences * longest)))
    timed = [(least, replica.full_step_s(least, longest))]
    bound, why = "limit", "no larger piece is taken"
    while 2 * timed[-1][0] <= most:
        tokens, took_s = timed[-1]
        twice_s = replica.full_step_s(2 * tokens, longest)
        busy = twice_s > 2 * (1 - FULL) * took_s
        if busy and (piped or twice_s > limit_s):
            bound, why = _bound_of_step(piped, took_s, limit_s)
            break
        timed.append((2 * tokens, twice_s))
    for tokens, took_s in reversed(timed):
        yield TokenBudget(tokens, f"a piece of that size takes {_milliseconds(took_s)}, and {why}", bound)
        bound, why = "kv-cache", f"a larger one would take more than {KV_SHARE_FOR_STEP:.0%} of the KV cache"


def _bound_of_step(piped: bool, took_s: float, limit_s: float) -> tuple[str, str]:
    """The bound that a step of this time meets, and the sentence about it."""
    if piped:
        return "pipeline", "larger pieces would leave GPUs of the pipeline idle"
    limit = _milliseconds(limit_s)
    if took_s > limit_s:
        return "weights", f"running answers pause that long; the goal is {limit}, but smaller pieces would be slower"
    return "pause", f"running answers pause that long; the goal is {limit} at most"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"


def _power_of_two(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << max(0, count - 1).bit_length()
