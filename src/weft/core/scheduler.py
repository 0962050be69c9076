"""Scheduler: which requests take part in the next step, with how many tokens and which KV blocks.

Pure: it sees no clock and no tensor, and the same calls give the same steps. `schedule` and `apply` are
apart so that several steps can be in flight. Every rank executes steps in the order in which they were
scheduled, and that is what lets blocks be freed, reused and shared the moment a step is scheduled.
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
from weft.core.request import Output, Request, Stats
from weft.core.sequence import Flight, Sample, Sequence
from weft.core.speculation import DraftProposer, common_prefix_length
from weft.core.step import UNKNOWN, Admission, StepPlan, StepResult
from weft.errors import QueueFullError, RequestError
from weft.plan.plan import Speculation

by_order = attrgetter("order")


class Scheduler:
    """Continuous batching over the KV blocks of a `pool`.

    At most `max_num_seqs` requests run, a step has at most `max_num_batched_tokens` tokens, prompt and answer
    together at most `max_model_len`. Beyond those that a free slot awaits, `max_num_queued` may wait. With
    several pipeline `stages` a step takes its share of the requests only, so that each stage has one to work on. With
    `lookahead` a request may take part in the step after the one that samples its token, before that is known: the
    ranks put it in. What such a step brings for a request that has ended meanwhile is dropped. With `speculation`
    tokens of an answer are guessed, and a step confirms several, where `speculating` is not set to False.

    Requests are admitted in order of arrival, under `policy` "priority" by lower priority first; where
    blocks run out, the last in this order is preempted: it loses its blocks, and computes them anew when it
    is admitted again. Admitted requests that one step has no tokens for take turns.
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
        # Ids of the requests that the last scheduled step was the first for.
        self.started: list[str] = []
        # Prompt tokens of the last scheduled step, and the most of a step while others await their next token.
        self.prompt_tokens = 0
        self.prompt_limit = max_num_batched_tokens
        self._counters = Stats(blocks_total=pool.num_blocks)

    # Requests in and out

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError where it can never run, QueueFullError where too many wait."""
        length, blocks = len(request.prompt), self.tables.count_blocks(len(request.prompt) + 1)
        if not length:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        if request.id in self._unfinished:
            raise RequestError(f"a request {request.id!r} is running already; ids must differ", param="request_id")
        if length >= self.max_model_len:
            raise RequestError(
                f"the prompt has {length} tokens, and prompt and answer together at most {self.max_model_len} "
                f"(max_model_len); send at most {self.max_model_len - 1}",
                param="prompt",
            )
        if blocks > self.pool.num_blocks:
            raise RequestError(
                f"the prompt has {length} tokens and needs {blocks} KV blocks, the cache has {self.pool.num_blocks}; "
                "send a shorter one, or give the cache more memory (--kv-cache-memory-bytes)",
                param="prompt",
            )
        if self.waiting >= self.max_num_queued + len(self._slots):
            raise QueueFullError(
                f"{self.waiting} requests wait already, at most {self.max_num_queued} may; "
                "try again later, or raise --max-num-queued-reqs"
            )
        order = (request.priority if self._by_priority else 0, self._arrivals)
        # A lone request may outgrow a small cache: it ends there, like one that reaches the model's length.
        longest = min(self.max_model_len, self.pool.num_blocks * self.pool.block_size)
        sequence = Sequence(request, order, longest)
        if self.speculation and not sequence.remembers:
            sequence.proposer = DraftProposer(self.speculation)
        self._arrivals += 1
        self._unfinished[request.id] = sequence
        heappush(self._queue, (order, sequence))

    def abort(self, ids: Iterable[str]) -> None:
        """Forget these requests at once; what steps in flight bring for them is dropped. Unknown ids are none."""
        waiting = self.waiting
        for id in ids:
            if sequence := self._unfinished.get(id):
                self._finish(sequence)
        if self.waiting < waiting:
            self._queue = [entry for entry in self._queue if not entry[1].done]
            heapify(self._queue)

    @property
    def running(self) -> Collection[str]:
        """The ids of those that run."""
        return self._running.keys()

    @property
    def waiting(self) -> int:
        return len(self._unfinished) - len(self._running)

    @property
    def active(self) -> int:
        """Those that run, and those that may as far as there are slots."""
        return len(self._running) + min(self.waiting, len(self._slots))

    def stats(self) -> Stats:
        """A copy, of this moment."""
        return replace(
            self._counters,
            running=len(self._running),
            waiting=self.waiting,
            blocks_used=self.pool.num_blocks - self.pool.free,
            step_sizes=list(self._counters.step_sizes),
        )

    # A step out

    def schedule(self) -> StepPlan | None:
        """The next step, or None where nothing can run before a result, or a request, comes in. Runs nothing."""
        flight = Flight(self._steps)
        self.started = []
        chosen = self._choose()
        prefills = []
        budget = self.max_num_batched_tokens
        for number, sequence in enumerate(chosen):
            if len(sequence.tokens) + sequence.pending - sequence.computed == 1:
                guesses: list[int] = []
                if sequence.proposer:
                    # Everybody after it is sure of a token.
                    guesses = self._guess(sequence, budget - len(chosen) + number)
                self._add_row(flight, sequence, 1 + len(guesses), [], guesses)
                budget -= 1 + len(guesses)
            else:
                prefills.append(sequence)
        plan = flight.plan
        decoded = len(plan.tokens)
        if len(self._running) > len(prefills):
            budget = min(budget, self.prompt_limit)
        if prefills:
            budget = self._continue_prefills(flight, prefills, budget)
        if self._queue:
            self._admit(flight, budget)
        if not plan.slots:
            return None
        self.prompt_tokens = len(plan.tokens) - decoded
        if self.speculating and self.speculation and self.speculation.draft:
            plan.draft_requests = [self._ask(sequence) for sequence in flight.rows]
        # Where nothing runs any more, slots wait for the next step to be told: they hold no KV.
        plan.released, self._released = self._released, []
        self._steps += 1
        self._in_flight.append(flight)
        return plan

    def _choose(self) -> list[Sequence]:
        """The running requests of this step: each is sure of a token and of a block for it."""
        ready = self._ready
        chosen: list[Sequence] = []
        while ready and not chosen:
            count = min(len(ready), self.max_num_batched_tokens, -(-len(self._running) // self.stages))
            chosen = [ready.popleft() for _ in range(count)]
            for sequence in chosen:
                sequence.ready = False
            if self.pool.free < count:
                self._make_room(chosen)
        return chosen

    def _make_room(self, chosen: list[Sequence]) -> None:
        """Preempt running requests, last in order first, until each chosen one can have the block it needs."""
        while sum(sequence.computed == sequence.room for sequence in chosen) > self.pool.free:
            victim = max(self._running.values(), key=by_order)
            if victim in chosen:
                chosen.remove(victim)
            self._preempt(victim)

    def _continue_prefills(self, flight: Flight, prefills: list[Sequence], budget: int) -> int:
        """Chunks of prompts, as long as tokens and blocks last. Returns the tokens left."""
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

    def _admit(self, flight: Flight, budget: int) -> None:
        """Take in waiting requests, in their order, as long as slots, tokens and blocks last."""
        rows = -(-self.active // self.stages)
        while self._queue and budget and self._slots and len(flight.plan.slots) < rows:
            sequence = self._queue[0][1]
            # Preempted, and then its last step brought the end.
            if sequence.done:
                heappop(self._queue)
                continue
            # Preempted, and its last step is not back: what that brings belongs to its tokens.
            if sequence.outstanding:
                return
            found = self.tables.match_prefix(sequence)
            new = self.tables.count_blocks(len(sequence.tokens)) - len(found)
            if not self.tables.has_room(new, found, len(self._running)):
                return
            heappop(self._queue)
            self._start(flight, sequence, found, new)
            count = min(len(sequence.tokens) - sequence.computed, budget)
            self._add_row(flight, sequence, count, found)
            budget -= count

    def _start(self, flight: Flight, sequence: Sequence, found: list[int], new: int) -> None:
        """Give a sequence a slot, the blocks that hold its beginning, and the promise of the `new` ones it needs."""
        request = sequence.request
        sequence.slot = self._slots.pop()
        self._running[request.id] = sequence
        output = sequence.tokens[sequence.prompt_length :]
        flight.plan.admitted.append(
            Admission(sequence.slot, request.key, request.params, request.prompt, output),
        )
        self.tables.open_table(sequence, found, new)
        # Its pieces come anew.
        sequence.prompt_logprobs = []
        if sequence.cached is None:
            self.started.append(request.id)
            sequence.cached = sequence.computed
            if self.tables.may_reuse(sequence):
                self._counters.prefix_queries += sequence.prompt_length
                self._counters.prefix_hits += sequence.cached

    def _guess(self, sequence: Sequence, budget: int) -> list[int]:
        """Guesses of what follows a sequence's last token, as far as tokens and blocks are to spare and it may grow."""
        assert sequence.proposer
        most = 0
        if self.speculating:
            room = sequence.room + self.tables.spare_tokens(len(self._running)) - sequence.computed - 1
            most = min(budget, room, sequence.limit - len(sequence.tokens) - 1)
        if most < 1:
            sequence.proposer.set_model_drafts([])  # what a draft said is of a text that goes on without it
            return []
        return sequence.proposer.propose(sequence.tokens, most)

    @staticmethod
    def _ask(sequence: Sequence) -> int:
        """How many guesses a draft is asked for, after a step that brings a sequence one token at least."""
        return sequence.proposer.draft_limit(sequence.limit - len(sequence.tokens) - 2) if sequence.proposer else 0

    def _add_row(
        self, flight: Flight, sequence: Sequence, count: int, blocks: list[int], guesses: Collection[int] = ()
    ) -> None:
        """The next `count` tokens of a sequence, the last of them `guesses`. `blocks` are those of its table that no
        rank knows of yet."""
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
            plan.tokens += guesses
        plan.draft_counts.append(len(guesses))
        flight.rows.append(sequence)
        if end == len(tokens) + sequence.pending + len(guesses):
            plan.samples.append(True)
            sequence.pending += 1
            if self.lookahead and self._may_go_on(sequence):
                self._await_turn(sequence)
        else:
            plan.samples.append(False)
            # Its next chunk needs no result of this one.
            self._await_turn(sequence)
        if self.pool.caching and end // self.pool.block_size > sequence.registered:
            self.tables.register_full_blocks(sequence)

    def _may_go_on(self, sequence: Sequence) -> bool:
        """Whether a sequence can take part in the next step, where one of its tokens is still on its way."""
        return sequence.pending == 0 or (
            self.lookahead
            and sequence.pending == 1
            and not sequence.remembers
            and len(sequence.tokens) + 1 < sequence.limit
        )

    def _await_turn(self, sequence: Sequence) -> None:
        if not sequence.ready:
            sequence.ready = True
            self._ready.append(sequence)

    # A result in

    def apply(self, result: StepResult) -> list[Output]:
        """What the oldest step in flight brought, one Output for each request that got a token."""
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
        at = 0
        for sequence, count, samples, guessed in zip(
            flight.rows, plan.counts, plan.samples, plan.draft_counts, strict=True
        ):
            at += count
            sequence.outstanding -= 1
            if samples:
                sequence.pending -= 1
                brought = [next(sampled)]
                if guessed:
                    brought += islice(sampled, guessed)
                    brought = self._confirm(sequence, plan.tokens[at - guessed : at], brought)
                if not sequence.done:
                    outputs.append(self._extend(sequence, brought))
                    counters.generation_tokens += len(outputs[-1].tokens)
        assert next(sampled, None) is None, "more tokens than were asked for"
        for sequence in flight.rows if result.drafts else ():
            # Who has been preempted meanwhile has no slot.
            if sequence.proposer and sequence.slot in result.drafts:
                sequence.proposer.set_model_drafts(result.drafts[sequence.slot])
        return outputs

    def _fail_rows(self, flight: Flight, failed: Mapping[int, str]) -> list[Output]:
        """End the requests of the slots in `failed`, each with the reason; the others go on."""
        outputs = []
        for slot, sequence in zip(flight.plan.slots, flight.rows, strict=True):
            if slot in failed and not sequence.done:
                self._finish(sequence)
                outputs.append(Output(sequence.request.id, [], [], finish_reason="error", error=failed[slot]))
        return outputs

    def _confirm(self, sequence: Sequence, guesses: list[int], brought: list[Sample]) -> list[Sample]:
        """What was sampled after guesses that were right, and after the token before them."""
        right = common_prefix_length(guesses, [token for token, _ in brought])
        assert sequence.proposer
        sequence.proposer.record_accepted(len(guesses), right)
        self._counters.draft_tokens += len(guesses)
        self._counters.accepted_tokens += right
        if sequence.slot >= 0:
            # The KV of wrong guesses is written over.
            sequence.computed -= len(guesses) - right
        return brought[: right + 1]

    def _extend(self, sequence: Sequence, brought: list[Sample]) -> Output:
        if len(sequence.tokens) == sequence.prompt_length:
            self._counters.prompt_tokens += sequence.prompt_length
        output = sequence.take(brought)
        if output.finish_reason:
            self._finish(sequence)
        elif sequence.slot >= 0 and self._may_go_on(sequence):
            self._await_turn(sequence)
        return output

    # Leaving

    def _preempt(self, sequence: Sequence) -> None:
        self._counters.preemptions += 1
        self._discard_ready(sequence)
        self._stop(sequence)
        heappush(self._queue, (sequence.order, sequence))

    def _finish(self, sequence: Sequence) -> None:
        sequence.done = True
        self._discard_ready(sequence)
        del self._unfinished[sequence.request.id]
        if sequence.slot >= 0:
            self._stop(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Take back a running sequence's slot and blocks."""
        del self._running[sequence.request.id]
        self.tables.close_table(sequence)
        self._released.append(sequence.slot)
        self._slots.append(sequence.slot)
        sequence.slot = -1

    def _discard_ready(self, sequence: Sequence) -> None:
        if sequence.ready:
            sequence.ready = False
            self._ready.remove(sequence)
