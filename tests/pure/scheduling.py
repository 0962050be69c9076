"""Scheduling by hand: a scheduler, obedient ranks, and what every step of theirs must be."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.pure.ranks import Ranks
from tests.pure.shapes import SMOLLM2
from weft.checkpoint.architectures.kv import KVGroup, KVLayout, KVSpec
from weft.engine.core.blocks import NumberedBlocks
from weft.engine.core.identity import PLAIN, RequestIdentity
from weft.engine.core.kv import KVManager
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Output, Request
from weft.engine.core.scheduled import UNLIMITED, StepLimits
from weft.engine.core.scheduler import Scheduler
from weft.engine.core.step import Pooling, StepPlan
from weft.engine.core.token_ids import TokenIds
from weft.engine.core.view import SchedulerSettings
from weft.plan.plan import DraftModel, Speculation

LIMITS: dict[str, Any] = {
    "num_blocks": 64,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_num_queued": 100,
    "max_model_len": 64,
    "stages": 1,
    "policy": "fcfs",
    "prefix_caching": True,
    "windows": (None,),
    "states": 0,
    "lookahead": False,
    "speculation": None,
}
DRAFT = DraftModel(model="draft", checkpoint="", load_format="dummy", shape=SMOLLM2)
AHEAD: list[dict[str, Any]] = [
    {},
    {"lookahead": True},
    {"speculation": Speculation(tokens=3, lookup_min=1, lookup_max=2)},
    {"speculation": Speculation(tokens=4, draft=DRAFT)},
]


def request(
    id: str,
    prompt: list[int],
    *,
    priority: int = 0,
    stop_ids: tuple[int, ...] = (),
    identity: RequestIdentity = PLAIN,
    pooling: Pooling | None = None,
    owner: int = 0,
    weight: float = 1.0,
    **params: Any,
) -> Request:
    sampling, ids = SamplingParams(**params), TokenIds.pack(prompt)
    return Request(
        id=id,
        prompt=ids,
        params=sampling,
        stop_ids=stop_ids,
        priority=priority,
        identity=identity,
        pooling=pooling,
        owner=owner,
        weight=weight,
    )


def layout(
    windows: Sequence[int | None] = (None,), *, block_size: int = 4, chunk: int = 64, states: int = 0
) -> KVLayout:
    """One layer for each window, in a group of its own, and then `states` layers that keep a state."""
    specs = [KVSpec(kind="heads", bytes_per_token=2, window=window) for window in windows]
    specs += [KVSpec(kind="state", bytes_per_sequence=100)] * states
    groups = tuple(KVGroup(spec, (number,)) for number, spec in enumerate(specs))
    return KVLayout(groups=groups, block_size=block_size, chunk=chunk)


def limits_layout(limits: dict[str, Any]) -> KVLayout:
    chunk = limits["max_num_batched_tokens"]
    return layout(limits["windows"], block_size=limits["block_size"], chunk=chunk, states=limits["states"])


def create_scheduler(limits: dict[str, Any]) -> Scheduler:
    """A scheduler under LIMITS with a change."""
    of_kv = ("num_blocks", "block_size", "prefix_caching", "windows", "states")
    sizes = {"max_num_seqs": limits["max_num_seqs"], "caching": limits["prefix_caching"]}
    kv = KVManager(limits_layout(limits), limits["num_blocks"], **sizes)
    kv.growth = 1  # in caches this small nobody else would be let in
    return Scheduler(SchedulerSettings(**{name: limit for name, limit in limits.items() if name not in of_kv}), kv)


@dataclass
class Engine:
    """A scheduler and obedient ranks, driven by hand: steps wait in `flight` until `apply` executes one."""

    limits: dict[str, Any]
    scheduler: Scheduler = field(init=False)
    ranks: Ranks = field(init=False)
    flight: deque[StepPlan] = field(default_factory=deque)
    plans: list[bytes] = field(default_factory=list)
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    step_limits: StepLimits = UNLIMITED
    prompt_tokens: int = 0  # of the last step
    newcomer_tokens: int = 0

    def __post_init__(self) -> None:
        self.limits = LIMITS | self.limits
        self.scheduler = create_scheduler(self.limits)
        names = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "windows", "states")
        self.ranks = Ranks(**{name: self.limits[name] for name in names})

    def schedule(self) -> StepPlan | None:
        before = set(self.scheduler.table.running)
        scheduled = self.scheduler.schedule(self.step_limits)
        self.check_order(before)
        plan: StepPlan | None = None
        if scheduled:
            plan, _, self.prompt_tokens, self.newcomer_tokens = scheduled
            self.flight.append(plan)
            self.plans.append(msgspec.msgpack.encode(plan))
        self.check_blocks()
        return plan

    def apply(self) -> list[Output]:
        outputs = self.scheduler.apply(self.ranks.execute(self.flight.popleft()))
        for output in outputs:
            self.outputs.setdefault(output.id, []).append(output)
        self.check_blocks()
        return outputs

    def run(self, *requests: Request, depth: int = 1) -> None:
        """Everything that is prepared to its end. Each turn brings something nearer it, or there is a deadlock."""
        for item in requests:
            self.scheduler.add(item)
        turns = 0
        while self.scheduler.table.unfinished.keys() - self.scheduler.table.unprepared or self.flight:
            while len(self.flight) < depth and self.schedule():
                pass
            assert self.flight, "unfinished requests, and nothing to run"
            self.apply()
            turns += 1
            assert turns < 20000, "no end in sight"

    def tokens(self, id: str) -> list[int]:
        return [token for output in self.outputs.get(id, ()) for token in output.tokens]

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return limits_layout(self.limits).longest(self.limits["num_blocks"], self.limits["max_model_len"])

    def check_order(self, before: set[str]) -> None:
        """A step admits no request before one that has waited longer, or that goes first, and is prepared; under the
        policy "fair", of the same owner."""
        scheduler, shared = self.scheduler, self.limits["policy"] == "fair"
        new = [sequence for id, sequence in scheduler.table.running.items() if id not in before]
        if not new:
            return
        waiting = scheduler.table.unfinished.keys() - scheduler.table.running.keys() - scheduler.table.unprepared.keys()
        left = [scheduler.table.unfinished[id] for id in waiting - scheduler.table.pooling]
        for admitted in new:
            owner = admitted.request.owner
            others = [sequence for sequence in left if not shared or sequence.request.owner == owner]
            assert all(admitted.order < other.order for other in others)

    def check_blocks(self) -> None:
        """Each reference belongs to a running request's tables, and what is not referenced is free."""
        kv, running = self.scheduler.kv, self.scheduler.table.running.values()
        held = {id(group.pool): Counter[int]() for group in kv.groups}
        for group in kv.groups:
            for sequence in running:
                entries = sequence.blocks[group.number][sequence.freed[group.number] :]
                assert len(sequence.blocks[group.number]) * kv.block_size == sequence.room
                if not group.is_state:
                    most = kv.layout.group_blocks(group.layers, sequence.room)
                    assert len(entries) <= most, "more than the window, a chunk and a block"
                else:
                    entries = [entry for entry in entries if entry]
                    assert len(entries) <= 2
                held[id(group.pool)].update(entries)
            if group.is_state:
                held[id(group.pool)][0] = 1
        for group in kv.groups:
            pool, counts = group.pool, held[id(group.pool)]
            assert isinstance(pool, NumberedBlocks)
            references = [0] * len(pool.references)
            for block, count in counts.items():
                references[block] = count
            assert pool.references == references
            assert pool.free == len(pool.references) - len(counts)
        assert kv.promised == sum(sequence.promised for sequence in running) >= 0
        assert kv.reserved == sum(sequence.reserved for sequence in running) >= 0
        stats = self.scheduler.stats()
        assert stats.blocks_used == len(held[id(kv.pool)])
        assert stats.running == len(running) + len(self.scheduler.table.pooling)
        assert len(running) <= self.scheduler.settings.max_num_seqs
