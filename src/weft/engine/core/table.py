"""RequestTable: the requests of a scheduler by state: waiting, running, ready for a step, in a step."""

from __future__ import annotations

from collections import deque

from weft.engine.core.sequence import Flight, Sequence
from weft.engine.core.waiting import Owner


class RequestTable:
    """The requests that a scheduler has accepted and that have not ended, and the slots of the running ones.

    Only the scheduler changes it. A waiting request is in the queue of its owner, or `unprepared`: its adapter or
    grammar is not ready yet. `ready` are the running requests with something to compute, longest idle first. `pooling`
    are pooling requests without slot and blocks: the step that ends their prompts, their last step, is in flight.
    `released` are the slots that the ranks do not know to be free yet.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.unfinished: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self.ready: deque[Sequence] = deque()
        self.pooling: set[str] = set()
        self.unprepared: dict[str, Sequence] = {}
        self.owners: dict[int, Owner] = {}
        self.slots = list(range(max_num_seqs - 1, -1, -1))
        self.released: list[int] = []
        self.in_flight: deque[Flight] = deque()

    @property
    def waiting(self) -> int:
        """Number of waiting requests, prepared or not."""
        return len(self.unfinished) - len(self.running) - len(self.pooling)

    @property
    def queued(self) -> int:
        """Number of waiting requests that are prepared."""
        return self.waiting - len(self.unprepared)

    @property
    def active(self) -> int:
        """Number of requests that run, plus those waiting that are prepared and for which a slot is free."""
        return len(self.running) + min(self.queued, len(self.slots))

    @property
    def decodes(self) -> bool:
        """True if a running request awaits its next token."""
        if len(self.running) > len(self.ready):
            return True
        return any(len(sequence.tokens) + sequence.pending - sequence.computed == 1 for sequence in self.ready)

    def turns(self, *, lookahead: bool) -> list[list[Sequence]]:
        """The requests of each step of the next round, in the order of their turns, if all running requests decode.

        A round is one step of every group of requests that take turns in the pipeline stages; without a pipeline, it is
        one step.
        """
        # With lookahead there is one group, of which one step is in flight when the next one is scheduled.
        return [list(self.ready), *([] if lookahead else (flight.rows for flight in self.in_flight))]

    # From waiting to running

    def add(self, sequence: Sequence, *, prepared: bool) -> None:
        """Let a new request wait."""
        self.unfinished[sequence.request.id] = sequence
        sequence.owner.unfinished += 1
        if prepared:
            sequence.owner.queue.push(sequence)
        else:
            self.unprepared[sequence.request.id] = sequence

    def start(self, sequence: Sequence) -> None:
        """Let the first request of its owner's queue run: it takes a slot."""
        sequence.owner.queue.pop()
        sequence.owner.running += 1
        sequence.slot = self.slots.pop()
        self.running[sequence.request.id] = sequence

    def await_turn(self, sequence: Sequence) -> None:
        """Make a running request ready, unless it is."""
        if not sequence.ready:
            sequence.ready = True
            self.ready.append(sequence)

    def take(self, selected: list[Sequence]) -> None:
        """Remove the requests of a step from the ready ones."""
        ready = self.ready
        for sequence in selected:
            sequence.ready = False
        left = [] if len(selected) == len(ready) else [sequence for sequence in ready if sequence.ready]
        ready.clear()
        ready.extend(left)

    # To the end

    def stop(self, sequence: Sequence) -> None:
        """Release a running request's slot."""
        del self.running[sequence.request.id]
        sequence.owner.running -= 1
        self.released.append(sequence.slot)
        self.slots.append(sequence.slot)
        sequence.slot = -1
        if sequence.ready:
            sequence.ready = False
            self.ready.remove(sequence)

    def end(self, sequence: Sequence) -> None:
        """Forget a request, which has no slot. The caller removes it from its queue."""
        sequence.done = True
        sequence.owner.unfinished -= 1
        id = sequence.request.id
        del self.unfinished[id]
        self.pooling.discard(id)
        self.unprepared.pop(id, None)
