"""StretchScheduler: the real scheduler, and rounds of steps whose batch does not change taken in one go."""

from __future__ import annotations

from weft.core.request import Output
from weft.core.scheduler import Scheduler
from weft.core.sequence import Sequence
from weft.core.step import StepPlan, StepResult


class StretchScheduler(Scheduler):
    """A round is one step of every group of requests that takes turns in the stages: without a pipeline, one step. With
    `lookahead` there is one group, of which a step is under way when the next one is scheduled.

    What a request is answered with is its own key, again and again: requests with one key have one content.
    """

    def finish(self, plan: StepPlan) -> list[Output]:
        """Apply the result of the oldest step in flight, which is `plan`."""
        rows = self._in_flight[0].rows
        tokens = [row.request.key for row, samples in zip(rows, plan.samples, strict=True) if samples]
        return self.apply(StepResult(plan.id, tokens, [None] * len(tokens), {}))

    def groups(self) -> list[list[Sequence]]:
        """The requests of each step that a round has from now on, those whose turn it is first."""
        return [list(self._ready), *([] if self.lookahead else (flight.rows for flight in self._in_flight))]

    def quiet_rounds(self) -> int:
        """How many rounds from now on give one token to each running request and do nothing else: nobody is admitted
        or preempted, no prompt is read, and nobody ends: but in the last of them, where no step is under way. Asked
        when a step can be scheduled."""
        running, flights = self._running, self._in_flight
        groups = [len(group) for group in self.groups()]
        # A step takes a stage's share of those that run: larger groups would change.
        most = min(-(-len(running) // self.stages), self.max_num_batched_tokens)
        if not groups[0] or max(groups) > most or sum(groups) != len(running):
            return 0
        if self.lookahead and (len(flights) != 1 or len(flights[0].rows) != len(running)):
            return 0
        if any(len(flight.plan.tokens) != len(flight.rows) for flight in flights) or not self._shut():
            return 0
        rounds = self.max_model_len
        for sequence in running.values():
            length = len(sequence.tokens)
            # All that is not computed of each is the token that its next step is for, and that is none of its prompt.
            if sequence.computed - sequence.pending + 1 != length or length == sequence.prompt_length:
                return 0
            rounds = min(rounds, sequence.limit - length)
        # The tokens that are under way come beside those of the rounds, and scheduled ahead, a request's last step is
        # not followed by another.
        rounds -= 2 if self.lookahead else self.stages > 1
        if rounds < 1:
            return 0
        enough = len(running) * self.tables.count_blocks(rounds) <= self.pool.free
        return rounds if enough else self._rounds_with_room(rounds)

    def advance(self, rounds: int) -> list[str]:
        """Go on by so many rounds, at most `quiet_rounds`. Returns the ids of those that have ended."""
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
        # All of the last step have their blocks before any gives them back.
        for sequence in ended:
            self._finish(sequence)
        return [sequence.request.id for sequence in ended]

    @property
    def blocks_used(self) -> int:
        return self.pool.num_blocks - self.pool.free

    def _shut(self) -> bool:
        """Whether nobody can be admitted before somebody ends."""
        if not self._queue:
            return True
        first = self._queue[0][1]
        if first.done or first.outstanding:
            return False
        if not self._slots:
            return True
        # What others write may come to be what its prompt begins with.
        if self.pool.caching and any(it.request.key == first.request.key for it in self._running.values()):
            return False
        found = self.tables.match_prefix(first)
        return not self.tables.has_room(
            self.tables.count_blocks(len(first.tokens)) - len(found), found, len(self._running)
        )

    def _new_blocks(self, rounds: int) -> int:
        """Blocks that so many more tokens of each need."""
        return sum(self.tables.count_blocks(max(0, it.computed + rounds - it.room)) for it in self._running.values())

    def _rounds_with_room(self, rounds: int) -> int:
        """The most rounds, up to these, that the free blocks suffice for."""
        if self._new_blocks(rounds) <= self.pool.free:
            return rounds
        low, high = 0, rounds
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._new_blocks(middle) <= self.pool.free else (low, middle - 1)
        return low
