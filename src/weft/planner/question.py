"""Question: what weft plan is asked, and how much of the answer is given already."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from weft.facts.cluster import Cluster
from weft.facts.shape import ModelShape
from weft.planner.deployment import Workload

Objective = Literal["throughput", "latency", "cost"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What the user has decided; None leaves it to the search. `tensor_split` are weights, `pipeline_split`
    layers per stage."""

    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    expert_parallel: bool | None = None
    tensor_split: tuple[float, ...] | None = None
    pipeline_split: tuple[int, ...] | None = None


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one cluster. `precisions` are compared with each other; `kv_dtype` None is what the engine
    takes by itself; `price` is dollars for one GPU and hour; `gpu_memory_utilization` None the engine's own share."""

    model: str
    shape: ModelShape
    cluster: Cluster
    engine: str
    precisions: tuple[str, ...]
    kv_dtype: str | None = None
    workload: Workload = Workload()
    objective: Objective = "throughput"
    wish: Wish = Wish()
    price: float | None = None
    gpu_memory_utilization: float | None = None
