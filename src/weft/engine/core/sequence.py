"""Sequence: a request inside the core, with its tokens and blocks so far. Flight: a step in flight."""

from __future__ import annotations

from collections.abc import Iterable

from weft.engine.core import grammar
from weft.engine.core.blocks import block_digest
from weft.engine.core.grammar import Grammars, Matcher
from weft.engine.core.request import Output, Request
from weft.engine.core.speculation import DraftProposer
from weft.engine.core.step import SlotFailure, StepPlan, TokenLogprobs
from weft.engine.core.waiting import Owner

NO_BLOCKS: list[int] = []  # list of a row without new blocks; the lists of a step are never changed

# A sampled token, and its logprobs if the request wants them.
Sample = tuple[int, TokenLogprobs | None]


class Sequence:
    """A request's state in the scheduler. Only the scheduler changes it, and KVManager its blocks."""

    __slots__ = (
        "_digests",
        "blocks",
        "cached",
        "computed",
        "done",
        "first",
        "freed",
        "frees_at",
        "limit",
        "matcher",
        "needs_history",
        "order",
        "outstanding",
        "owner",
        "pending",
        "prefill_blocks",
        "promised",
        "prompt_length",
        "prompt_logprobs",
        "proposer",
        "ready",
        "registered",
        "request",
        "reserved",
        "room",
        "sent",
        "slot",
        "stop_ids",
        "stops_after",
        "tokens",
    )

    def __init__(self, request: Request, owner: Owner, order: tuple[int, int], longest: int) -> None:
        params = request.params
        self.request = request
        self.owner = owner
        self.order = order  # a lower order is admitted sooner and preempted later
        self.tokens: list[int] = []  # prompt, then answer; empty before `unpack_prompt`
        self.prompt_length = len(request.prompt)
        self.first = request.length  # position of the first token that is sampled here
        # Lengths of prompt and answer together: the maximum, and the one after which an end token ends the sequence.
        self.limit = longest if params.max_tokens is None else min(longest, self.prompt_length + params.max_tokens)
        self.stops_after = self.prompt_length + params.min_tokens
        self.stop_ids = frozenset(request.stop_ids)
        self.slot = -1  # -1: not running
        self.blocks: list[list[int]] = []  # the block table of each KV group
        self.freed: list[int] = []  # by group, first entries of the table whose blocks are freed
        self.frees_at = 0  # position from which on the next block can be freed
        self.sent = 0  # entries of each table that the ranks know
        self.room = 0  # tokens that the tables have entries for
        self.computed = 0  # tokens whose KV is written by the steps scheduled so far
        self.registered = 0  # blocks that are in the prefix cache
        self.prefill_blocks = 0  # entries of a table for the tokens that were known at admission
        self.promised = 0  # blocks still to be allocated for the rest of the prefill
        self.reserved = 0  # blocks that its next tokens will take
        self.outstanding = 0  # steps in flight that this sequence takes part in
        self.pending = 0  # steps in flight that sample a token for it
        self.ready = False  # True while it waits for its turn
        # True if sampling depends on more of the earlier tokens than their KV: on counts, phrases or a grammar.
        self.needs_history = params.needs_history or bool(request.grammar)
        self.cached: int | None = None  # prompt tokens found in the prefix cache at the first admission
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.done = False
        self.matcher: Matcher | None = None  # of a constrained answer
        self.proposer: DraftProposer | None = None  # with speculative decoding only
        self._digests: list[bytes] = []

    def unpack_prompt(self) -> None:
        """Fill `tokens` with the prompt and `Request.answered`, once: waiting sequences keep them packed."""
        if not self.tokens:
            self.tokens += self.request.prompt
            self.tokens += self.request.answered

    def digests(self, count: int, block_size: int) -> list[bytes]:
        """Chained digests of the first `count` full blocks, each computed once; they begin from the identity's."""
        digests = self._digests
        for index in range(len(digests), count):
            parent = digests[index - 1] if index else self.request.identity.digest()
            digests.append(block_digest(parent, self.tokens[index * block_size : (index + 1) * block_size]))
        return digests if len(digests) == count else digests[:count]

    def may_continue(self, lookahead: bool) -> bool:
        """Return True if the next step can include the sequence; with `lookahead`, also with one token in flight."""
        return self.pending == 0 or (
            lookahead and self.pending == 1 and not self.needs_history and len(self.tokens) + 1 < self.limit
        )

    def append_samples(self, samples: Iterable[Sample]) -> Output:
        """Append the sampled tokens up to the first that ends the sequence. Returns their Output."""
        request, tokens = self.request, self.tokens
        output = Output(request.id, [], [], cached_tokens=self.cached or 0)
        if len(tokens) == self.prompt_length and request.params.prompt_logprobs is not None:
            output.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, []
        if self.matcher is not None and self.matcher.error is not None:
            # The masks of these samples could not be computed: they allow an end token at most.
            self._fail(self.matcher.error, output)
            return output
        for token, logprob in samples:
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
            if self.matcher is not None and not self._follow(self.matcher, token, output):
                break
        return output

    def _follow(self, matcher: Matcher, token: int, output: Output) -> bool:
        """Advance the grammar of the answer by a token. Returns False if the answer ends there."""
        matcher.accept(token)
        if matcher.error is not None:
            self._fail(matcher.error, output)
        elif matcher.ended:
            output.finish_reason = "stop"
        return output.finish_reason is None

    @staticmethod
    def _fail(error: str, output: Output) -> None:
        """End the answer with the error of its grammar."""
        output.finish_reason = "error"
        output.error = SlotFailure(grammar.FAILED, f"the answer's grammar failed: {error}", grammar.PARAM)


class Flight:
    """A step that is being scheduled, or in flight: its plan and the sequence of each row.

    `grown` are the rows that have new entries in their block tables, with these entries by KV group. `pooled` are the
    requests with `pooling` whose prompts end in the step; `started` are the ids of the requests whose first step it is.
    `prompt_tokens` are its prompt tokens as they are limited. If it is `starved`, a request stayed in the queue
    although a slot was free, for lack of blocks.
    """

    __slots__ = ("grown", "plan", "pooled", "prompt_tokens", "rows", "started", "starved")

    def __init__(self, id: int) -> None:
        self.plan = StepPlan(id, [], [], [], [], [], [], [], [], [])
        self.rows: list[Sequence] = []
        self.grown: list[tuple[int, list[list[int]]]] = []
        self.pooled: list[Sequence] = []
        self.started: list[str] = []
        self.prompt_tokens = 0
        self.starved = False

    def plan_blocks(self, groups: int) -> None:
        """Give the plan the new blocks of its rows, in each of `groups` KV groups."""
        rows = len(self.rows)
        blocks = self.plan.blocks = [[NO_BLOCKS] * rows for _ in range(groups)]
        for row, entries in self.grown:
            for group, new in enumerate(entries):
                blocks[group][row] = new

    def plan_masks(self, grammars: Grammars) -> None:
        """Give the plan the masks of its constrained rows, for each token that they sample."""
        plan, end = self.plan, 0
        slots: list[int] = []
        rows: list[tuple[Matcher, list[int]]] = []
        for sequence, count, samples, drafted in zip(
            self.rows, plan.counts, plan.samples, plan.draft_counts, strict=True
        ):
            end += count
            if sequence.matcher and samples:
                slots.append(sequence.slot)
                rows.append((sequence.matcher, plan.tokens[end - drafted : end]))
        if rows:  # none if every constrained row is a chunk of a prompt
            plan.masks = dict(zip(slots, grammars.masks(rows), strict=True))

    def reorder(self, rows: list[Sequence]) -> None:
        """Put the rows of a step of decodes into another order."""
        self.rows = rows
        self.plan.slots = [sequence.slot for sequence in rows]
