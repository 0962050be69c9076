"""Batch: how many tokens a step has at most, chosen for a model on its devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from weft.planner.profiles import Constant, Profile
from weft.planner.replica import Replica

FULL = 0.1  # of each token's time: a step whose double would save less has the multipliers busy
KV_SHARE_FOR_STEP = (
    0.03  # of the KV cache that the smallest step leaves: so much may go to the activations of a larger one
)


class TokenBudget(NamedTuple):
    """The tokens of a step, and why."""

    tokens: int
    reason: str


def with_token_budget(profile: Profile, choice: TokenBudget) -> Profile:
    """The profile with this choice, whatever the memory."""
    figure = Constant(choice.tokens, choice.reason)
    return msgspec.structs.replace(
        profile, max_num_batched_tokens=figure, small_num_batched_tokens=figure, hold_up_ms=Constant(0.0, "chosen")
    )


def with_smallest_budget(profile: Profile) -> Profile:
    """The profile with the fewest tokens that a step is ever given, where there is a choice."""
    least = profile.small_num_batched_tokens
    return (
        with_token_budget(profile, TokenBudget(int(least.value), least.source)) if profile.hold_up_ms.value else profile
    )


def token_budgets(replica: Replica, profile: Profile, longest: int) -> Iterator[TokenBudget]:
    """What a step of this replica may have, the best choice first; the caller takes the first whose activations leave
    the KV cache all but KV_SHARE of what it has beside the smallest, which comes last.

    A step reads prompts beside the next tokens of everybody who is being answered, and those wait for all of it. So
    the best is the largest power of two with which a step that is full of one prompt takes `hold_up_ms` at most.
    Smaller ones gain nobody anything: each streams the weights again, and launches its kernels one by one where steps
    without prompts replay a graph. Larger ones stop answers for a time that their readers notice. In a pipeline the
    best is the smallest that keeps the multipliers busy, since the steps behind a long one wait for it in every stage.

    They are busy where twice the tokens save less than FULL of each token's time: below that, weights (of experts, of
    which a token meets a few only) are streamed faster than they are multiplied with, and prompts in smaller steps
    would hold answers up for longer in all; so it is never less. It is at least `small_num_batched_tokens`, and twice
    `max_num_seqs`, so that everybody's next token leaves room for prompts; and at most `max_num_batched_tokens`, or
    what `max_num_seqs` requests of the `longest` length bring.

    One figure for everything: who waits for all answers alone loses nothing by it, since beside a step as long as
    that its launches are less than a hundredth.
    """
    limit_s, sequences = profile.hold_up_ms.value * 1e-3, int(profile.max_num_seqs.value)
    piped = len(replica.stages) > 1
    least = max(int(profile.small_num_batched_tokens.value), _power(2 * sequences))
    most = max(least, min(int(profile.max_num_batched_tokens.value), _power(sequences * longest)))
    found = [(least, replica.full_step_s(least, longest))]
    why = "no larger piece is taken"
    while 2 * found[-1][0] <= most:
        tokens, took_s = found[-1]
        twice_s = replica.full_step_s(2 * tokens, longest)
        if (piped or twice_s > limit_s) and twice_s > 2 * (1 - FULL) * took_s:
            why = f"running answers pause that long; the goal is {_told(limit_s)} at most"
            if piped:
                why = "larger pieces would leave GPUs of the pipeline idle"
            elif took_s > limit_s:
                why = (
                    f"running answers pause that long; the goal is {_told(limit_s)}, but smaller pieces would be slower"
                )
            break
        found.append((2 * tokens, twice_s))
    for tokens, took_s in reversed(found):
        yield TokenBudget(tokens, f"a piece of that size takes {_told(took_s)}, and {why}")
        why = f"a larger one would take more than {KV_SHARE_FOR_STEP:.0%} of the KV cache"


def _told(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"


def _power(count: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(0, count - 1).bit_length()
