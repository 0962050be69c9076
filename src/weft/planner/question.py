"""Question: what weft plan is asked, and how much of the answer is given already."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from weft.architectures.shape import ModelShape
from weft.hardware.cluster import Cluster
from weft.plan.device_map import Spread
from weft.plan.plan import Speculation
from weft.planner.deployment import Workload

Objective = Literal["throughput", "latency", "cost"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


class LayoutConstraints(msgspec.Struct, frozen=True, kw_only=True):
    """What the user has decided; None leaves it to the search. `tensor_split` are weights, `pipeline_split`
    layers per stage, and `devices` the GPU of each stage, in `Cluster` order; one may hold several stages. `device_map_strategy`
    puts whole layers on all GPUs, by a word that `planner.balance` explains."""

    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    expert_parallel: bool | None = None
    tensor_split: tuple[float, ...] | None = None
    pipeline_split: tuple[int, ...] | None = None
    devices: tuple[int, ...] | None = None
    device_map_strategy: Spread | None = None


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one cluster. `precisions` are compared with each other; `kv_dtype` None is what the engine
    takes by itself; `price` is dollars for one GPU and hour; `gpu_memory_utilization`, `max_num_seqs` and
    `max_num_batched_tokens` None are the engine's own.
    `speculation` is how our own engine guesses ahead, whose memory is counted.
    `remarks` are what a reader of the answer has to know of how it was asked. `flags` are the model and the flags with
    their values, as far as a command that asks something like it repeats them; the model's flag is empty."""

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
    remarks: tuple[str, ...] = ()
    flags: tuple[tuple[str, ...], ...] = ()
