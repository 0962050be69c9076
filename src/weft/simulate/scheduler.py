"""StretchScheduler: the real scheduler, which can also take many rounds with an unchanged batch at once."""

from __future__ import annotations

from weft.core.request import Output
from weft.core.scheduler import Scheduler
from weft.core.sequence import Sequence
from weft.core.step import StepPlan, StepResult


class StretchScheduler(Scheduler):
    """A scheduler that can advance by rounds.

    A round is one step of every group of requests that take turns in the pipeline stages; without a pipeline, it is one
    step. With `lookahead` there is one group, of which one step is in flight when the next one is scheduled.

    The sampled tokens of a request are its own key, repeated: requests with one key have equal contents.
    """

    def finish(self, plan: StepPlan) -> list[Output]:
        """Apply the result of the oldest step in flight, which is `plan`."""
        rows = self._in_flight[0].rows
        tokens = [row.request.key for row, samples in zip(rows, plan.samples, strict=True) if samples]
        return self.apply(StepResult(plan.id, tokens, [None] * len(tokens), {}))

    def groups(self) -> list[list[Sequence]]:
        """The requests of each step of a round, in the order of their turns."""
        return [list(self._ready), *([] if self.lookahead else (flight.rows for flight in self._in_flight))]

    def quiet_rounds(self) -> int:
        """Number of rounds from now on that only give one token to each running request.

        In these rounds no request is admitted or preempted, and no prompt is computed. No request ends, except in the
        last round if no step is in flight then. Call it when a step can be scheduled.
        """
        running = self._running
        if not self._groups_are_stable() or not self._flights_decode() or not self._admits_none():
            return 0
        rounds = self.max_model_len
        for sequence in running.values():
            length = len(sequence.tokens)
            # The only token of each request that is not computed is the input of its next step, and no prompt token.
            if sequence.computed - sequence.pending + 1 != length or length == sequence.prompt_length:
                return 0
            rounds = min(rounds, sequence.limit - length)
        # Tokens in flight come in addition to those of the rounds. With lookahead, no step follows a request's last.
        rounds -= 2 if self.lookahead else self.stages > 1
        if rounds < 1:
            return 0
        enough = len(running) * self.tables.count_blocks(rounds) <= self.pool.free
        return rounds if enough else self._rounds_with_room(rounds)

    def advance(self, rounds: int) -> list[str]:
        """Advance by `rounds` rounds, at most `quiet_rounds`. Return the ids of the requests that have ended."""
        size, caching, ended = self.pool.block_size, self.pool.caching, []
        counters = self._counters
        for group in self.groups():
            counters.steps += rounds
            counters.step_sizes[(len(group) - 1).bit_length()] += rounds
        counters.generation_tokens += rounds * len(self._running)
        counters.computed_tokens += rounds * len(self._running)
        for sequence in list(self._running.values()):
            sequence.tokens += [sequence.request.key] * rounds
            sequence.computed += rounds
            if sequence.computed > sequence.room:
                self.tables.grow_table(sequence, sequence.computed)
            if caching and sequence.computed // size > sequence.registered:
                self.tables.register_full_blocks(sequence)
            if len(sequence.tokens) >= sequence.limit:
                ended.append(sequence)
        # All requests of the last step get their blocks before any request frees its own.
        for sequence in ended:
            self._finish(sequence)
        return [sequence.request.id for sequence in ended]

    @property
    def blocks_used(self) -> int:
        """Number of KV blocks in use."""
        return self.pool.num_blocks - self.pool.free

    def _groups_are_stable(self) -> bool:
        """Return True if every running request is in a group, and no group would be divided."""
        groups = [len(group) for group in self.groups()]
        # A step takes a stage's share of the running requests: larger groups would be divided.
        most = min(-(-len(self._running) // self.stages), self.max_num_batched_tokens)
        return bool(groups[0]) and max(groups) <= most and sum(groups) == len(self._running)

    def _flights_decode(self) -> bool:
        """Return True if the steps in flight compute one token for each of their requests."""
        flights = self._in_flight
        if self.lookahead and (len(flights) != 1 or len(flights[0].rows) != len(self._running)):
            return False
        return all(len(flight.plan.tokens) == len(flight.rows) for flight in flights)

    def _admits_none(self) -> bool:
        """Return True if no queued request can be admitted before a running one ends."""
        if not self._queue:
            return True
        first = self._queue[0][1]
        if first.done or first.outstanding:
            return False
        if not self._slots:
            return True
        # The output of a running request with the same contents may become a cached prefix of the queued one.
        if self.pool.caching and any(row.request.key == first.request.key for row in self._running.values()):
            return False
        cached = self.tables.match_prefix(first)
        return not self.tables.has_room(
            self.tables.count_blocks(len(first.tokens)) - len(cached), cached, len(self._running)
        )

    def _new_blocks(self, rounds: int) -> int:
        """Number of blocks that `rounds` more tokens of each running request need."""
        sequences = self._running.values()
        return sum(self.tables.count_blocks(max(0, row.computed + rounds - row.room)) for row in sequences)

    def _rounds_with_room(self, rounds: int) -> int:
        """The most rounds, up to `rounds`, that the free blocks suffice for."""
        if self._new_blocks(rounds) <= self.pool.free:
            return rounds
        low, high = 0, rounds
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._new_blocks(middle) <= self.pool.free else (low, middle - 1)
        return low
