"""GroupedScheduler: the schedulers of several attention groups, which take every step together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from weft.engine.core.grammar import Matcher
from weft.engine.core.request import Output, Request, Stats, duplicate_id_error, queue_full_error
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
        self.groups = groups
        self.started: list[str] = []
        self.prompt_tokens = 0
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
            waiting = sum(group.waiting for group in self.groups)
            raise queue_full_error(waiting, sum(group.max_num_queued for group in self.groups))
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

    def schedule(self) -> LockStep | None:
        """Return the next step of all groups, or None if no group can run anything."""
        self._tell_of_other_groups()
        plans = [group.schedule() for group in self.groups]
        if not any(plans):
            return None
        self.started = [id for group in self.groups for id in group.started]
        self.prompt_tokens = self._most_prompt_tokens(plans)
        step = LockStep([plan or empty_plan() for plan in plans])
        _tell_sizes(step)
        self._in_flight.append(step)
        return step

    def _most_prompt_tokens(self, plans: Sequence[StepPlan | None]) -> int:
        """Tokens of prompts in the plan that has the most."""
        return max(group.prompt_tokens for group, plan in zip(self.groups, plans, strict=True) if plan is not None)

    def _tell_of_other_groups(self) -> None:
        """Tell each group whether another group decodes."""
        decoding = [group.decodes for group in self.groups]
        for number, group in enumerate(self.groups):
            group.others_decode = any(decoding[:number] + decoding[number + 1 :])

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
    def speculation(self) -> object:
        """Speculative decoding of every group."""
        return self.groups[0].speculation

    @property
    def speculating(self) -> bool:
        """False if the next step has no draft tokens."""
        return self.groups[0].speculating

    @speculating.setter
    def speculating(self, value: bool) -> None:
        for group in self.groups:
            group.speculating = value

    @property
    def prompt_limit(self) -> int:
        """Limit on the prompt tokens of each group's next step while others of the group await their next token."""
        return self.groups[0].prompt_limit

    @prompt_limit.setter
    def prompt_limit(self, value: int) -> None:
        for group in self.groups:
            group.prompt_limit = value

    @property
    def step_limit(self) -> int:
        """Limit on the tokens of each group's next step under the policy "fair"."""
        return self.groups[0].step_limit

    @step_limit.setter
    def step_limit(self, value: int) -> None:
        for group in self.groups:
            group.step_limit = value

    @property
    def busy_limit(self) -> int:
        """The same limit without a prompt of a newcomer."""
        return self.groups[0].busy_limit

    @busy_limit.setter
    def busy_limit(self, value: int) -> None:
        for group in self.groups:
            group.busy_limit = value

    @property
    def newcomer_tokens(self) -> int:
        """Tokens of the shortest prompt of a newcomer that the last scheduled steps admitted; 0 if there is none."""
        return min(filter(None, (group.newcomer_tokens for group in self.groups)), default=0)

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
