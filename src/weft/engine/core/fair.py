"""FairScheduler: owners of requests share the engine in proportion to their weights.

After the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Terms:

- Owner: a client of the engine. Its requests have one weight. An owner with unfinished requests is active.
- Virtual counter (`Owner.served`): the tokens that steps computed for an owner, divided by its weight. "Less served"
  means: with a lower counter.
- Share: an owner's weight divided by the weight of all active owners, as a part of the slots or of the KV blocks.
- Newcomer: an active owner for which steps have computed fewer than NEW_SHARE of the tokens of a full step since it
  last was inactive.
- Credit: tokens that steps may still lose for an owner by rule 4.

Rules:

1. Order: the less served owner goes first, both when prompts are computed and when requests are admitted.
2. No savings: when an owner becomes active, or while it waits for nothing, its counter is raised to AHEAD_SHARE of a
   full step below the lowest counter of the owners that wait.
3. Overtaking: if the next request of an owner does not fit, other owners go ahead of it only while their counters are
   at most what its counter will be after that request.
4. Undisturbed prompts: a prompt is computed without the rows of more served owners if steps with these rows would
   compute at least twice the tokens until the prompt ends. Such steps may lose LOST_SHARE of all tokens in total.
5. Step size: a step has at most `busy_limit` tokens, so that requests that arrive during it wait only briefly. A step
   with a newcomer's prompt has at most `step_limit`, so that this prompt takes as few steps as it would alone.
6. Rows: a step has at most `busy_limit` rows, and half as many if several owners are active. Rows of less served owners
   come first; the rows that are left out take turns.
7. Preemption: an owner above its share of slots or blocks gives them up for an owner within its share. Its youngest
   request is preempted first, and its oldest never. If the running requests need more blocks than there are, the owner
   that is furthest above its share is preempted first.
8. Queue: each owner may have `max_num_queued` waiting requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import ceil, inf
from typing import Any

from weft.engine.core.kv import Tables
from weft.engine.core.request import Request, queue_full_error
from weft.engine.core.request_sets import by_order
from weft.engine.core.scheduler import Scheduler
from weft.engine.core.sequence import Flight, Sequence
from weft.engine.core.step import StepPlan
from weft.engine.core.waiting import FairQueue, Owner

LOST_SHARE = 0.1  # share of all tokens that steps without some of the owners may lose (rule 4)
CREDIT_STEPS = 2.0  # largest credit of an owner, in full steps
# Share of a full step by which an owner that asked for less than its share may be served ahead of the others, so that
# a short prompt need not take turns with theirs.
AHEAD_SHARE = 0.25
NEW_SHARE = 0.25  # share of a full step: an owner is a newcomer until steps have computed this many tokens for it


class FairScheduler(Scheduler):
    """A scheduler under the policy "fair". It takes the parameters of `Scheduler`.

    The rules are in the docstring of this module.
    """

    _queue: FairQueue

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters | {"policy": "fcfs"})
        self._queue = FairQueue()
        self._owners = self._queue.owners
        self._floor = 0.0  # lowest counter of the owners that wait; never falls
        self._earned = 0.0  # credit that each owner has received since the start
        # State of the step that is being scheduled:
        self._active: list[Owner] = []  # active owners, the least served first
        self._ranked: list[Owner] = []  # the active owners that take part in the step
        self._whole = 0.0  # weight of all active owners
        self._last: Owner | None = None  # prompts of more served owners are continued after its admissions
        self._later: list[Sequence] = []  # requests of more served owners, with prompts to compute
        self._limit = self.step_limit  # on the tokens of the step

    # Owners

    def _owner(self, sequence: Sequence) -> Owner:
        return self._owners[sequence.request.owner]

    def add(self, request: Request, *, prepared: bool = True) -> None:
        """Queue a request, as `Scheduler.add`."""
        owner = self._owners.setdefault(request.owner, Owner())
        owner.weight = request.weight
        super().add(request, prepared=prepared)
        if not owner.unfinished:
            self._level(owner)
            owner.streak = 0
        owner.unfinished += 1

    def _check_queue(self, request: Request) -> None:
        owner = self._owners[request.owner]
        waiting = owner.unfinished - owner.running
        if waiting >= self.max_num_queued + len(self._slots):
            raise queue_full_error(waiting, self.max_num_queued)

    def _finish(self, sequence: Sequence) -> None:
        super()._finish(sequence)
        self._owner(sequence).unfinished -= 1

    def _start_running(self, flight: Flight, sequence: Sequence, prefix: Tables) -> None:
        owner = self._owner(sequence)
        if len(self._active) > 1 and not owner.streak:
            tokens = len(sequence.tokens) - len(prefix[0]) * self.kv.block_size
            self.newcomer_tokens = min(tokens, self.newcomer_tokens or tokens)
        super()._start_running(flight, sequence, prefix)
        owner.running += 1

    def _stop_running(self, sequence: Sequence) -> None:
        super()._stop_running(sequence)
        self._owner(sequence).running -= 1

    # Steps

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if nothing can run before a result or a request arrives."""
        active = sorted((owner for owner in self._owners.values() if owner.unfinished), key=lambda owner: owner.rank)
        self._active = self._ranked = active
        self._whole, self._last = sum(owner.weight for owner in active), None
        self._limit = self.step_limit if self._has_new_prompt() else min(self.step_limit, self.busy_limit)
        self.newcomer_tokens = 0
        plan = None
        if len(active) > 1:
            place, together = self._find_place(self._find_next(claims=True))
            self._last = active[place]
            if together:
                self._ranked = active[: place + 1]
                plan = super().schedule()
                self._ranked = active
                if plan:
                    self._last.credit -= max(0, together - len(plan.tokens))
        plan = plan or super().schedule()
        if plan:
            self._charge(self._in_flight[-1], len(active))
        return plan

    def _has_new_prompt(self) -> bool:
        """Return True if a newcomer has a prompt to compute or a waiting request."""
        most = NEW_SHARE * self.max_num_batched_tokens
        new = {owner for owner in self._active if owner.streak < most}
        if not new or any(len(owner.queue) for owner in new):
            return bool(new)
        return any(not _awaits_token(sequence) and self._owner(sequence) in new for sequence in self._ready)

    def _charge(self, flight: Flight, active: int) -> None:
        """Add the tokens of a step to the counters and credits, with this number of `active` owners."""
        owners = self._owners
        for sequence, count in zip(flight.rows, flight.plan.counts, strict=True):
            owner = owners[sequence.request.owner]
            owner.served += count / owner.weight
            owner.streak += count
        self._earned += LOST_SHARE * len(flight.plan.tokens) / max(1, active)
        self._raise_counters(flight)

    def _raise_counters(self, flight: Flight) -> None:
        """Raise the counters of owners that wait for nothing to about the lowest counter of the owners that wait.

        Otherwise an owner that had little to do for hours, and each newcomer with a counter as low, could block the
        others for hours. If no owner waits, all counters become about equal.
        """
        taken = set(map(id, flight.rows))
        left = {
            self._owner(sequence)
            for sequence in self._ready
            if id(sequence) not in taken or not _awaits_token(sequence)
        }
        waiting = [owner.served for owner in self._active if owner in left or len(owner.queue)]
        level = min(waiting) if waiting else max(owner.served for owner in self._active)
        self._floor = max(self._floor, level)
        for owner in self._active:
            self._level(owner)

    def _level(self, owner: Owner) -> None:
        """Raise a counter to at least AHEAD_SHARE of a full step below the lowest counter of the owners that wait."""
        owner.served = max(owner.served, self._floor - AHEAD_SHARE * self.max_num_batched_tokens / owner.weight)

    def _credit(self, owner: Owner) -> float:
        """Tokens that steps may lose for an owner by rule 4."""
        most = CREDIT_STEPS * self.max_num_batched_tokens
        owner.credit = min(most, owner.credit + self._earned - owner.earned)
        owner.earned = self._earned
        return owner.credit

    def _delays_decodes(self, prefills: int) -> bool:
        """Return True if the prompts of the step are limited: another owner's prompt may arrive while the step runs."""
        return len(self._owners) > 1 or super()._delays_decodes(prefills)

    @property
    def _row_limit(self) -> int:
        """Most rows of a step."""
        most = min(self.step_limit, self.busy_limit) // (2 if len(self._active) > 1 else 1)
        return max(1, min(self.max_num_batched_tokens, most))

    def _limit_prompts(self, budget: int, decodes: int) -> int:
        """Prompt tokens, at most `budget`, that a step may have in addition to this number of decode tokens."""
        return min(budget, max(1, self._limit - decodes))

    def _find_place(self, admissible: tuple[Sequence, Tables] | None) -> tuple[int, int]:
        """Place of the first owner that has a prompt to compute (the last place if none has), and a number of tokens.

        If the step is limited to the owners up to this place, by rule 4, the number is the tokens that a step of all
        owners would have; else it is 0.
        """
        rows, prompts = self._count_ready()
        if admissible is not None:
            sequence, prefix = admissible
            prompts[self._owner(sequence)] += len(sequence.tokens) - len(prefix[0]) * self.kv.block_size
        place = next((number for number, owner in enumerate(self._ranked) if prompts[owner]), len(self._ranked) - 1)
        owner, before, behind = self._ranked[place], self._ranked[: place + 1], self._ranked[place + 1 :]
        most = self._row_limit
        own = min(sum(rows[earlier] for earlier in before), most)
        decodes = own + min(sum(rows[later] for later in behind), most - own)
        prompt = prompts[owner]
        # Most prompt tokens of a step: without the owners behind, and with them.
        alone = max(1, min(self._limit, self.max_num_batched_tokens) - own)
        shared = max(0, min(self._limit, self.max_num_batched_tokens) - decodes)
        together = decodes + min(
            shared, prompt + sum(prompts[later] + self._admitted_tokens(later) for later in behind)
        )
        doubled = not shared or ceil(prompt / shared) * together > 2 * (ceil(prompt / alone) * own + prompt)
        paid = self._credit(owner) >= together - own - min(prompt, alone)
        return place, together if behind and doubled and paid else 0

    def _count_ready(self) -> tuple[Counter[Owner], Counter[Owner]]:
        """By owner, the running requests that await their next token, and the tokens of prompts still to compute."""
        rows: Counter[Owner] = Counter()
        prompts: Counter[Owner] = Counter()
        for sequence in self._ready:
            if _awaits_token(sequence):
                rows[self._owner(sequence)] += 1
            else:
                prompts[self._owner(sequence)] += len(sequence.tokens) + sequence.pending - sequence.computed
        return rows, prompts

    def _admitted_tokens(self, owner: Owner) -> int:
        """Estimated tokens of an owner's waiting requests for which there are slots, without one slot."""
        sequence = owner.queue.first()
        return 0 if sequence is None else sequence.request.length * min(len(owner.queue), max(0, len(self._slots) - 1))

    def _select_running(self) -> list[Sequence]:
        """Select the running requests of this step; the least served owners come first."""
        selected: list[Sequence] = []
        # Repeat if all selected requests had to give up their blocks: others can run.
        while not selected and (ready := self._ready_by_owner()):
            share = -(-len(self._running) // self.stages)
            count = min(len(ready), share, self._row_limit)
            selected = ready[:count]
            chosen = set(map(id, selected))
            left = [sequence for sequence in self._ready if id(sequence) not in chosen]
            self._ready.clear()
            self._ready.extend(left)
            for sequence in selected:
                sequence.ready = False
                if self.kv.frees:
                    self.kv.free_behind(sequence, sequence.computed)
            if self.kv.free_columns < count:
                self._make_room(selected)
        return selected

    def _ready_by_owner(self) -> list[Sequence]:
        """The requests that await their turn, of the owners that take part; the least served owners come first."""
        places = {owner: place for place, owner in enumerate(self._ranked)}
        # The sort is stable: requests of an owner take turns.
        return sorted(
            (sequence for sequence in self._ready if self._owner(sequence) in places),
            key=lambda sequence: places[self._owner(sequence)],
        )

    def _continue_prefills(self, flight: Flight, prefills: list[Sequence], budget: int) -> int:
        """Add chunks of prompts, except prompts that come after the waiting requests of less served owners."""
        first = prefills
        if self._last in self._ranked:
            before = self._ranked[: self._ranked.index(self._last) + 1]
            first = [sequence for sequence in prefills if self._owner(sequence) in before]
            self._later = [sequence for sequence in prefills if self._owner(sequence) not in before]
        budget = super()._continue_prefills(flight, first, budget)
        return budget if self._queue else self._continue_later(flight, budget)

    def _admit(self, flight: Flight, budget: int, delays_decodes: bool) -> int:
        """Admit waiting requests, then continue the prompts that come after them."""
        return self._continue_later(flight, super()._admit(flight, budget, delays_decodes))

    def _continue_later(self, flight: Flight, budget: int) -> int:
        later, self._later = self._later, []
        return super()._continue_prefills(flight, later, max(0, budget)) if later else budget

    # Admission

    def _find_admissible(self) -> tuple[Sequence, Tables] | None:
        """The request to admit next, with the cached blocks of its prefix.

        While prompts of more served owners wait in `_later`, only owners up to `_last` are considered.
        """
        return self._find_next(claims=False)

    def _find_next(self, *, claims: bool) -> tuple[Sequence, Tables] | None:
        """The request to admit next, with the cached blocks of its prefix; None if no request fits.

        With `claims`, owners above their share are preempted for requests within their owner's share (rule 7). Blocks
        freed for a request that still does not fit are reserved: owners above their share cannot take them.
        """
        reserved = False
        for owner, sequence in self._waiting():
            prefix = self._fit(sequence)
            entitled = (reserved or prefix is None) and self._is_entitled(owner, sequence)
            if prefix is None and entitled and claims and self._claim(owner, sequence):
                prefix = self._fit(sequence)
            if prefix is not None and (entitled or not reserved):
                return sequence, prefix
            reserved = reserved or entitled
        return None

    def _waiting(self) -> Iterator[tuple[Owner, Sequence]]:
        """The first waiting request of each owner, the least served owner first; all but the last did not fit.

        An owner may overtake a blocked owner only while its counter is at most what the blocked owner's will be after
        its request (rule 3).
        """
        most = inf
        for owner in self._ranked:
            if owner.served > most:
                return
            sequence = owner.queue.first()
            if sequence is not None:
                sequence.unpack_prompt()
                yield owner, sequence
                most = min(most, owner.served + len(sequence.tokens) / owner.weight)
            if self._later and owner is self._last:
                return

    def _fit(self, sequence: Sequence) -> Tables | None:
        """Cached blocks of a request's prefix; None if the request cannot be admitted now."""
        if not self._slots:
            return None
        prefix = self.kv.match_prefix(sequence)
        return prefix if self._has_room(sequence, prefix) else None

    def _is_entitled(self, owner: Owner, sequence: Sequence) -> bool:
        """Return True if an owner is within its share of slots and blocks, this request included."""
        if owner.running + 1 > max(1.0, self.max_num_seqs * owner.weight / self._whole):
            return False
        needed = self.kv.layout.blocks(len(sequence.tokens) + 1)
        return self._blocks()[owner] + needed <= self.kv.num_blocks * owner.weight / self._whole

    def _blocks(self) -> Counter[Owner]:
        """Blocks that each owner's running requests have or are promised; shared blocks count for every request."""
        blocks: Counter[Owner] = Counter()
        for sequence in self._running.values():
            blocks[self._owner(sequence)] += sum(map(len, sequence.blocks)) + sequence.promised
        return blocks

    # Preemption

    def _claim(self, owner: Owner, sequence: Sequence) -> bool:
        """Preempt requests of more served owners for an owner's request; return True if it fits then.

        Every owner keeps its oldest request: otherwise two large requests could preempt each other without end, each
        time losing all that was computed.
        """
        behind = self._ranked[self._ranked.index(owner) + 1 :]
        if not self._slots:
            rows = Counter({later: later.running for later in behind})
            if not self._preempt_for(owner, self._youngest_beyond(behind, rows, self.max_num_seqs)):
                return False
        while self._fit(sequence) is None:
            if not self._preempt_for(owner, self._youngest_beyond(behind, self._blocks(), self.kv.num_blocks)):
                return False
        return True

    def _youngest_beyond(self, owners: list[Owner], counts: Mapping[Owner, int], total: int) -> Sequence | None:
        """The youngest request of the owner that is furthest above its share of `total`; None if no owner is above.

        Owners with a single running request are left out. `counts` are slots or blocks.
        """
        beyond = {
            owner: counts[owner] - total * owner.weight / self._whole
            for owner in owners
            if owner.running > 1 and counts[owner] > total * owner.weight / self._whole
        }
        if not beyond:
            return None
        largest = max(beyond, key=beyond.__getitem__)
        return max((running for running in self._running.values() if self._owner(running) is largest), key=by_order)

    def _preempt_for(self, owner: Owner, victim: Sequence | None) -> bool:
        """Preempt `victim` for a request of `owner`. Return False if there is no victim, or the loss is too large.

        For an owner with running requests, its counter must be lower than the victim owner's by at least the tokens
        that are lost. Otherwise two owners would preempt each other with every step that changes their order.
        """
        if victim is None:
            return False
        loser = self._owner(victim)
        if owner.running and loser.served < owner.served + len(victim.tokens) / loser.weight:
            return False
        self._preempt(victim)
        return True

    def _find_victim(self) -> Sequence:
        """The youngest request of the owner furthest above its share of blocks; else the youngest of all requests."""
        return self._youngest_beyond(self._active, self._blocks(), self.kv.num_blocks) or super()._find_victim()


def _awaits_token(sequence: Sequence) -> bool:
    """Return True for a running request that decodes, False if part of its prompt is still to be computed."""
    known = len(sequence.tokens) + sequence.pending
    return known - sequence.computed == 1 and known > sequence.first
