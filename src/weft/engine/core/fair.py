"""FairPolicy: owners of requests share the engine in proportion to their weights.

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
from collections.abc import Iterable, Iterator, Mapping
from math import ceil, inf
from typing import NamedTuple

from weft.engine.core.kv import Tables
from weft.engine.core.policy import NOTHING_WAITS, STARVED, NextAdmission, StepOrder, by_order
from weft.engine.core.request import Request
from weft.engine.core.scheduled import StepLimits
from weft.engine.core.sequence import Flight, Sequence
from weft.engine.core.view import SchedulerView
from weft.engine.core.waiting import Owner

LOST_SHARE = 0.1  # share of all tokens that steps without some of the owners may lose (rule 4)
CREDIT_STEPS = 2.0  # largest credit of an owner, in full steps
# Share of a full step by which an owner that asked for less than its share may be served ahead of the others, so that
# a short prompt need not take turns with theirs.
AHEAD_SHARE = 0.25
NEW_SHARE = 0.25  # share of a full step: an owner is a newcomer until steps have computed this many tokens for it


class FairPolicy:
    """The policy "fair": the counters and credits of the owners. The rules are in the docstring of this module."""

    def __init__(self, view: SchedulerView) -> None:
        self._view = view
        self._floor = 0.0  # lowest counter of the owners that wait; never falls
        self._earned = 0.0  # credit that each owner has received since the start

    def place(self, request: Request) -> tuple[int, int]:
        return request.owner, 0

    def waiting(self, owner: Owner) -> int:
        return owner.unfinished - owner.running

    def owner_returns(self, owner: Owner) -> None:
        self._level(owner)
        owner.streak = 0

    def begin_step(self, limits: StepLimits) -> StepOrder:
        return FairStep(self, self._view, limits)

    def credit(self, owner: Owner) -> float:
        """Tokens that steps may lose for an owner by rule 4."""
        most = CREDIT_STEPS * self._view.settings.max_num_batched_tokens
        owner.credit = min(most, owner.credit + self._earned - owner.earned)
        owner.earned = self._earned
        return owner.credit

    def charge(self, flight: Flight, active: list[Owner]) -> None:
        """Add the tokens of a step to the counters and credits of the `active` owners."""
        for sequence, count in zip(flight.rows, flight.plan.counts, strict=True):
            owner = sequence.owner
            owner.served += count / owner.weight
            owner.streak += count
        self._earned += LOST_SHARE * len(flight.plan.tokens) / max(1, len(active))
        self._raise_counters(flight, active)

    def _raise_counters(self, flight: Flight, active: list[Owner]) -> None:
        """Raise the counters of owners that wait for nothing to about the lowest counter of the owners that wait.

        Otherwise an owner that had little to do for hours, and each newcomer with a counter as low, could block the
        others for hours. If no owner waits, all counters become about equal.
        """
        taken = set(flight.rows)
        left = {
            sequence.owner
            for sequence in self._view.table.ready
            if sequence not in taken or not _awaits_token(sequence)
        }
        waiting = [owner.served for owner in active if owner in left or len(owner.queue)]
        level = min(waiting) if waiting else max(owner.served for owner in active)
        self._floor = max(self._floor, level)
        for owner in active:
            self._level(owner)

    def _level(self, owner: Owner) -> None:
        """Raise a counter to at least AHEAD_SHARE of a full step below the lowest counter of the owners that wait."""
        ahead = AHEAD_SHARE * self._view.settings.max_num_batched_tokens / owner.weight
        owner.served = max(owner.served, self._floor - ahead)


class Candidate(NamedTuple):
    """The first waiting request of an owner, and the cached blocks of its prefix, None if there is no room for it.

    `entitled`: it is within its owner's share, if that matters. `reserved`: blocks were freed for a less served owner.
    """

    owner: Owner
    sequence: Sequence
    prefix: Tables | None
    entitled: bool
    reserved: bool

    @property
    def may_run(self) -> bool:
        """True if there is room, which is not reserved for another owner."""
        return self.prefix is not None and (self.entitled or not self.reserved)


class FairStep:
    """A step under the policy "fair", with the `active` owners, the least served first."""

    def __init__(self, policy: FairPolicy, view: SchedulerView, limits: StepLimits) -> None:
        self.newcomer_tokens = 0
        self._policy, self._view = policy, view
        owners = view.table.owners.values()
        self._active = sorted((owner for owner in owners if owner.unfinished), key=lambda owner: owner.rank)
        self._ranked = self._active  # the active owners that take part in the step
        self._whole = sum(owner.weight for owner in self._active)
        self._last: Owner | None = None  # prompts of more served owners are continued after its admissions
        self._later = False  # True while there are such prompts
        self._together = 0  # tokens of a step of all owners
        busy = min(limits.step_tokens, limits.busy_tokens)
        self._limit = limits.step_tokens if self._has_new_prompt() else busy  # on the tokens of the step
        most = busy // (2 if len(self._active) > 1 else 1)
        self._row_limit = max(1, min(view.settings.max_num_batched_tokens, most))

    def _has_new_prompt(self) -> bool:
        """Return True if a newcomer has a prompt to compute or a waiting request."""
        most = NEW_SHARE * self._view.settings.max_num_batched_tokens
        new = {owner for owner in self._active if owner.streak < most}
        if not new or any(len(owner.queue) for owner in new):
            return bool(new)
        return any(not _awaits_token(sequence) and sequence.owner in new for sequence in self._view.table.ready)

    # Undisturbed prompts

    def _narrow(self, admissible: Candidate | None) -> None:
        """Find the first owner that has a prompt to compute (the last one if none has), and limit the step to the
        owners up to it if rule 4 says so."""
        rows, prompts = self._count_ready()
        if admissible is not None and admissible.prefix is not None:
            prompts[admissible.owner] += self._uncached(admissible.sequence, admissible.prefix)
        active = self._active
        place = next((number for number, owner in enumerate(active) if prompts[owner]), len(active) - 1)
        owner, before, behind = active[place], active[: place + 1], active[place + 1 :]
        most = self._row_limit
        own = min(sum(rows[earlier] for earlier in before), most)
        decodes = own + min(sum(rows[later] for later in behind), most - own)
        prompt = prompts[owner]
        # Most prompt tokens of a step: without the owners behind, and with them.
        limit = min(self._limit, self._view.settings.max_num_batched_tokens)
        alone, shared = max(1, limit - own), max(0, limit - decodes)
        self._together = decodes + min(
            shared, prompt + sum(prompts[later] + self._admitted_tokens(later) for later in behind)
        )
        doubled = not shared or ceil(prompt / shared) * self._together > 2 * (ceil(prompt / alone) * own + prompt)
        paid = self._policy.credit(owner) >= self._together - own - min(prompt, alone)
        self._last = owner
        if behind and doubled and paid:
            self._ranked = before

    def _count_ready(self) -> tuple[Counter[Owner], Counter[Owner]]:
        """By owner, the running requests that await their next token, and the tokens of prompts still to compute."""
        rows: Counter[Owner] = Counter()
        prompts: Counter[Owner] = Counter()
        for sequence in self._view.table.ready:
            if _awaits_token(sequence):
                rows[sequence.owner] += 1
            else:
                prompts[sequence.owner] += len(sequence.tokens) + sequence.pending - sequence.computed
        return rows, prompts

    def _uncached(self, sequence: Sequence, prefix: Tables) -> int:
        """Number of a request's tokens that its cached prefix lacks."""
        return len(sequence.tokens) - len(prefix[0]) * self._view.kv.block_size

    def _admitted_tokens(self, owner: Owner) -> int:
        """Estimated tokens of an owner's waiting requests for which there are slots, without one slot."""
        sequence = owner.queue.first()
        if sequence is None:
            return 0
        return sequence.request.length * min(len(owner.queue), max(0, len(self._view.table.slots) - 1))

    def widen(self) -> bool:
        if self._ranked is self._active:
            return False
        self._ranked, self._later = self._active, False
        return True

    # Rows

    def select(self, most: int) -> list[Sequence]:
        places = {owner: place for place, owner in enumerate(self._ranked)}
        # The sort is stable: requests of an owner take turns.
        ready = sorted(
            (sequence for sequence in self._view.table.ready if sequence.owner in places),
            key=lambda sequence: places[sequence.owner],
        )
        return ready[: min(most, self._row_limit)]

    def prompt_limit(self, decodes: int, delayed: bool) -> int | None:
        # Another owner's prompt may arrive while the step runs.
        return max(1, self._limit - decodes) if delayed or len(self._view.table.owners) > 1 else None

    def split_prompts(self, prefills: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        if self._last is None:
            return prefills, []
        before = self._ranked[: self._ranked.index(self._last) + 1]
        later = [sequence for sequence in prefills if sequence.owner not in before]
        self._later = bool(later)
        return [sequence for sequence in prefills if sequence.owner in before], later

    def end(self, flight: Flight) -> None:
        if self._last is not None and self._ranked is not self._active:
            self._last.credit -= max(0, self._together - len(flight.plan.tokens))
        self._policy.charge(flight, self._active)

    # Admission

    def next_admission(self) -> NextAdmission:
        starved = False
        for candidate in self._candidates():
            starved = starved or candidate.prefix is None
            if candidate.may_run and candidate.prefix is not None:
                if len(self._active) > 1 and not candidate.owner.streak:
                    tokens = self._uncached(candidate.sequence, candidate.prefix)
                    self.newcomer_tokens = min(tokens, self.newcomer_tokens or tokens)
                return NextAdmission(candidate.sequence, candidate.prefix, starved)
        return STARVED if starved else NOTHING_WAITS

    def _candidates(self) -> Iterator[Candidate]:
        """The requests that may be admitted; the next is asked for if this request is not (rules 3 and 7).

        Blocks freed for a request that still does not fit are reserved: owners above their share cannot take them.
        """
        reserved = False
        for owner, sequence in self._waiting():
            prefix = self._fit(sequence)
            entitled = (reserved or prefix is None) and self._is_entitled(owner, sequence)
            yield Candidate(owner, sequence, prefix, entitled, reserved)
            reserved = reserved or entitled

    def _waiting(self) -> Iterator[tuple[Owner, Sequence]]:
        """The first waiting request of each owner, the least served owner first; all but the last did not fit.

        An owner may overtake a blocked owner only while its counter is at most what the blocked owner's will be after
        its request (rule 3). While prompts of more served owners wait for the admissions, only owners up to `_last` are
        considered.
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
        if not self._view.table.slots:
            return None
        prefix = self._view.kv.match_prefix(sequence)
        return prefix if self._view.kv.has_room(sequence, prefix) else None

    def _is_entitled(self, owner: Owner, sequence: Sequence) -> bool:
        """Return True if an owner is within its share of slots and blocks, this request included."""
        if owner.running + 1 > max(1.0, self._view.settings.max_num_seqs * owner.weight / self._whole):
            return False
        kv = self._view.kv
        needed = kv.layout.blocks(len(sequence.tokens) + 1)
        return self._blocks()[owner] + needed <= kv.num_blocks * owner.weight / self._whole

    def _blocks(self) -> Counter[Owner]:
        """Blocks that each owner's running requests have or are promised; shared blocks count for every request."""
        blocks: Counter[Owner] = Counter()
        for sequence in self._view.table.running.values():
            blocks[sequence.owner] += sum(map(len, sequence.blocks)) + sequence.promised
        return blocks

    # Preemption

    def claims(self) -> Iterable[Sequence]:
        """Requests of owners above their share, for requests within their owner's share (rule 7)."""
        if len(self._active) < 2:
            return
        admissible = None
        for candidate in self._candidates():
            if candidate.prefix is None and candidate.entitled:
                yield from self._claim(candidate.owner, candidate.sequence)
                candidate = candidate._replace(prefix=self._fit(candidate.sequence))
            if candidate.may_run:
                admissible = candidate
                break
        self._narrow(admissible)

    def _claim(self, owner: Owner, sequence: Sequence) -> Iterator[Sequence]:
        """Requests of more served owners to preempt until an owner's request fits, or as long as there are some.

        Every owner keeps its oldest request: otherwise two large requests could preempt each other without end, each
        time losing all that was computed.
        """
        view, behind = self._view, self._active[self._active.index(owner) + 1 :]
        if not view.table.slots:
            rows = {later: later.running for later in behind}
            victim = self._victim_for(owner, behind, rows, view.settings.max_num_seqs)
            if victim is None:
                return
            yield victim
        while self._fit(sequence) is None:
            victim = self._victim_for(owner, behind, self._blocks(), view.kv.num_blocks)
            if victim is None:
                return
            yield victim

    def _victim_for(
        self, owner: Owner, behind: list[Owner], counts: Mapping[Owner, int], total: int
    ) -> Sequence | None:
        """The request to preempt for an owner; None if there is none, or if the loss is too large.

        For an owner with running requests, its counter must be lower than the victim owner's by at least the tokens
        that are lost. Otherwise two owners would preempt each other with every step that changes their order.
        """
        victim = self._youngest_beyond(behind, counts, total)
        if victim is None or not owner.running:
            return victim
        lost = len(victim.tokens) / victim.owner.weight
        return victim if victim.owner.served >= owner.served + lost else None

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
        running = self._view.table.running.values()
        return max((sequence for sequence in running if sequence.owner is largest), key=by_order)

    def victim(self) -> Sequence:
        """The youngest request of the owner furthest above its share of blocks; else the youngest of all requests."""
        beyond = self._youngest_beyond(self._active, self._blocks(), self._view.kv.num_blocks)
        return beyond or max(self._view.table.running.values(), key=by_order)


def _awaits_token(sequence: Sequence) -> bool:
    """Return True for a running request that decodes, False if part of its prompt is still to be computed."""
    known = len(sequence.tokens) + sequence.pending
    return known - sequence.computed == 1 and known > sequence.first
