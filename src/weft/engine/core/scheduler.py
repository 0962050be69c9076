"""Scheduler: continuous batching. Decides which requests take part in each step, with how many tokens and KV blocks.

Pure: it reads no clock and no tensor, and the same calls give the same steps. `schedule` and `apply` are separate, so
that several steps can be in flight. Every rank executes steps in the order in which they were scheduled. Therefore
blocks can be freed, reused and shared as soon as a step is scheduled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from msgspec.structs import replace

from weft.engine.core.drafts import accept_drafts, discard_drafts, draft_request, keep_model_drafts, propose_drafts
from weft.engine.core.fair import FairPolicy
from weft.engine.core.grammar import Grammars, Matcher
from weft.engine.core.kv import KVManager, Tables
from weft.engine.core.pace import CACHED_TOKENS
from weft.engine.core.policy import OrderedPolicy, StepOrder, StepPolicy
from weft.engine.core.request import Output, Request, Stats, check_prompt_length, duplicate_id_error, queue_full_error
from weft.engine.core.scheduled import UNLIMITED, ScheduledStep, StepLimits
from weft.engine.core.sequence import Flight, Sample, Sequence
from weft.engine.core.speculation import DraftProposer
from weft.engine.core.step import UNKNOWN, Admission, SlotFailure, StepPlan, StepResult
from weft.engine.core.table import RequestTable
from weft.engine.core.view import SchedulerSettings, SchedulerView
from weft.engine.core.waiting import Owner


class Scheduler:
    """Continuous batching over the KV blocks of `kv`.

    If blocks run out, the policy names a running request to preempt: it loses its blocks, and computes them again once
    it is readmitted. Admitted requests that do not all fit into one step take turns.
    """

    def __init__(self, settings: SchedulerSettings, kv: KVManager, grammars: Grammars | None = None) -> None:
        self.settings, self.kv, self.grammars = settings, kv, grammars
        self.table = RequestTable(settings.max_num_seqs)
        self.view = SchedulerView(settings, kv, self.table)
        self._policy: StepPolicy = FairPolicy(self.view) if settings.policy == "fair" else OrderedPolicy(self.view)
        # A lone request may outgrow a small cache. It ends there, as if it reached the model's length.
        self._longest = kv.layout.longest(kv.num_blocks, settings.max_model_len)
        self._lookahead = settings.lookahead
        self._arrivals = 0
        self._steps = 0
        self._counters = Stats(blocks_total=kv.num_blocks)

    # Requests in and out

    def add(self, request: Request, *, prepared: bool = True) -> None:
        """Queue a request. Raises RequestError if it can never run, QueueFullError if too many wait.

        A request that is not `prepared` needs something that is still being loaded or compiled, such as an adapter. It
        waits until `mark_prepared`, and requests behind it go first. Its place in the queue is given by its arrival.
        """
        number, priority = self._policy.place(request)
        owner = self.table.owners.setdefault(number, Owner())
        owner.weight = request.weight
        length = request.length
        if request.id in self.table.unfinished:
            raise duplicate_id_error(request.id)
        answers = request.pooling is None
        needed_blocks = self.kv.layout.blocks(length + answers)
        check_prompt_length(length, self.settings.max_model_len, needed_blocks, self.kv.num_blocks, answers=answers)
        waiting = self._policy.waiting(owner)
        if waiting >= self.settings.max_num_queued + len(self.table.slots):
            raise queue_full_error(waiting, self.settings.max_num_queued)
        sequence = Sequence(request, owner, (priority, self._arrivals), self._longest)
        if self.settings.speculation and answers and not request.params.needs_history:
            sequence.proposer = DraftProposer(self.settings.speculation)
        self._arrivals += 1
        if not owner.unfinished:
            self._policy.owner_returns(owner)
        self.table.add(sequence, prepared=prepared)

    def mark_prepared(self, id: str, matcher: Matcher | None = None) -> None:
        """Let a request run that was added unprepared. Other and unknown ids are ignored.

        `matcher` belongs to the request's grammar.
        """
        if sequence := self.table.unprepared.pop(id, None):
            sequence.matcher = matcher
            sequence.owner.queue.push(sequence)

    def knows(self, id: str) -> bool:
        """Return True for a request that has not ended."""
        return id in self.table.unfinished

    def abort(self, ids: Iterable[str]) -> None:
        """Forget these requests at once, and drop the tokens that steps in flight bring for them.

        Unknown ids are ignored.
        """
        owners = set()
        for id in ids:
            if sequence := self.table.unfinished.get(id):
                if sequence.slot < 0:
                    owners.add(sequence.owner)
                self._finish(sequence)
        for owner in owners:
            owner.queue.discard_done()

    def preempt_all(self) -> None:
        """Preempt all running requests, which compute their KV again once they are admitted. No step is in flight."""
        assert not self.table.in_flight
        for sequence in list(self.table.running.values()):
            self._preempt(sequence)

    def reset_prefix_cache(self) -> None:
        """Let no request reuse blocks that were filled before. Running requests keep theirs."""
        self.kv.forget_content()

    @property
    def active(self) -> int:
        """Number of requests that run, plus those waiting that are prepared and for which a slot is free."""
        return self.table.active

    def stats(self) -> Stats:
        """Return a copy of the gauges and counters."""
        return replace(
            self._counters,
            running=len(self.table.running) + len(self.table.pooling),
            waiting=self.table.waiting,
            blocks_used=self.kv.used,
            step_sizes=list(self._counters.step_sizes),
        )

    # Leaving

    def _preempt(self, sequence: Sequence) -> None:
        self._counters.preemptions += 1
        self._stop_running(sequence)
        if sequence.proposer:
            # After its readmission it samples a token before the draft model's next tokens arrive.
            discard_drafts(sequence)
        sequence.owner.queue.push(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        """Release a running sequence's slot and blocks."""
        self.table.stop(sequence)
        self.kv.close_tables(sequence)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self._stop_running(sequence)
        self.table.end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Finish a request whose last step has brought its end. If it was preempted since, it leaves the queue."""
        waits = sequence.slot < 0 and sequence.request.id not in self.table.pooling
        self._finish(sequence)
        if waits:
            sequence.owner.queue.discard_done()

    # A step out

    def schedule(self, limits: StepLimits = UNLIMITED) -> ScheduledStep[StepPlan] | None:
        """Return the next step, or None if nothing can run before a result or a request comes in."""
        order = self._policy.begin_step(limits)
        for sequence in order.claims():
            self._preempt(sequence)
        flight = self._compose(order, limits)
        if not flight.rows and order.widen():
            flight = self._compose(order, limits)
        if not flight.rows:
            return None
        plan, table = flight.plan, self.table
        self._counters.starved_steps += flight.starved
        flight.plan_blocks(len(self.kv.groups))
        if self.grammars and any(sequence.matcher for sequence in flight.rows):
            flight.plan_masks(self.grammars)
        if limits.speculating and self.settings.speculation and self.settings.speculation.draft:
            plan.draft_requests = [draft_request(sequence) for sequence in flight.rows]
        # Without a next step, released slots are sent with the first step after the pause: they hold no KV.
        plan.released, table.released = table.released, []
        self._steps += 1
        table.in_flight.append(flight)
        self._free_pooled(flight)
        order.end(flight)
        return ScheduledStep(plan, flight.started, flight.prompt_tokens, order.newcomer_tokens)

    def _compose(self, order: StepOrder, limits: StepLimits) -> Flight:
        """Give a step its rows, if any request can take part."""
        flight = Flight(self._steps)
        selected = self._select_running(order)
        prefills = []
        budget = self.settings.max_num_batched_tokens
        for number, sequence in enumerate(selected):
            if len(sequence.tokens) + sequence.pending - sequence.computed == 1:
                drafts: list[int] = []
                if sequence.proposer:
                    # Each later sequence is sure of a token.
                    drafts = self._propose(sequence, budget - len(selected) + number, limits)
                self._add_row(flight, sequence, 1 + len(drafts), drafts)
                budget -= 1 + len(drafts)
            else:
                prefills.append(sequence)
        delayed = limits.others_decode or len(self.table.running) > len(prefills)
        most = order.prompt_limit(len(flight.rows), delayed)
        if most is not None:
            budget = min(budget, most)
        allowed = budget
        later: list[Sequence] = []
        if prefills:
            first, later = order.split_prompts(prefills)
            budget = self._continue_prefills(flight, first, budget)
        if self.table.queued:
            budget = self._admit(flight, order, budget, limited=most is not None)
        if later:
            budget = self._continue_prefills(flight, later, max(0, budget))
        flight.prompt_tokens = allowed - budget
        return flight

    def _free_pooled(self, flight: Flight) -> None:
        """Release slots and blocks of the requests whose prompts end in this step: later steps may have them at once.

        Their blocks stay in the prefix cache.
        """
        for sequence in flight.pooled:
            self._stop_running(sequence)
            self.table.pooling.add(sequence.request.id)

    def _select_running(self, order: StepOrder) -> list[Sequence]:
        """Select the running requests of this step. Each is sure of a token and of blocks for it."""
        table, kv, settings = self.table, self.kv, self.settings
        selected: list[Sequence] = []
        while not selected:
            share = -(-len(table.running) // settings.stages)
            selected = order.select(min(settings.max_num_batched_tokens, share))
            if not selected:
                break
            table.take(selected)
            if kv.frees:
                for sequence in selected:
                    kv.free_behind(sequence, sequence.computed)
            if kv.free_columns < len(selected):
                # If all of them have to give up their blocks, others can run.
                self._make_room(order, selected)
        return selected

    def _make_room(self, order: StepOrder, selected: list[Sequence]) -> None:
        """Preempt running requests until each selected request can have the blocks it needs."""
        while sum(sequence.computed == sequence.room for sequence in selected) > self.kv.free_columns:
            victim = order.victim()
            if victim in selected:
                selected.remove(victim)
            self._preempt(victim)

    def _continue_prefills(self, flight: Flight, prefills: list[Sequence], budget: int) -> int:
        """Add chunks of prompts, as long as tokens and blocks last. Returns the tokens left."""
        left_out = []
        for sequence in prefills:
            fits = sequence.room + self.kv.free_columns * self.kv.block_size - sequence.computed
            count = self.kv.align_chunk(sequence, min(len(sequence.tokens) - sequence.computed, budget, fits))
            if count:
                self._add_row(flight, sequence, count)
                budget -= count
            else:
                left_out.append(sequence)
        for sequence in left_out:
            self.table.await_turn(sequence)
        return budget

    def _admit(self, flight: Flight, order: StepOrder, budget: int, *, limited: bool) -> int:
        """Admit waiting requests, as long as slots, tokens and blocks last. Returns the tokens left.

        If prompts are `limited`, tokens from the prefix cache count as well.
        """
        rows = -(-self.table.active // self.settings.stages)
        while budget > 0 and self.table.slots and len(flight.rows) < rows:
            sequence, prefix, starved = order.next_admission()
            flight.starved = flight.starved or starved
            if sequence is None:
                break
            self._start_running(flight, sequence, prefix)
            count = self.kv.align_chunk(sequence, min(len(sequence.tokens) - sequence.computed, budget))
            budget -= count
            if limited:
                # Until the row is added, `computed` counts the tokens of the prefix cache.
                budget -= sequence.computed // CACHED_TOKENS
            self._add_row(flight, sequence, count)
        return budget

    def _start_running(self, flight: Flight, sequence: Sequence, prefix: Tables) -> None:
        """Give a sequence a slot and the cached blocks of its `prefix`, and promise it the other blocks that it
        needs."""
        request = sequence.request
        self.table.start(sequence)
        output = sequence.tokens[sequence.prompt_length :]
        flight.plan.admitted.append(
            Admission(sequence.slot, request.key, request.params, request.prompt, output, request.pooling)
        )
        self.kv.open_tables(sequence, prefix)
        # After a preemption the prompt's logprobs are computed again.
        sequence.prompt_logprobs = []
        if sequence.cached is None:
            flight.started.append(request.id)
            sequence.cached = min(sequence.computed, sequence.prompt_length)
            if self.kv.may_reuse(sequence):
                self._counters.prefix_queries += sequence.prompt_length
                self._counters.prefix_hits += sequence.cached

    def _propose(self, sequence: Sequence, budget: int, limits: StepLimits) -> list[int]:
        """Return draft tokens after a sequence's last token, as far as spare tokens and blocks allow."""
        if not limits.speculating:
            discard_drafts(sequence)
            return []
        room = sequence.room + self.kv.spare_tokens(len(self.table.running)) - sequence.computed - 1
        return propose_drafts(sequence, min(budget, room))

    def _add_row(self, flight: Flight, sequence: Sequence, count: int, drafts: Collection[int] = ()) -> None:
        """Add the next `count` tokens of a sequence, ending with `drafts`, as a row of the step."""
        start = sequence.computed
        end = start + count
        tokens = sequence.tokens
        if end > sequence.room:
            flight.grown.append((len(flight.rows), self.kv.grow_tables(sequence, end)))
        sequence.computed = end
        sequence.outstanding += 1
        plan = flight.plan
        plan.slots.append(sequence.slot)
        plan.starts.append(start)
        plan.counts.append(count)
        if count == 1:
            plan.tokens.append(tokens[start] if start < len(tokens) else UNKNOWN)
        else:
            plan.tokens += tokens[start:end]
            plan.tokens += drafts
        plan.draft_counts.append(len(drafts))
        flight.rows.append(sequence)
        if end == len(tokens) and sequence.request.pooling is not None:
            plan.samples.append(False)
            flight.pooled.append(sequence)
        elif end == len(tokens) + sequence.pending + len(drafts):
            plan.samples.append(True)
            sequence.pending += 1
            if self._lookahead and sequence.may_continue(True):
                self.table.await_turn(sequence)
        else:
            plan.samples.append(False)
            self.table.await_turn(sequence)  # the next chunk needs no result of this one
        if self.kv.caching and end // self.kv.block_size > sequence.registered:
            self.kv.register_full_blocks(sequence)

    # A result in

    def apply(self, result: StepResult) -> list[Output]:
        """Apply the result of the oldest step in flight. Returns one Output per request that got tokens or failed."""
        flight = self.table.in_flight.popleft()
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
        if result.pooled:
            outputs += self._finish_pooled(flight, result.pooled)
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

    def _fail_rows(self, flight: Flight, failed: Mapping[int, SlotFailure]) -> list[Output]:
        """End the requests of the slots in `failed`, each with its reason; the others go on.

        The blocks that a failed row has read and written may hold NaN: nothing of its text stays in the prefix cache,
        even if the request was aborted since. Requests that share such blocks keep them: if the blocks hold NaN, these
        requests fail by themselves.
        """
        outputs = []
        for slot, sequence in zip(flight.plan.slots, flight.rows, strict=True):
            if slot not in failed:
                continue
            ended = sequence.done
            if not ended:
                self._end(sequence)
            self.kv.forget_text(sequence)
            if not ended:
                outputs.append(Output(sequence.request.id, [], [], finish_reason="error", error=failed[slot]))
        return outputs

    def _finish_pooled(self, flight: Flight, pooled: Mapping[int, bytes]) -> list[Output]:
        """End the requests whose prompts a step has computed to the end."""
        outputs = []
        for slot, sequence in zip(flight.plan.slots, flight.rows, strict=True):
            if slot in pooled and not sequence.done:
                self._counters.prompt_tokens += sequence.prompt_length
                self._end(sequence)
                cached = sequence.cached or 0
                id = sequence.request.id
                outputs.append(Output(id, [], [], "stop", cached_tokens=cached, pooled=pooled[slot]))
        return outputs

    def _extend(self, sequence: Sequence, samples: list[Sample]) -> Output:
        if len(sequence.tokens) == sequence.first:
            self._counters.prompt_tokens += sequence.prompt_length
        output = sequence.append_samples(samples)
        if output.finish_reason:
            self._end(sequence)
        elif sequence.slot >= 0 and not sequence.ready and sequence.may_continue(self._lookahead):
            self.table.await_turn(sequence)
        return output

    # Many steps at once

    def advance(self, rounds: int) -> list[str]:
        """Advance by `rounds` rounds in which all running requests decode, and no other request is admitted.

        No request ends before the last round, and none then if a step is in flight. The state becomes the same as after
        single steps that sample each request's last token again. The steps in flight stay in flight; with lookahead the
        rows may get another order. Returns the ids of the requests that have ended. The counters of the policy "fair"
        stay as they are.
        """
        counters, running = self._counters, self.table.running.values()
        steps = self.table.turns(lookahead=self._lookahead)
        for rows in map(len, steps):
            counters.steps += rounds
            counters.starved_steps += rounds * self._starves(rows)
            counters.step_sizes[(rows - 1).bit_length()] += rounds
        counters.generation_tokens += rounds * len(running)
        counters.computed_tokens += rounds * len(running)
        for sequence in running:
            sequence.tokens += [sequence.tokens[-1]] * rounds
        if self._lookahead:
            # The token that a step computes is still being sampled when it is scheduled. Its rows are then in the order
            # of the step before the last, whose result has been applied: the orders of two steps alternate.
            ahead = self.table.in_flight[0]
            self.kv.advance([steps, [ahead.rows]], rounds, unknown=1)
            if rounds % 2:
                self.table.take(steps[0])
                for sequence in ahead.rows:
                    self.table.await_turn(sequence)
                ahead.reorder(steps[0])
        else:
            self.kv.advance([steps], rounds, unknown=0)
        ended = [sequence for sequence in running if len(sequence.tokens) >= sequence.limit]
        # All requests of the last step get their blocks before any request frees its own.
        for sequence in ended:
            self._finish(sequence)
        return [sequence.request.id for sequence in ended]

    def _starves(self, rows: int) -> bool:
        """Return True if a decode step of `rows` rows that admits no request would have a free slot."""
        table = self.table
        if not table.slots or not any(owner.queue.first() for owner in table.owners.values()):
            return False
        return rows < min(self.settings.max_num_batched_tokens, -(-table.active // self.settings.stages))
