"""FairScheduler: owners of requests share the engine in proportion to their weights.

After the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each owner's
counter grows by the tokens of its rows divided by its weight, and the owner with the lowest counter goes first. One
that comes back, or that gets all that it asks for, has at least the lowest counter of those that wait, so that nobody
saves up a right to the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import ceil, inf
from typing import Any

from weft.core.kv import Tables
from weft.core.request import Request, queue_full_error
from weft.core.request_sets import by_order
from weft.core.scheduler import Scheduler
from weft.core.sequence import Flight, Sequence
from weft.core.step import StepPlan
from weft.core.waiting import FairQueue, Owner

LOST_SHARE = 0.1  # share of all tokens, those that steps without some of the owners may lose
CREDIT_STEPS = 2.0  # what an owner may lose at once, in steps of the most tokens
# Share of the most tokens of a step: what an owner that has asked for less than its share may be served ahead of the
# others, so that a short prompt need not take turns with theirs.
AHEAD_SHARE = 0.25
NEW_SHARE = 0.25  # share of the most tokens of a step: until an owner has had so many in a row, it is a newcomer


class FairScheduler(Scheduler):
    """A scheduler under the policy "fair". Parameters are those of `Scheduler`.

    Four things go by the counters of the owners:

    - Prompts are computed, and requests admitted, for the least served owners first. An owner is passed over while
      there is no room for its next request, until the one that passes has been served as much as that request takes.
    - A prompt that beside the rows of more served owners would take twice the tokens of a step, or more, is computed
      without these rows. An owner has a credit for what such steps lose: in all, LOST_SHARE of the tokens.
    - A step has at most `busy_limit` tokens, so that prompts that come during it do not wait long. With a prompt of a
      newcomer it has at most `step_limit`: such a prompt is computed in as few steps as alone. An owner is a newcomer
      until its steps have had NEW_SHARE of the most tokens since it last had nothing to do. Rows are at most as many as
      `busy_limit`, those of the least served owners first, and half as many if several owners have work; the others
      take turns.
    - An owner that has more rows or blocks than its share gives them up for one that has less, the youngest first, but
      for its oldest. It also is the first to give up blocks when the running requests need more than there are.

    Each owner may have as many requests waiting as the limit says.
    """

    _queue: FairQueue

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters | {"policy": "fcfs"})
        self._queue = FairQueue()
        self._owners = self._queue.owners
        self._floor = 0.0  # lowest counter of an owner that has work
        self._earned = 0.0  # credit of an owner since the start
        # State of the step that is being scheduled:
        self._active: list[Owner] = []  # owners with work, the least served first
        self._ranked: list[Owner] = []  # of these, the ones that take part
        self._whole = 0.0  # weight of all owners with work
        self._last: Owner | None = None  # owners behind it get what its waiting requests leave
        self._later: list[Sequence] = []  # their requests with prompts to compute
        self._limit = self.step_limit  # on its tokens

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
        """Return the next step, or None if nothing can run before a result or a request comes in."""
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
        """Return True if a newcomer has a prompt to compute, or a request that waits."""
        most = NEW_SHARE * self.max_num_batched_tokens
        new = {owner for owner in self._active if owner.streak < most}
        if not new or any(len(owner.queue) for owner in new):
            return bool(new)
        return any(not _awaits_token(sequence) and self._owner(sequence) in new for sequence in self._ready)

    def _charge(self, flight: Flight, active: int) -> None:
        """Count the tokens of a step, while so many owners have work."""
        owners = self._owners
        for sequence, count in zip(flight.rows, flight.plan.counts, strict=True):
            owner = owners[sequence.request.owner]
            owner.served += count / owner.weight
            owner.streak += count
        self._earned += LOST_SHARE * len(flight.plan.tokens) / max(1, active)
        self._raise_counters(flight)

    def _raise_counters(self, flight: Flight) -> None:
        """Raise the counters of owners that get all that they ask for to about the lowest one of those that wait.

        With a much lower one, an owner that has had little to do for hours could keep others from the engine for hours,
        and so could each newcomer beside it. If nobody waits, all become about equal.
        """
        taken = set(map(id, flight.rows))
        left = {self._owner(one) for one in self._ready if id(one) not in taken or not _awaits_token(one)}
        waiting = [owner.served for owner in self._active if owner in left or len(owner.queue)]
        level = min(waiting) if waiting else max(owner.served for owner in self._active)
        self._floor = max(self._floor, level)
        for owner in self._active:
            self._level(owner)

    def _level(self, owner: Owner) -> None:
        """Raise a counter that is more than AHEAD_SHARE below the lowest one of the owners that have work."""
        owner.served = max(owner.served, self._floor - AHEAD_SHARE * self.max_num_batched_tokens / owner.weight)

    def _credit(self, owner: Owner) -> float:
        """Tokens that steps may lose for an owner's sake."""
        most = CREDIT_STEPS * self.max_num_batched_tokens
        owner.credit = min(most, owner.credit + self._earned - owner.earned)
        owner.earned = self._earned
        return owner.credit

    def _beside_decodes(self, prefills: int) -> bool:
        """Return True if the step's prompts are limited: another owner's may come while it runs."""
        return len(self._owners) > 1 or super()._beside_decodes(prefills)

    @property
    def _row_limit(self) -> int:
        """Most rows of a step."""
        most = min(self.step_limit, self.busy_limit) // (2 if len(self._active) > 1 else 1)
        return max(1, min(self.max_num_batched_tokens, most))

    def _limit_prompts(self, budget: int, decodes: int) -> int:
        """The prompt tokens, at most `budget`, that a step may have beside the tokens of so many answers."""
        return min(budget, max(1, self._limit - decodes))

    def _find_place(self, admissible: tuple[Sequence, Tables] | None) -> tuple[int, int]:
        """Place of the first owner that has a prompt to compute; the last place if none has.

        Second, the tokens of a step of all owners if the step is to be one of the owners up to this place, else 0. It
        is if steps of all owners would compute twice as many tokens until the end of the prompt, or more.
        """
        rows, prompts = self._count_ready()
        if admissible is not None:
            sequence, prefix = admissible
            prompts[self._owner(sequence)] += len(sequence.tokens) - len(prefix[0]) * self.kv.block_size
        place = next((number for number, owner in enumerate(self._ranked) if prompts[owner]), len(self._ranked) - 1)
        owner, before, behind = self._ranked[place], self._ranked[: place + 1], self._ranked[place + 1 :]
        most = self._row_limit
        own = min(sum(rows[one] for one in before), most)
        decodes = own + min(sum(rows[one] for one in behind), most - own)
        prompt = prompts[owner]
        # Most tokens of prompts in a step: without the owners behind, and with them.
        alone = max(1, min(self._limit, self.max_num_batched_tokens) - own)
        beside = max(0, min(self._limit, self.max_num_batched_tokens) - decodes)
        together = decodes + min(beside, prompt + sum(prompts[one] + self._admitted_tokens(one) for one in behind))
        doubled = not beside or ceil(prompt / beside) * together > 2 * (ceil(prompt / alone) * own + prompt)
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
        """About the tokens of an owner's waiting requests for which there are slots, but for one."""
        sequence = owner.queue.first()
        return 0 if sequence is None else sequence.request.length * min(len(owner.queue), max(0, len(self._slots) - 1))

    def _select_running(self) -> list[Sequence]:
        """Select the running requests of this step, of the least served owners first."""
        selected: list[Sequence] = []
        # Again if all that were selected have given up their blocks: others can go on.
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
        """The requests that await their turn, of the owners that take part: those of the least served first."""
        places = {owner: place for place, owner in enumerate(self._ranked)}
        # The sort is stable: requests of an owner take turns.
        return sorted(
            (sequence for sequence in self._ready if self._owner(sequence) in places),
            key=lambda sequence: places[self._owner(sequence)],
        )

    def _continue_prefills(self, flight: Flight, prefills: list[Sequence], budget: int) -> int:
        """Add chunks of prompts, but for those before which waiting requests of less served owners go."""
        first = prefills
        if self._last in self._ranked:
            before = self._ranked[: self._ranked.index(self._last) + 1]
            first = [sequence for sequence in prefills if self._owner(sequence) in before]
            self._later = [sequence for sequence in prefills if self._owner(sequence) not in before]
        budget = super()._continue_prefills(flight, first, budget)
        return budget if self._queue else self._continue_later(flight, budget)

    def _admit(self, flight: Flight, budget: int, beside_decodes: bool) -> int:
        """Admit waiting requests, and go on with the prompts that had to wait for them."""
        return self._continue_later(flight, super()._admit(flight, budget, beside_decodes))

    def _continue_later(self, flight: Flight, budget: int) -> int:
        later, self._later = self._later, []
        return super()._continue_prefills(flight, later, max(0, budget)) if later else budget

    # Admission

    def _find_admissible(self) -> tuple[Sequence, Tables] | None:
        """The request to admit next, with the cached blocks of its prefix.

        While prompts of more served owners wait for them, those of owners up to `_last` only.
        """
        return self._find_next(claims=False)

    def _find_next(self, *, claims: bool) -> tuple[Sequence, Tables] | None:
        """The request to admit next, with the cached blocks of its prefix; None if there is room for none.

        With `claims`, requests that are within their owners' shares get room from owners that are beyond theirs. Room
        that was given up for one that still has none is kept from owners beyond their share.
        """
        kept = False
        for owner, sequence in self._waiting():
            prefix = self._fit(sequence)
            entitled = (kept or prefix is None) and self._is_entitled(owner, sequence)
            if prefix is None and entitled and claims and self._claim(owner, sequence):
                prefix = self._fit(sequence)
            if prefix is not None and (entitled or not kept):
                return sequence, prefix
            kept = kept or entitled
        return None

    def _waiting(self) -> Iterator[tuple[Owner, Sequence]]:
        """The first waiting request of each owner, the least served first; each but the last one had no room.

        Owners that have been served more than one before them will have been after its request do not pass it.
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
        """Cached blocks of a request's prefix; None if it cannot be admitted now."""
        if not self._slots:
            return None
        prefix = self.kv.match_prefix(sequence)
        return prefix if self._has_room(sequence, prefix) else None

    def _is_entitled(self, owner: Owner, sequence: Sequence) -> bool:
        """Return True if an owner has no more than its share of slots and blocks, this request included."""
        if owner.running + 1 > max(1.0, self.max_num_seqs * owner.weight / self._whole):
            return False
        needed = self.kv.layout.blocks(len(sequence.tokens) + 1)
        return self._blocks()[owner] + needed <= self.kv.num_blocks * owner.weight / self._whole

    def _blocks(self) -> Counter[Owner]:
        """Blocks that each owner's running requests have or are promised; those that are shared count for each."""
        held: Counter[Owner] = Counter()
        for sequence in self._running.values():
            held[self._owner(sequence)] += sum(map(len, sequence.blocks)) + sequence.promised
        return held

    # Giving way

    def _claim(self, owner: Owner, sequence: Sequence) -> bool:
        """Let owners behind this one give up slots and blocks for its request; return True if that has room then.

        Every owner keeps its oldest request: whatever it has computed would be lost, and two large requests could take
        turns without end.
        """
        behind = self._ranked[self._ranked.index(owner) + 1 :]
        if not self._slots:
            rows = Counter({one: one.running for one in behind})
            if not self._preempt_for(owner, self._youngest_beyond(behind, rows, self.max_num_seqs)):
                return False
        while self._fit(sequence) is None:
            if not self._preempt_for(owner, self._youngest_beyond(behind, self._blocks(), self.kv.num_blocks)):
                return False
        return True

    def _youngest_beyond(self, owners: list[Owner], held: Mapping[Owner, int], total: int) -> Sequence | None:
        """The youngest request of the owner that holds the most beyond its share of a `total`, if it has others."""
        beyond = {
            owner: held[owner] - total * owner.weight / self._whole
            for owner in owners
            if owner.running > 1 and held[owner] > total * owner.weight / self._whole
        }
        if not beyond:
            return None
        largest = max(beyond, key=beyond.__getitem__)
        return max((one for one in self._running.values() if self._owner(one) is largest), key=by_order)

    def _preempt_for(self, owner: Owner, victim: Sequence | None) -> bool:
        """Preempt a request for one of an owner; False if there is none, or if the other owner would lose too much.

        An owner without a running request does not wait. Others wait until they have been served less by what is lost,
        or two owners would preempt each other with every step that changes their order.
        """
        if victim is None:
            return False
        other = self._owner(victim)
        if owner.running and other.served < owner.served + len(victim.tokens) / other.weight:
            return False
        self._preempt(victim)
        return True

    def _find_victim(self) -> Sequence:
        """The youngest request of the owner with the most blocks beyond its share; the youngest of all if none has."""
        return self._youngest_beyond(self._active, self._blocks(), self.kv.num_blocks) or super()._find_victim()


def _awaits_token(sequence: Sequence) -> bool:
    """Return True for a running request that awaits its next token, False for one with a prompt still to compute."""
    known = len(sequence.tokens) + sequence.pending
    return known - sequence.computed == 1 and known > sequence.first
