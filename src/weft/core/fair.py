"""FairScheduler: owners of requests share the engine in proportion to their weights.

After the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each owner's
counter grows by the tokens of its rows divided by its weight, and the owner with the lowest counter goes first. One
that comes back begins at the lowest counter of those that have work, so that nobody saves up a right to the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.core.kv import Tables
from weft.core.request import Request, queue_full_error
from weft.core.request_sets import by_order
from weft.core.scheduler import Scheduler
from weft.core.sequence import Flight, Sequence
from weft.core.step import StepPlan
from weft.core.waiting import FairQueue, Owner


class FairScheduler(Scheduler):
    """A scheduler under the policy "fair". Parameters are those of `Scheduler`.

    Three things go by the counters of the owners:

    - A prompt of the owner that was served least is computed in a step without rows of others, as if it were alone.
    - A step has at most `row_limit` rows, those of the least served owners first; the others take turns. So it stays
      short, and a prompt that comes during the step does not wait long.
    - An owner that has more rows or blocks than its share gives them up for one that has less, the youngest first, but
      for its oldest.

    Each owner may have as many requests waiting as the limit says.
    """

    _queue: FairQueue

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters | {"policy": "fcfs"})
        self._queue = FairQueue()
        self._owners = self._queue.owners
        self._floor = 0.0  # lowest counter of the owners that have work, or had it last
        self._preferred: Owner | None = None  # the only owner that takes part in the step being scheduled

    # Owners

    def _owner(self, sequence: Sequence) -> Owner:
        return self._owners[sequence.request.owner]

    def _active_owners(self) -> list[Owner]:
        """Owners that have work, the least served first."""
        return sorted((owner for owner in self._owners.values() if owner.unfinished), key=lambda owner: owner.rank)

    def add(self, request: Request, *, prepared: bool = True) -> None:
        """Queue a request, as `Scheduler.add`."""
        owner = self._owners.setdefault(request.owner, Owner())
        owner.weight = request.weight
        super().add(request, prepared=prepared)
        if not owner.unfinished:
            owner.served = max(owner.served, self._floor)
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
        super()._start_running(flight, sequence, prefix)
        self._owner(sequence).running += 1

    def _stop_running(self, sequence: Sequence) -> None:
        super()._stop_running(sequence)
        self._owner(sequence).running -= 1

    # Steps

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if nothing can run before a result or a request comes in."""
        self._give_way()
        plan, preferred = None, self._find_preferred()
        if preferred:
            self._preferred = self._queue.only = preferred
            plan = super().schedule()
            self._preferred = self._queue.only = None
        plan = plan or super().schedule()
        if plan:
            self._charge(self._in_flight[-1])
        return plan

    def _charge(self, flight: Flight) -> None:
        """Count the tokens of a step."""
        owners = self._owners
        for sequence, count in zip(flight.rows, flight.plan.counts, strict=True):
            owner = owners[sequence.request.owner]
            owner.served += count / owner.weight
        self._floor = max(self._floor, min((one.served for one in owners.values() if one.unfinished), default=0.0))

    def _beside_decodes(self, prefills: int) -> bool:
        """Return True if the step's prompts are limited: another owner's may come while it runs."""
        return len(self._owners) > 1 or super()._beside_decodes(prefills)

    def _find_preferred(self) -> Owner | None:
        """The least served owner, if it awaits a first token and others decode; else None."""
        active = self._active_owners()
        if len(active) < 2:
            return None
        first = active[0]
        awaits = len(first.queue) or any(
            not reads_answer(sequence) for sequence in self._ready if self._owner(sequence) is first
        )
        return first if awaits else None

    def _select_running(self) -> list[Sequence]:
        """Select the running requests of this step, of the least served owners first."""
        active = self._active_owners() if self._preferred is None else [self._preferred]
        places = {id(owner): place for place, owner in enumerate(active)}
        # The sort is stable: requests of an owner take turns.
        ready = sorted(
            (sequence for sequence in self._ready if id(self._owner(sequence)) in places),
            key=lambda sequence: places[id(self._owner(sequence))],
        )
        share = -(-len(self._running) // self.stages)
        count = min(len(ready), self.max_num_batched_tokens, share, max(1, self.row_limit))
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

    # Giving way

    def _give_way(self) -> None:
        """Let owners that have more than their share give up slots and blocks for the request that is next.

        Its own owner then has no more than its share. Every owner keeps its oldest request: whatever it has computed
        would be lost, and two large requests could take turns without end.
        """
        sequence = self._queue.first()
        if sequence is None:
            return
        owner = self._owner(sequence)
        active = self._active_owners()
        if len(active) < 2:
            return
        whole = sum(one.weight for one in active)
        if owner.running + 1 > max(1.0, self.max_num_seqs * owner.weight / whole):
            return
        if not self._slots:
            self._preempt_beyond(active, whole, owner)
        if self._slots and self._may_claim(sequence, owner, whole):
            while not self.kv.has_room(sequence, self.kv.match_prefix(sequence)):
                if not self._preempt_largest(owner, whole):
                    break

    def _preempt_beyond(self, active: Iterable[Owner], whole: float, owner: Owner) -> None:
        """Preempt the youngest request of the owner that has the most rows beyond its share."""
        others = [
            one for one in active if one is not owner and one.running > max(1.0, self.max_num_seqs * one.weight / whole)
        ]
        if others:
            self._preempt_youngest(max(others, key=lambda one: one.running / one.weight))

    def _preempt_youngest(self, owner: Owner) -> None:
        self._preempt(max((one for one in self._running.values() if self._owner(one) is owner), key=by_order))

    def _may_claim(self, sequence: Sequence, owner: Owner, whole: float) -> bool:
        """Return True if the blocks of a request fit into its owner's share of the cache."""
        sequence.unpack_prompt()
        needed = self.kv.layout.blocks(len(sequence.tokens) + 1)
        held = self._blocks_by_owner().get(sequence.request.owner, 0)
        return held + needed <= self.kv.num_blocks * owner.weight / whole

    def _preempt_largest(self, owner: Owner, whole: float) -> bool:
        """Preempt the youngest request of the owner that has the most blocks beyond its share; False if none has."""
        beyond = {
            number: blocks - self.kv.num_blocks * self._owners[number].weight / whole
            for number, blocks in self._blocks_by_owner().items()
            if self._owners[number] is not owner and self._owners[number].running > 1
        }
        number = max(beyond, key=beyond.__getitem__, default=None)
        if number is None or beyond[number] <= 0:
            return False
        self._preempt_youngest(self._owners[number])
        return True

    def _blocks_by_owner(self) -> dict[int, int]:
        """Blocks that each owner's running requests have; those that are shared count for each."""
        held: dict[int, int] = {}
        for sequence in self._running.values():
            number = sequence.request.owner
            held[number] = held.get(number, 0) + sum(map(len, sequence.blocks))
        return held


def reads_answer(sequence: Sequence) -> bool:
    """Return True if a running request has only the last of its tokens to compute."""
    return len(sequence.tokens) + sequence.pending - sequence.computed == 1
