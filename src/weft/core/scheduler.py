"""Scheduler: continuous batching. Decides which requests take part in each step, with how many tokens and KV blocks.

Pure: it reads no clock and no tensor, and the same calls give the same steps. `schedule` and `apply` are separate, so
that several steps can be in flight. Every rank executes steps in the order in which they were scheduled. That is what
lets blocks be freed, reused and shared the moment a step is scheduled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import islice
from operator import attrgetter
from typing import Literal

from msgspec.structs import replace

from weft.core.block_tables import BlockTables
from weft.core.blocks import BlockPool
from weft.core.drafts import accept_drafts, discard_drafts, draft_request, keep_model_drafts, propose_drafts
from weft.core.pace import CACHED_TOKENS
from weft.core.request import Output, Request, Stats, check_prompt_length
from weft.core.sequence import Flight, Sample, Sequence
from weft.core.speculation import DraftProposer
from weft.core.step import UNKNOWN, Admission, StepPlan, StepResult
from weft.errors import QueueFullError, RequestError
from weft.plan.plan import Speculation

by_order = attrgetter("order")


class Scheduler:
    """Continuous batching over the KV blocks of a `pool`.

    At most `max_num_seqs` requests run, a step has at most `max_num_batched_tokens` tokens, and prompt and answer
    together have at most `max_model_len`. At most `max_num_queued` requests wait, not counting those for which a slot
    is free. With several pipeline `stages`, a step takes only its share of the requests, so that each stage has a step
    to work on. With `lookahead`, a request may take part in the step after the one that samples its token, before that
    token is known: the ranks fill it in. Tokens that such a step brings for a request that has ended meanwhile are
    dropped. With `speculation`, a step verifies several draft tokens of an answer, unless `speculating` is False.

    Requests are admitted in order of arrival; under `policy` "priority", lower priority values come first. If blocks
    run out, the last running request in this order is preempted: it loses its blocks, and computes them anew when it
    is admitted again. Admitted requests that do not all fit into one step take turns.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_queued: int,
        max_model_len: int,
        stages: int,
        policy: Literal["fcfs", "priority"],
        lookahead: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        self.pool = pool
        self.tables = BlockTables(pool)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_queued = max_num_queued
        self.max_model_len = max_model_len
        self.stages = stages
        self.lookahead = lookahead
        self.speculation = speculation
        self.speculating = True
        self._by_priority = policy == "priority"
        self._arrivals = 0
        self._steps = 0
        self._unfinished: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        # Running, with something to compute, longest idle first.
        self._ready: deque[Sequence] = deque()
        # A heap by order.
        self._queue: list[tuple[tuple[int, int], Sequence]] = []
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._released: list[int] = []
        self._in_flight: deque[Flight] = deque()
        # Ids of the requests that took part in a step for the first time in the last scheduled one.
        self.started: list[str] = []
        # Prompt tokens of the last scheduled step, and the limit on them while others await their next token.
        self.prompt_tokens = 0
        self.prompt_limit = max_num_batched_tokens
        self._counters = Stats(blocks_total=pool.num_blocks)

    # Requests in and out

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run, QueueFullError if too many wait."""
        length = len(request.prompt)
        if request.id in self._unfinished:
            raise RequestError(f"a request {request.id!r} is running already; ids must differ", param="request_id")
        needed_blocks = self.tables.count_blocks(length + 1)
        check_prompt_length(length, self.max_model_len, needed_blocks, self.pool.num_blocks)
        if self.waiting >= self.max_num_queued + len(self._slots):
            raise QueueFullError(
                f"{self.waiting} requests wait already, at most {self.max_num_queued} may; "
                "try again later, or raise --max-num-queued-reqs"
            )
        order = (request.priority if self._by_priority else 0, self._arrivals)
        # A lone request may outgrow a small cache: it ends there, like one that reaches the model's length.
        longest = min(self.max_model_len, self.pool.num_blocks * self.pool.block_size)
        sequence = Sequence(request, order, longest)
        if self.speculation and not sequence.needs_history:
            sequence.proposer = DraftProposer(self.speculation)
        self._arrivals += 1
        self._unfinished[request.id] = sequence
        heappush(self._queue, (order, sequence))

    def abort(self, ids: Iterable[str]) -> None:
        """Forget these requests at once, and drop the tokens that steps in flight bring for them.

        Unknown ids are ignored.
        """
        waiting = self.waiting
        for id in ids:
            if sequence := self._unfinished.get(id):
                self._finish(sequence)
        if self.waiting < waiting:
            self._queue = [entry for entry in self._queue if not entry[1].done]
            heapify(self._queue)

    def preempt_all(self) -> None:
        """Preempt all running requests, which compute their KV again once they are admitted. No step is in flight."""
        assert not self._in_flight
        for sequence in list(self._running.values()):
            self._preempt(sequence)

    def reset_prefix_cache(self) -> None:
        """Let no request reuse blocks that were filled before. Running requests keep theirs."""
        self.pool.forget_content()

    @property
    def running(self) -> Collection[str]:
        """Ids of the running requests."""
        return self._running.keys()

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._unfinished) - len(self._running)

    @property
    def active(self) -> int:
        """Number of requests that run, plus those waiting for which a slot is free."""
        return len(self._running) + min(self.waiting, len(self._slots))

    def stats(self) -> Stats:
        """Return a copy of the gauges and counters."""
        return replace(
            self._counters,
            running=len(self._running),
            waiting=self.waiting,
            blocks_used=self.pool.num_blocks - self.pool.free,
            step_sizes=list(self._counters.step_sizes),
        )

    # A step out

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if nothing can run before a result or a request comes in."""
        flight = Flight(self._steps)
        self.started = []
        selected = self._select_running()
        prefills = []
        budget = self.max_num_batched_tokens
        for number, sequence in enumerate(selected):
            if len(sequence.tokens) + sequence.pending - sequence.computed == 1:
                drafts: list[int] = []
                if sequence.proposer:
                    # Each sequence after this one is sure of a token.
                    drafts = self._propose(sequence, budget - len(selected) + number)
                self._add_row(flight, sequence, 1 + len(drafts), [], drafts)
                budget -= 1 + len(drafts)
            else:
                prefills.append(sequence)
        plan = flight.plan
        decoded = len(plan.tokens)
        beside_decodes = len(self._running) > len(prefills)
        if beside_decodes:
            budget = min(budget, self.prompt_limit)
        if prefills:
            budget = self._continue_prefills(flight, prefills, budget)
        if self._queue:
            self._admit(flight, budget, beside_decodes)
        if not plan.slots:
            return None
        self.prompt_tokens = len(plan.tokens) - decoded
        if self.speculating and self.speculation and self.speculation.draft:
            plan.draft_requests = [draft_request(sequence) for sequence in flight.rows]
        # Without a next step, released slots are sent with the first step after the pause: they hold no KV.
        plan.released, self._released = self._released, []
        self._steps += 1
        self._in_flight.append(flight)
        return plan

    def _select_running(self) -> list[Sequence]:
        """Select the running requests of this step. Each is sure of a token and of a block for it."""
        ready = self._ready
        selected: list[Sequence] = []
        while ready and not selected:
            count = min(len(ready), self.max_num_batched_tokens, -(-len(self._running) // self.stages))
            selected = [ready.popleft() for _ in range(count)]
            for sequence in selected:
                sequence.ready = False
            if self.pool.free < count:
                self._make_room(selected)
        return selected

    def _make_room(self, selected: list[Sequence]) -> None:
        """Preempt running requests, last in order first, until each selected one can have the block it needs."""
        while sum(sequence.computed == sequence.room for sequence in selected) > self.pool.free:
            victim = max(self._running.values(), key=by_order)
            if victim in selected:
                selected.remove(victim)
            self._preempt(victim)

    def _continue_prefills(self, flight: Flight, prefills: list[Sequence], budget: int) -> int:
        """Add chunks of prompts, as long as tokens and blocks last. Returns the tokens left."""
        left_out = []
        for sequence in prefills:
            fits = sequence.room + self.pool.free * self.pool.block_size - sequence.computed
            count = min(len(sequence.tokens) - sequence.computed, budget, fits)
            if count:
                self._add_row(flight, sequence, count, [])
                budget -= count
            else:
                left_out.append(sequence)
        for sequence in left_out:
            self._await_turn(sequence)
        return budget

    def _admit(self, flight: Flight, budget: int, beside_decodes: bool) -> None:
        """Admit waiting requests, in their order, as long as slots, tokens and blocks last."""
        rows = -(-self.active // self.stages)
        while self._queue and budget > 0 and self._slots and len(flight.plan.slots) < rows:
            sequence = self._queue[0][1]
            if sequence.done:  # preempted, and then its last step ended it
                heappop(self._queue)
                continue
            if sequence.outstanding:  # preempted, and its last step, whose tokens belong to it, is still in flight
                return
            cached = self.tables.match_prefix(sequence)
            new = self.tables.count_blocks(len(sequence.tokens)) - len(cached)
            if not self.tables.has_room(new, cached, len(self._running)):
                return
            heappop(self._queue)
            self._start_running(flight, sequence, cached, new)
            count = min(len(sequence.tokens) - sequence.computed, budget)
            budget -= count
            if beside_decodes:
                budget -= sequence.computed // CACHED_TOKENS  # `computed`: of the prefix cache, until the row is added
            self._add_row(flight, sequence, count, cached)

    def _start_running(self, flight: Flight, sequence: Sequence, cached: list[int], new: int) -> None:
        """Give a sequence a slot, the `cached` blocks of its prefix, and the promise of the `new` ones it needs."""
        request = sequence.request
        sequence.slot = self._slots.pop()
        self._running[request.id] = sequence
        output = sequence.tokens[sequence.prompt_length :]
        flight.plan.admitted.append(Admission(sequence.slot, request.key, request.params, request.prompt, output))
        self.tables.open_table(sequence, cached, new)
        # After a preemption the prompt's logprobs come anew.
        sequence.prompt_logprobs = []
        if sequence.cached is None:
            self.started.append(request.id)
            sequence.cached = sequence.computed
            if self.tables.may_reuse(sequence):
                self._counters.prefix_queries += sequence.prompt_length
                self._counters.prefix_hits += sequence.cached

    def _propose(self, sequence: Sequence, budget: int) -> list[int]:
        """Return draft tokens after a sequence's last token, as far as tokens and blocks are to spare."""
        if not self.speculating:
            discard_drafts(sequence)
            return []
        room = sequence.room + self.tables.spare_tokens(len(self._running)) - sequence.computed - 1
        return propose_drafts(sequence, min(budget, room))

    def _add_row(
        self, flight: Flight, sequence: Sequence, count: int, blocks: list[int], drafts: Collection[int] = ()
    ) -> None:
        """Add the next `count` tokens of a sequence, ending with `drafts`, as a row of the step.

        `blocks` are those of the sequence's block table that no rank knows yet.
        """
        start = sequence.computed
        end = start + count
        tokens = sequence.tokens
        if end > sequence.room:
            blocks = blocks + self.tables.grow_table(sequence, end)
        sequence.computed = end
        sequence.outstanding += 1
        plan = flight.plan
        plan.slots.append(sequence.slot)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.blocks.append(blocks)
        if count == 1:
            plan.tokens.append(tokens[start] if start < len(tokens) else UNKNOWN)
        else:
            plan.tokens += tokens[start:end]
            plan.tokens += drafts
        plan.draft_counts.append(len(drafts))
        flight.rows.append(sequence)
        if end == len(tokens) + sequence.pending + len(drafts):
            plan.samples.append(True)
            sequence.pending += 1
            if self.lookahead and sequence.may_continue(True):
                self._await_turn(sequence)
        else:
            plan.samples.append(False)
            self._await_turn(sequence)  # the next chunk needs no result of this one
        if self.pool.caching and end // self.pool.block_size > sequence.registered:
            self.tables.register_full_blocks(sequence)

    def _await_turn(self, sequence: Sequence) -> None:
        if not sequence.ready:
            sequence.ready = True
            self._ready.append(sequence)

    # A result in

    def apply(self, result: StepResult) -> list[Output]:
        """Apply the result of the oldest step in flight. Returns one Output per request that got tokens or failed."""
        flight = self._in_flight.popleft()
        plan = flight.plan
        assert result.id == plan.id, f"result of step {result.id}, expected {plan.id}"
        if result.prompt_logprobs:
            for slot, sequence in zip(plan.slots, flight.rows, strict=True):
                sequence.prompt_logprobs += result.prompt_logprobs.get(slot, ())
        counters = self._counters
        counters.steps += 1
        counters.computed_tokens += len(plan.tokens)
        counters.step_sizes[(len(plan.tokens) - 1).bit_length()] += 1
        outputs = self._fail_rows(flight, result.failed) if result.failed else []
        sampled = zip(result.tokens, result.logprobs, strict=True)
        end = 0
        for sequence, count, samples, drafted in zip(
            flight.rows, plan.counts, plan.samples, plan.draft_counts, strict=True
        ):
            end += count
            sequence.outstanding -= 1
            if samples:
                sequence.pending -= 1
                row_samples = [next(sampled)]
                if drafted:
                    row_samples += islice(sampled, drafted)
                    row_samples = accept_drafts(sequence, plan.tokens[end - drafted : end], row_samples)
                    counters.draft_tokens += drafted
                    counters.accepted_tokens += len(row_samples) - 1
                if not sequence.done:
                    outputs.append(self._extend(sequence, row_samples))
                    counters.generation_tokens += len(outputs[-1].tokens)
        assert next(sampled, None) is None, "more tokens than were asked for"
        if result.drafts:
            keep_model_drafts(flight.rows, result.drafts)
        return outputs

    def _fail_rows(self, flight: Flight, failed: Mapping[int, str]) -> list[Output]:
        """End the requests of the slots in `failed`, each with its reason; the others go on."""
        outputs = []
        for slot, sequence in zip(flight.plan.slots, flight.rows, strict=True):
            if slot in failed and not sequence.done:
                self._finish(sequence)
                outputs.append(Output(sequence.request.id, [], [], finish_reason="error", error=failed[slot]))
        return outputs

    def _extend(self, sequence: Sequence, samples: list[Sample]) -> Output:
        if len(sequence.tokens) == sequence.prompt_length:
            self._counters.prompt_tokens += sequence.prompt_length
        output = sequence.append_samples(samples)
        if output.finish_reason:
            self._finish(sequence)
        elif sequence.slot >= 0 and sequence.may_continue(self.lookahead):
            self._await_turn(sequence)
        return output

    # Leaving

    def _preempt(self, sequence: Sequence) -> None:
        self._counters.preemptions += 1
        self._discard_ready(sequence)
        self._stop_running(sequence)
        heappush(self._queue, (sequence.order, sequence))

    def _finish(self, sequence: Sequence) -> None:
        sequence.done = True
        self._discard_ready(sequence)
        del self._unfinished[sequence.request.id]
        if sequence.slot >= 0:
            self._stop_running(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        """Release a running sequence's slot and blocks."""
        del self._running[sequence.request.id]
        self.tables.close_table(sequence)
        self._released.append(sequence.slot)
        self._slots.append(sequence.slot)
        sequence.slot = -1

    def _discard_ready(self, sequence: Sequence) -> None:
        if sequence.ready:
            sequence.ready = False
            self._ready.remove(sequence)
