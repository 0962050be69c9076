"""GroupedScheduler: the schedulers of several attention groups, which take every step together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from weft.engine.core.grammar import Matcher
from weft.engine.core.request import Output, Request, Stats, duplicate_id_error, queue_full_error
from weft.engine.core.scheduled import UNLIMITED, ScheduledStep, StepLimits
from weft.engine.core.scheduler import Scheduler
from weft.engine.core.step import LockStep, LockStepResult, StepPlan
from weft.errors import QueueFullError

MAX_ANSWER_TOKENS = 256  # tokens of an answer that count for a group's load: most answers end before their limit


class GroupedScheduler:
    """One scheduler for each attention group, with KV blocks, slots and requests of its own.

    A request goes to the group that has the fewest tokens of unfinished requests, prompts and answers together, and
    stays there. A step begins in all groups at once; a group with nothing to run takes part without rows, since the
    others need its experts. `schedule` and `apply` work as in `Scheduler`, with a LockStep instead of a StepPlan.
    """

    def __init__(self, groups: Sequence[Scheduler]) -> None:
        self.groups, self.settings = groups, groups[0].settings
        self._group_of: dict[str, int] = {}  # of each unfinished request
        self._tokens_of: dict[str, int] = {}  # likewise: the tokens that it counts as
        self._load = [0] * len(groups)  # sums of these per group
        self._in_flight: deque[LockStep] = deque()
        self._counters = Stats()

    # Requests in and out

    def add(self, request: Request, *, prepared: bool = True) -> None:
        """Queue a request in the group with the least load that has room for it, as `Scheduler.add`."""
        if request.id in self._group_of:
            raise duplicate_id_error(request.id)
        by_load = sorted(range(len(self.groups)), key=self._load.__getitem__)
        for number in by_load:
            try:
                self.groups[number].add(request, prepared=prepared)
                break
            except QueueFullError:
                continue
        else:
            waiting = sum(group.table.waiting for group in self.groups)
            raise queue_full_error(waiting, sum(group.settings.max_num_queued for group in self.groups))
        tokens = request.length + min(MAX_ANSWER_TOKENS, request.params.max_tokens or MAX_ANSWER_TOKENS)
        self._group_of[request.id], self._tokens_of[request.id] = number, tokens
        self._load[number] += tokens

    def mark_prepared(self, id: str, matcher: Matcher | None = None) -> None:
        """Let a request run, as `Scheduler.mark_prepared`."""
        if id in self._group_of:
            self.groups[self._group_of[id]].mark_prepared(id, matcher)

    def knows(self, id: str) -> bool:
        """Return True for a request that has not ended."""
        return id in self._group_of

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests, as `Scheduler.abort`."""
        for id in ids:
            if id in self._group_of:
                self.groups[self._group_of[id]].abort([id])
                self._forget(id)

    def preempt_all(self) -> None:
        """Preempt all running requests of all groups. No step is in flight."""
        for group in self.groups:
            group.preempt_all()

    def reset_prefix_cache(self) -> None:
        """Let no request reuse blocks that were filled before."""
        for group in self.groups:
            group.reset_prefix_cache()

    def _forget(self, id: str) -> None:
        self._load[self._group_of.pop(id)] -= self._tokens_of.pop(id)

    # Steps

    def schedule(self, limits: StepLimits = UNLIMITED) -> ScheduledStep[LockStep] | None:
        """Return the next step of all groups, or None if no group can run anything. Each group has these limits."""
        decoding = [group.table.decodes for group in self.groups]
        parts = [
            group.schedule(limits._replace(others_decode=any(decoding[:number] + decoding[number + 1 :])))
            for number, group in enumerate(self.groups)
        ]
        taken = [part for part in parts if part]
        if not taken:
            return None
        step = LockStep([part.step if part else empty_plan() for part in parts])
        _tell_sizes(step)
        self._in_flight.append(step)
        return ScheduledStep(
            step,
            started=[id for part in taken for id in part.started],
            prompt_tokens=max(part.prompt_tokens for part in taken),
            newcomer_tokens=min(filter(None, (part.newcomer_tokens for part in taken)), default=0),
        )

    def apply(self, result: LockStepResult) -> list[Output]:
        """Apply the results of the oldest step in flight."""
        step = self._in_flight.popleft()
        outputs: list[Output] = []
        for group, plan, part in zip(self.groups, step.plans, result.results, strict=True):
            if plan.slots:
                outputs += group.apply(part)
        for output in outputs:
            if output.finish_reason:
                self._forget(output.id)
        self._counters.steps += 1
        self._counters.step_sizes[(sum(step.plans[0].group_tokens) - 1).bit_length()] += 1
        return outputs

    # As one scheduler

    @property
    def active(self) -> int:
        """Number of requests that run, plus those waiting for which a slot is free, in the group that has the most."""
        return max(group.active for group in self.groups)

    def stats(self) -> Stats:
        """The sums over all groups. A step of all groups is one step, of the tokens of all of them."""
        return sum_groups([group.stats() for group in self.groups], self._counters)


def _tell_sizes(step: LockStep) -> None:
    """Set in each group's plan the numbers of tokens of all groups, and the rows of the graph that all of them take."""
    tokens = [len(plan.tokens) for plan in step.plans]
    graph_rows = max(tokens) if max(step.counts) == 1 else 0
    for plan in step.plans:
        plan.group_tokens, plan.graph_rows = tokens, graph_rows


def empty_plan() -> StepPlan:
    """The plan of a group without rows."""
    return StepPlan(-1, [], [], [], [], [], [], [], [], [])


def sum_groups(parts: Sequence[Stats], steps: Stats) -> Stats:
    """The sums of the groups' gauges and counters, with the numbers and sizes of steps from `steps`."""
    total = Stats(steps=steps.steps, step_sizes=list(steps.step_sizes))
    for part in parts:
        for name in SUMMED:
            setattr(total, name, getattr(total, name) + getattr(part, name))
    return total


SUMMED = tuple(name for name in Stats.__struct_fields__ if name not in ("steps", "step_sizes", "sleep_level"))
