"""Layouts of the tests, and what is predicted of them."""

from __future__ import annotations

from collections.abc import Sequence

from weft.checkpoint.architectures.shape import ModelShape
from weft.machine.hardware.cluster import Cluster, parse_gpus
from weft.plan.parallelism import Parallelism
from weft.planner.deployment import DeploymentLayout, Workload, deploy
from weft.planner.profiles import load_profile
from weft.planner.speed.cost import Prediction, predict


def cut(
    shape: ModelShape,
    order: Sequence[int],
    *,
    tensor: int = 1,
    stages: int = 1,
    precision: str = "bf16",
    experts: bool = False,
) -> DeploymentLayout:
    each, rest = divmod(len(shape.layers), stages)
    replicas = len(order) // (tensor * stages)
    return deploy(
        shape,
        Parallelism(
            tensor,
            expert_parallel=tensor * replicas if experts else 1,
            deals_experts=experts,
            pipeline_split=tuple(each + (stage < rest) for stage in range(stages)),
            devices=tuple(order),
        ),
        precision=precision,
        kv_dtype="bf16",
    )


def speed(
    shape: ModelShape, layout: DeploymentLayout, cluster: Cluster | str, engine: str = "vllm", **workload: int | None
) -> Prediction:
    cluster = parse_gpus(cluster) if isinstance(cluster, str) else cluster
    return predict(shape, layout, cluster, Workload(**workload), load_profile(engine))
