"""Question: the model, the cluster and the wishes that `weft plan` searches a layout for."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from weft.checkpoint.architectures.shape import ModelShape
from weft.machine.hardware.cluster import Cluster
from weft.plan.device_map import Spread
from weft.plan.plan import Speculation
from weft.planner.deployment import Workload
from weft.planner.note import Note

Objective = Literal["throughput", "latency", "cost"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


class LayoutConstraints(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a layout that the user has decided; None leaves a part to the search.

    `tensor_split` are weights, `pipeline_split` are layers per stage. `expert_parallel` deals whole experts out to the
    ranks of a stage of all replicas, which then share them, or to `expert_parts` parts of these ranks. `devices` has
    the GPU of each stage, in `Cluster` order; one GPU may hold several stages. `device_map_strategy` puts whole layers
    on all GPUs, by a strategy that `planner.search.balance` explains.
    """

    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    expert_parallel: bool | None = None
    expert_parts: int | None = None
    tensor_split: tuple[float, ...] | None = None
    pipeline_split: tuple[int, ...] | None = None
    devices: tuple[int, ...] | None = None
    device_map_strategy: Spread | None = None


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one cluster, and all that the search has to know besides.

    The search compares `precisions` with each other. `kv_dtype`, `gpu_memory_utilization`, `max_num_seqs` and
    `max_num_batched_tokens` are the engine's own defaults if None. `price` is in dollars per GPU and hour.
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
    constraints: LayoutConstraints = LayoutConstraints()
    price: float | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    speculation: Speculation | None = None
    deterministic: bool = False
    remarks: tuple[Note, ...] = ()
    flags: tuple[tuple[str, ...], ...] = ()
