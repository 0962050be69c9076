"""Scheduler: continuous batching. Decides which requests take part in each step, with how many tokens and KV blocks.

Pure: it reads no clock and no tensor, and the same calls give the same steps. `schedule` and `apply` are separate, so
that several steps can be in flight. Every rank executes steps in the order in which they were scheduled. Therefore
blocks can be freed, reused and shared as soon as a step is scheduled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice

from weft.engine.core.drafts import accept_drafts, discard_drafts, draft_request, keep_model_drafts, propose_drafts
from weft.engine.core.grammar import Grammars, Matcher
from weft.engine.core.kv import Tables
from weft.engine.core.pace import CACHED_TOKENS
from weft.engine.core.request import Output
from weft.engine.core.request_sets import RequestSets, by_order
from weft.engine.core.sequence import Flight, Sample, Sequence
from weft.engine.core.steady import Steady, decodes_only, may_share, rounds_before_end, rounds_with_room
from weft.engine.core.step import UNKNOWN, Admission, SlotFailure, StepPlan, StepResult


class Scheduler(RequestSets):
    """Continuous batching over the KV blocks of `kv`.

    At most `max_num_seqs` requests run, a step has at most `max_num_batched_tokens` tokens, and prompt and answer
    together have at most `max_model_len`. At most `max_num_queued` requests wait, not counting as many as there are
    free slots. With several pipeline `stages`, a step takes only its share of the requests, so that each stage has a
    step to work on. With `lookahead`, a request may take part in the next step before the token that it samples in this
    step is known: the ranks fill the token in. If the request ends with that token, the results of the next step are
    dropped. With `speculation`, a step verifies several draft tokens of an answer, unless `speculating` is False.

    Requests are admitted in order of arrival; under `policy` "priority", lower priority values come first. If blocks
    run out, the last running request in this order is preempted: it loses its blocks, and computes them again once it
    is readmitted. Admitted requests that do not all fit into one step take turns.
    """

    # A step out

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if nothing can run before a result or a request comes in."""
        flight = Flight(self._steps)
        self.started = []
        self._starved = False
        selected = self._select_running()
        prefills = []
        budget = self.max_num_batched_tokens
        for number, sequence in enumerate(selected):
            if len(sequence.tokens) + sequence.pending - sequence.computed == 1:
                drafts: list[int] = []
                if sequence.proposer:
                    # Each later sequence is sure of a token.
                    drafts = self._propose(sequence, budget - len(selected) + number)
                self._add_row(flight, sequence, 1 + len(drafts), drafts)
                budget -= 1 + len(drafts)
            else:
                prefills.append(sequence)
        plan = flight.plan
        delays_decodes = self._delays_decodes(len(prefills))
        if delays_decodes:
            budget = self._limit_prompts(budget, len(plan.slots))
        allowed = budget
        if prefills:
            budget = self._continue_prefills(flight, prefills, budget)
        if self._queue:
            budget = self._admit(flight, budget, delays_decodes)
        if not plan.slots:
            return None
        self._counters.starved_steps += self._starved
        self.prompt_tokens = allowed - budget
        flight.plan_blocks(len(self.kv.groups))
        if self.grammars and any(sequence.matcher for sequence in flight.rows):
            self._plan_masks(flight, self.grammars)
        if self.speculating and self.speculation and self.speculation.draft:
            plan.draft_requests = [draft_request(sequence) for sequence in flight.rows]
        # Without a next step, released slots are sent with the first step after the pause: they hold no KV.
        plan.released, self._released = self._released, []
        self._steps += 1
        self._in_flight.append(flight)
        self._free_pooled(flight)
        return plan

    def _delays_decodes(self, prefills: int) -> bool:
        """Return True if the prompts of a step delay requests that decode."""
        return self.others_decode or len(self._running) > prefills

    def _limit_prompts(self, budget: int, decodes: int) -> int:
        """Prompt tokens, at most `budget`, that a step may have in addition to this number of decode tokens."""
        return min(budget, self.prompt_limit)

    def _free_pooled(self, flight: Flight) -> None:
        """Release slots and blocks of the requests whose prompts end in this step: later steps may have them at once.

        Their blocks stay in the prefix cache.
        """
        for sequence in flight.pooled:
            self._stop_running(sequence)
            self._pooling.add(sequence.request.id)

    def _select_running(self) -> list[Sequence]:
        """Select the running requests of this step. Each is sure of a token and of blocks for it."""
        ready, kv = self._ready, self.kv
        selected: list[Sequence] = []
        while ready and not selected:
            count = min(len(ready), self.max_num_batched_tokens, -(-len(self._running) // self.stages))
            selected = [ready.popleft() for _ in range(count)]
            for sequence in selected:
                sequence.ready = False
                if kv.frees:
                    kv.free_behind(sequence, sequence.computed)
            if kv.free_columns < count:
                self._make_room(selected)
        return selected

    def _make_room(self, selected: list[Sequence]) -> None:
        """Preempt running requests, last in order first, until each selected request can have the blocks it needs."""
        while sum(sequence.computed == sequence.room for sequence in selected) > self.kv.free_columns:
            victim = self._find_victim()
            if victim in selected:
                selected.remove(victim)
            self._preempt(victim)

    def _find_victim(self) -> Sequence:
        """The running request that gives up its blocks when the others need more than there are."""
        return max(self._running.values(), key=by_order)

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
            self._await_turn(sequence)
        return budget

    def _admit(self, flight: Flight, budget: int, delays_decodes: bool) -> int:
        """Admit waiting requests, in their order, as long as slots, tokens and blocks last. Returns the tokens left."""
        rows = -(-self.active // self.stages)
        while budget > 0 and self._slots and len(flight.plan.slots) < rows:
            admissible = self._find_admissible()
            if admissible is None:
                break
            sequence, prefix = admissible
            self._queue.pop(sequence)
            self._start_running(flight, sequence, prefix)
            count = self.kv.align_chunk(sequence, min(len(sequence.tokens) - sequence.computed, budget))
            budget -= count
            if delays_decodes:
                # Until the row is added, `computed` counts the tokens of the prefix cache.
                budget -= sequence.computed // CACHED_TOKENS
            self._add_row(flight, sequence, count)
        return budget

    def _find_admissible(self) -> tuple[Sequence, Tables] | None:
        """The request to admit next, with the cached blocks of its prefix; None if there is none, or no room for it."""
        sequence = self._queue.first()
        if sequence is None:
            return None
        sequence.unpack_prompt()
        prefix = self.kv.match_prefix(sequence)
        return (sequence, prefix) if self._has_room(sequence, prefix) else None

    def _has_room(self, sequence: Sequence, prefix: Tables) -> bool:
        """Return True if a waiting request can be admitted; if not, note that this step is starved."""
        fits = self.kv.has_room(sequence, prefix)
        self._starved = self._starved or not fits
        return fits

    def _start_running(self, flight: Flight, sequence: Sequence, prefix: Tables) -> None:
        """Give a sequence a slot and the cached blocks of its `prefix`, and promise it the other blocks that it
        needs."""
        request = sequence.request
        sequence.slot = self._slots.pop()
        self._running[request.id] = sequence
        output = sequence.tokens[sequence.prompt_length :]
        flight.plan.admitted.append(
            Admission(sequence.slot, request.key, request.params, request.prompt, output, request.pooling)
        )
        self.kv.open_tables(sequence, prefix)
        # After a preemption the prompt's logprobs are computed again.
        sequence.prompt_logprobs = []
        if sequence.cached is None:
            self.started.append(request.id)
            sequence.cached = min(sequence.computed, sequence.prompt_length)
            if self.kv.may_reuse(sequence):
                self._counters.prefix_queries += sequence.prompt_length
                self._counters.prefix_hits += sequence.cached

    def _propose(self, sequence: Sequence, budget: int) -> list[int]:
        """Return draft tokens after a sequence's last token, as far as spare tokens and blocks allow."""
        if not self.speculating:
            discard_drafts(sequence)
            return []
        room = sequence.room + self.kv.spare_tokens(len(self._running)) - sequence.computed - 1
        drafts = propose_drafts(sequence, min(budget, room))
        return drafts[: sequence.matcher.count_valid(drafts)] if sequence.matcher and drafts else drafts

    def _plan_masks(self, flight: Flight, grammars: Grammars) -> None:
        """Give the plan the masks of its constrained rows, for each token that they sample."""
        plan, end = flight.plan, 0
        slots: list[int] = []
        rows: list[tuple[Matcher, list[int]]] = []
        for sequence, count, samples, drafted in zip(
            flight.rows, plan.counts, plan.samples, plan.draft_counts, strict=True
        ):
            end += count
            if sequence.matcher and samples:
                slots.append(sequence.slot)
                rows.append((sequence.matcher, plan.tokens[end - drafted : end]))
        if rows:  # none if every constrained row is a chunk of a prompt
            plan.masks = dict(zip(slots, grammars.masks(rows), strict=True))

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
            if self.lookahead and sequence.may_continue(True):
                self._await_turn(sequence)
        else:
            plan.samples.append(False)
            self._await_turn(sequence)  # the next chunk needs no result of this one
        if self.kv.caching and end // self.kv.block_size > sequence.registered:
            self.kv.register_full_blocks(sequence)

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
        elif sequence.slot >= 0 and not sequence.ready and sequence.may_continue(self.lookahead):
            self._await_turn(sequence)
        return output

    # Many steps at once

    def steady(self) -> Steady | None:
        """Decode-only rounds that can be applied at once, for simulations; None if the next step is not such a round.

        In these rounds no request is admitted, preempted or prefilled. No request ends, except in the last round if no
        step is in flight then. Every running request samples its last token again. To be called when a step can be
        scheduled.
        """
        groups, running = self._groups(), self._running.values()
        if self.speculation or not self._is_stable(groups) or not self._admits_none():
            return None
        rounds = rounds_before_end(running, self.max_model_len)
        # Tokens in flight come in addition to the tokens of the rounds. With lookahead, no step follows a request's
        # last.
        rounds -= 2 if self.lookahead else self.stages > 1
        if rounds > 0:
            rounds = rounds_with_room(running, self.kv, rounds)
        if rounds <= 0:
            return None
        return Steady(rounds, [[sequence.computed + 1 for sequence in group] for group in groups])

    def advance(self, rounds: int) -> list[str]:
        """Advance by at most the `rounds` rounds that `steady` allows. Returns the ids of the requests that have ended.

        The state becomes the same as after single steps that sample each request's last token again. The steps in
        flight stay in flight.
        """
        counters, ended = self._counters, []
        groups = self._groups()
        for group in groups:
            counters.steps += rounds
            counters.starved_steps += rounds * self._starves(len(group))
            counters.step_sizes[(len(group) - 1).bit_length()] += rounds
        counters.generation_tokens += rounds * len(self._running)
        counters.computed_tokens += rounds * len(self._running)
        for sequence in self._running.values():
            tokens = sequence.tokens
            tokens += [tokens[-1]] * rounds
        # With lookahead, the token that a step computes is still being sampled when it is scheduled.
        turns = [sequence for group in groups for sequence in group]
        self.kv.advance_in_turns(turns, rounds, unknown=int(self.lookahead))
        for sequence in self._running.values():
            if len(sequence.tokens) >= sequence.limit:
                ended.append(sequence)
        # All requests of the last step get their blocks before any request frees its own.
        for sequence in ended:
            self._finish(sequence)
        return [sequence.request.id for sequence in ended]

    def _starves(self, rows: int) -> bool:
        """Return True if a decode step of `rows` rows that admits no request would have a free slot."""
        if not self._slots or self._queue.first() is None:
            return False
        return rows < min(self.max_num_batched_tokens, -(-self.active // self.stages))

    def _groups(self) -> list[list[Sequence]]:
        """The requests of each step of a round, in the order of their turns."""
        # With lookahead there is one group, of which one step is in flight when the next one is scheduled.
        return [list(self._ready), *([] if self.lookahead else (flight.rows for flight in self._in_flight))]

    def _is_stable(self, groups: list[list[Sequence]]) -> bool:
        """Return True if every running request is in one of these groups, no group would be divided, and the steps in
        flight decode."""
        flights, sizes = self._in_flight, [len(group) for group in groups]
        if self.lookahead and (len(flights) != 1 or len(flights[0].rows) != len(self._running)):
            return False
        # A step takes a stage's share of the running requests: larger groups would be divided.
        most = min(-(-len(self._running) // self.stages), self.max_num_batched_tokens)
        whole = bool(sizes[0]) and max(sizes) <= most and sum(sizes) == len(self._running)
        return whole and decodes_only(flights)

    def _admits_none(self) -> bool:
        """Return True if no queued request can be admitted before a running one ends."""
        if not self._queue:
            return True
        first = self._queue.first()
        if first is None:
            return False
        if not self._slots:
            return True
        first.unpack_prompt()
        running = self._running.values()
        if self.kv.caching and may_share(first.tokens, running):
            return False
        freed = self.kv.freed_by_decoding(running)
        return not self.kv.has_room(first, self.kv.match_prefix(first), freed=freed)
