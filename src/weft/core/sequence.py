"""Sequence: a request inside the core, with its tokens and blocks so far. Flight: a step on its way."""

from __future__ import annotations

from collections.abc import Iterable

from weft.core.blocks import block_digest
from weft.core.request import Output, Request
from weft.core.speculation import DraftProposer
from weft.core.step import StepPlan, TokenLogprobs

# A token, and its logprobs where they were asked for.
Sample = tuple[int, TokenLogprobs | None]


class Sequence:
    """A request's state in the scheduler, which alone changes it, its blocks through its tables."""

    __slots__ = (
        "_digests",
        "blocks",
        "cached",
        "computed",
        "done",
        "proposer",
        "limit",
        "order",
        "outstanding",
        "pending",
        "promised",
        "prompt_length",
        "prompt_logprobs",
        "ready",
        "registered",
        "remembers",
        "request",
        "room",
        "slot",
        "stop_ids",
        "stops_after",
        "tokens",
    )

    def __init__(self, request: Request, order: tuple[int, int], longest: int) -> None:
        params = request.params
        self.request = request
        self.order = order  # the lower the sooner admitted, the later preempted
        self.tokens = list(request.prompt)  # and then the answer
        self.prompt_length = len(request.prompt)
        # Lengths of prompt and answer together: the longest, and the one after which an end token ends it.
        self.limit = longest if params.max_tokens is None else min(longest, self.prompt_length + params.max_tokens)
        self.stops_after = self.prompt_length + params.min_tokens
        self.stop_ids = frozenset(request.stop_ids)
        self.slot = -1  # -1: does not run
        self.blocks: list[int] = []  # its block table
        self.room = 0  # tokens that its blocks hold
        self.computed = 0  # tokens whose KV is written by the steps scheduled so far
        self.registered = 0  # blocks that others may find
        self.promised = 0  # blocks still to come for what is not prefilled
        self.outstanding = 0  # steps in flight that it takes part in
        self.pending = 0  # of those, the ones that sample a token for it
        self.ready = False  # whether it waits for its turn
        # Whether what is sampled next depends on the tokens before by more than their KV: on counts, or on phrases.
        self.remembers = params.remembers
        self.cached: int | None = None  # prompt tokens found in the prefix cache when first admitted
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.done = False
        self.proposer: DraftProposer | None = None  # where its answer is guessed ahead
        self._digests: list[bytes] = []

    def digests(self, count: int, block_size: int) -> list[bytes]:
        """The chained digests of the first `count` full blocks, each computed once."""
        known = self._digests
        for index in range(len(known), count):
            parent = known[index - 1] if index else b""
            known.append(block_digest(parent, self.tokens[index * block_size : (index + 1) * block_size]))
        return known if len(known) == count else known[:count]

    def take(self, brought: Iterable[Sample]) -> Output:
        """Go on by what was sampled for it, or to its end, where that is among it."""
        request, tokens = self.request, self.tokens
        output = Output(request.id, [], [], cached_tokens=self.cached or 0)
        if len(tokens) == self.prompt_length and request.params.prompt_logprobs is not None:
            output.prompt_logprobs = self.prompt_logprobs
        for token, logprob in brought:
            tokens.append(token)
            output.tokens.append(token)
            output.logprobs.append(logprob)
            if len(tokens) > self.stops_after and token in self.stop_ids:
                output.finish_reason = "stop"
                output.stop_reason = token if token in request.params.stop_token_ids else None
                break
            if len(tokens) >= self.limit:
                output.finish_reason = "length"
                break
        return output


class Flight:
    """A step that is being made, and then in flight: the plan and the sequence of each of its rows."""

    __slots__ = ("plan", "rows")

    def __init__(self, id: int) -> None:
        self.plan = StepPlan(id, [], [], [], [], [], [], [], [], [])
        self.rows: list[Sequence] = []
