"""StepPlan and StepResult: what the core tells the ranks, and what comes back. Plain ints only.

A request that runs holds a `slot`, a small integer under which every rank keeps what it needs of it: its
block table everywhere, its sampler state on the output rank. So a step says only what is new.
"""

from __future__ import annotations

import msgspec

from weft.core.params import SamplingParams

UNKNOWN = -1  # in place of a token that the step before samples


class Admission(msgspec.Struct, array_like=True):
    """A request takes a slot. After a preemption `output` holds what it had generated before."""

    slot: int
    key: int  # 64 bits: its random stream, from seed and choice index alone
    params: SamplingParams
    prompt: list[int]
    output: list[int]


class StepPlan(msgspec.Struct, array_like=True):
    """One forward pass over a ragged batch of R rows, in this order: release, admit, then run the rows.

    Row r is slot `slots[r]`; its next `counts[r]` tokens, from position `starts[r]` on, lie in `tokens`
    after those of the rows before it. `blocks[r]` are KV blocks appended to its table in this step. Where
    `samples[r]`, one token is sampled from the row's last position. KV writes of all rows come before any
    row's attention in each layer, so a row may read blocks that another row of the same step fills. A token that is
    UNKNOWN is the one that the slot sampled last.

    The last `draft_counts[r]` tokens of row r are guesses: where it samples, it does so after each of them and after the
    token before them. `draft_requests[r]` guesses of what comes after row r are wanted of a draft model; where it does not sample
    yet, the draft is to read along. Without a draft `draft_requests` is empty.
    """

    id: int
    released: list[int]
    admitted: list[Admission]
    slots: list[int]
    starts: list[int]
    counts: list[int]
    tokens: list[int]
    blocks: list[list[int]]
    samples: list[bool]
    draft_counts: list[int]
    draft_requests: list[int] = []


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Of one position, from the model's own distribution: the token's logprob and rank (1 = likeliest),
    and the likeliest alternatives, best first."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class StepResult(msgspec.Struct, array_like=True):
    """`tokens` and `logprobs` have one entry per row with `samples` and one more for each of its guesses, in order
    (None where none were asked for). `prompt_logprobs[slot]` holds those of the prompt positions after the ones
    computed in this step, `drafts[slot]` what a draft model thinks comes next: no entry where it was asked, but has
    not read the text to its end. `failed[slot]` says why no token could be sampled for a slot; the ids of its row mean
    nothing."""

    id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    drafts: dict[int, list[int]] = {}
    failed: dict[int, str] = {}
