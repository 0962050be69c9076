"""StepPlan and StepResult: what the core sends to the ranks for each step, and what comes back. No tensors.

A running request holds a `slot`, a small integer. Under its slot every rank keeps the request's block table, and the
output rank its sampler state. So a step has to carry only what is new.
"""

from __future__ import annotations

import msgspec

from weft.engine.core.params import SamplingParams
from weft.engine.core.token_ids import TokenIds

UNKNOWN = -1  # placeholder for the token that the slot sampled last, which the scheduler does not know yet


class Pooling(msgspec.Struct, array_like=True, frozen=True):
    """Ask for a model's vector for a prompt, instead of an answer.

    The vector is the hidden state after the last token, after the final norm; or, with `token_ids`, the logits of these
    tokens.
    """

    token_ids: tuple[int, ...] = ()


class Admission(msgspec.Struct, array_like=True):
    """A request that takes a slot. After a preemption `output` holds the tokens generated before it.

    With `pooling` no token is sampled.
    """

    slot: int
    key: int  # 64 bits: the request's random stream, from seed and choice index alone
    params: SamplingParams
    prompt: TokenIds
    output: list[int]
    pooling: Pooling | None = None


class StepPlan(msgspec.Struct, array_like=True):
    """One forward pass over a ragged batch of R rows. Ranks release slots, admit requests and then run the rows.

    Row r is slot `slots[r]`. Its next `counts[r]` tokens, from position `starts[r]` on, lie in `tokens` after the
    tokens of the rows before it. `blocks[g][r]` are the KV blocks appended to its block table in KV group g in this
    step. If `samples[r]`, a token is sampled after the row's last token (with draft tokens several are, see below). The
    KV of all rows is written before any row's attention in each layer, so a row may read blocks that another row of the
    same step fills. A token that is UNKNOWN is the one that the slot sampled last.

    The last `draft_counts[r]` tokens of row r are draft tokens: a row that samples yields `draft_counts[r]` + 1 tokens,
    one after the token before its drafts and one after each draft. `draft_requests[r]` is the number of draft tokens
    that a draft model proposes after row r; if the row does not sample yet, the draft model only reads its tokens.
    `draft_requests` is empty without a draft model.

    If several attention groups step together, each gets a plan of its own. `group_tokens` has the number of tokens of
    each group's plan. A group whose plan has no rows still computes its experts for the tokens of the others.
    `graph_rows` is the number of rows of the largest plan if every row of all plans has one token, else 0. All groups
    then pad to the same CUDA graph, in which each exchanges the same number of tokens.

    `masks[slot]` says which tokens may be sampled for a constrained request. It has a mask for each token that the row
    samples, in order: a bit per token id of the vocabulary, in little-endian 32-bit words, the lowest id in the lowest
    bit.
    """

    id: int
    released: list[int]
    admitted: list[Admission]
    slots: list[int]
    starts: list[int]
    counts: list[int]
    tokens: list[int]
    blocks: list[list[list[int]]]
    samples: list[bool]
    draft_counts: list[int]
    draft_requests: list[int] = []
    masks: dict[int, bytes] = {}
    group_tokens: list[int] = []
    graph_rows: int = 0


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Logprobs at one position, from the model's own distribution.

    `logprob` and `rank` (1 = likeliest) are the token's; the top lists hold the likeliest tokens, best first.
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class SlotFailure(msgspec.Struct, array_like=True, frozen=True):
    """The reason that one request ends while the others go on. `code` is the code of a WeftError.

    `param` is the field of the request that is at fault, or "".
    """

    code: str
    reason: str
    param: str = ""


class StepResult(msgspec.Struct, array_like=True):
    """The sampled tokens of one step.

    `tokens` and `logprobs` have one entry per row that samples and one more for each of its draft tokens, in order; a
    logprobs entry is None if the request wants none. `prompt_logprobs[slot]` has the logprobs of the prompt tokens
    after each position computed in this step. `drafts[slot]` are the draft model's tokens for the next step; a slot has
    no entry while the draft model lags behind its text. `failed[slot]` is the reason that no token could be sampled for
    a slot, whose ids in `tokens` are then meaningless. `pooled[slot]` has the float32 numbers, in little-endian bytes,
    of a request with `pooling` whose prompt ends in this step.
    """

    id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    drafts: dict[int, list[int]] = {}
    failed: dict[int, SlotFailure] = {}
    pooled: dict[int, bytes] = {}


class LockStep(msgspec.Struct):
    """One step of several attention groups, which begins in all of them at once: a plan for each group, in order.

    All plans carry the same `group_tokens` and `graph_rows`. The properties are the same as of a StepPlan, over the
    rows of all groups.
    """

    plans: list[StepPlan]

    @property
    def slots(self) -> list[int]:
        return [slot for plan in self.plans for slot in plan.slots]

    @property
    def counts(self) -> list[int]:
        return [count for plan in self.plans for count in plan.counts]

    @property
    def samples(self) -> list[bool]:
        return [samples for plan in self.plans for samples in plan.samples]

    @property
    def draft_counts(self) -> list[int]:
        return [count for plan in self.plans for count in plan.draft_counts]

    @property
    def draft_requests(self) -> list[int]:
        return [count for plan in self.plans for count in plan.draft_requests]


class LockStepResult(msgspec.Struct):
    """The results of a LockStep, one per attention group, in order."""

    results: list[StepResult]

    @property
    def failed(self) -> bool:
        """True if a request of any group has failed; a StepResult has a dict by slot here."""
        return any(result.failed for result in self.results)

    @property
    def drafts(self) -> dict[int, list[int]]:
        """Empty: several groups have no draft model."""
        return {}


EngineStep = StepPlan | LockStep  # of an engine with one attention group, or with several
