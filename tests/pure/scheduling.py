"""Scheduling by hand: a scheduler, obedient ranks, and what every step of theirs must be."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.pure.ranks import Ranks
from tests.pure.shapes import SMOLLM2
from weft.core.blocks import NumberedBlocks
from weft.core.params import SamplingParams
from weft.core.request import Output, Request
from weft.core.scheduler import Scheduler
from weft.core.step import StepPlan
from weft.core.token_ids import TokenIds
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


def request(id: str, prompt: list[int], *, priority: int = 0, stop_ids: tuple[int, ...] = (), **params: Any) -> Request:
    sampling = SamplingParams(**params)
    return Request(id=id, prompt=TokenIds.pack(prompt), params=sampling, stop_ids=stop_ids, priority=priority)


@dataclass
class Engine:
    """A scheduler and obedient ranks, driven by hand: steps wait in `flight` until `apply` executes one."""

    limits: dict[str, Any]
    scheduler: Scheduler = field(init=False)
    ranks: Ranks = field(init=False)
    flight: deque[StepPlan] = field(default_factory=deque)
    plans: list[bytes] = field(default_factory=list)
    outputs: dict[str, list[Output]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = ("num_blocks", "block_size", "prefix_caching")
        blocks, size, caching = (self.limits[name] for name in sizes)
        limits = {name: limit for name, limit in self.limits.items() if name not in sizes}
        self.scheduler = Scheduler(pool=NumberedBlocks(blocks, size, caching=caching), **limits)
        self.scheduler.tables.growth = 1  # in caches this small nobody else would be let in
        names = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")
        self.ranks = Ranks(**{name: self.limits[name] for name in names})

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan:
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
        """Everything to its end. Each turn brings something nearer it, or there is a deadlock."""
        for item in requests:
            self.scheduler.add(item)
        turns = 0
        while self.scheduler._unfinished or self.flight:
            while len(self.flight) < depth and self.schedule():
                pass
            assert self.flight, "unfinished requests, and nothing to run"
            self.apply()
            turns += 1
            assert turns < 20000, "no end in sight"

    def tokens(self, id: str) -> list[int]:
        return [token for output in self.outputs.get(id, ()) for token in output.tokens]

    def check_blocks(self) -> None:
        """Each reference belongs to a running request's table, and what is not referenced is free."""
        pool = self.scheduler.pool
        running = self.scheduler._running.values()
        held = Counter(block for sequence in running for block in sequence.blocks)
        assert pool.references == [held[block] for block in range(pool.num_blocks)]
        assert pool.free == pool.num_blocks - len(held)
        assert self.scheduler.tables.promised == sum(sequence.promised for sequence in running) >= 0
        stats = self.scheduler.stats()
        assert stats.blocks_used == len(held) and stats.running == len(running) <= self.scheduler.max_num_seqs
