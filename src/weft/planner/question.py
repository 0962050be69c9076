"""Question: the model, the cluster and the wishes that `weft plan` searches a layout for."""

from __future__ import annotations

from typing import Literal, get_args

from weft.checkpoint.architectures.shape import ModelShape
from weft.machine.hardware.cluster import Cluster
from weft.plan.limits import EngineLimits
from weft.plan.parallelism import Parallelism
from weft.plan.plan import Speculation
from weft.planner.deployment import Workload
from weft.planner.note import Note

Objective = Literal["throughput", "latency", "cost"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


class Question(EngineLimits, frozen=True, kw_only=True):
    """One model on one cluster, and all that the search has to know besides.

    The search compares `precisions` with each other. `kv_dtype`, `gpu_memory_utilization` and `max_num_batched_tokens`
    are the engine's own defaults if None. `constraints` are the parts of the layout that the
    user has decided; the search decides the others. `price` is in dollars per GPU and hour.
    `speculation` is the speculative decoding of our own engine, whose memory is counted. If `deterministic`, our engine
    sums in a fixed order, whose price is not counted. `remarks` are notes for the reader of the plan about the way in
    which it was asked for. `flags` are the model and the flags with their values, for a command that repeats them; the
    flag of the model itself is the empty string.
    """

    model: str
    shape: ModelShape
    cluster: Cluster
    engine: str
    precisions: tuple[str, ...]
    kv_dtype: str | None = None
    workload: Workload = Workload()
    objective: Objective = "throughput"
    constraints: Parallelism = Parallelism()
    price: float | None = None
    gpu_memory_utilization: float | None = None
    max_num_batched_tokens: int | None = None
    speculation: Speculation | None = None
    deterministic: bool = False
    remarks: tuple[Note, ...] = ()
    flags: tuple[tuple[str, ...], ...] = ()
