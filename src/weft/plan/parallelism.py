"""Parallelism: the way in which a model is cut over ranks, or the parts of it that are decided so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from weft.checkpoint.architectures.shape import ModelShape
from weft.errors import ConfigError, PlanError
from weft.plan.device_map import Spread
from weft.plan.rules import (
    check_expert_parallel_size,
    check_pipeline_split,
    check_stage_count,
    check_tensor_parallel_size,
    check_tensor_split,
)

PARTITION = "VLLM_PP_LAYER_PARTITION"  # vLLM's variable for the layers of each stage
SIZES = ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel")


class Parallelism(msgspec.Struct, frozen=True):
    """Sizes and shares of a layout. A part that is 0, empty or None is open: it is decided later, or is the default.

    Plan files have the same names. A size that is open follows from its split.

    - `tensor_parallel`: number of ranks that divide each layer. `tensor_split`: their weights; evenly if it is empty.
    - `pipeline_parallel`: number of stages. `pipeline_split`: the layers of each.
    - `data_parallel`: number of replicas.
    - `deals_experts`: whole experts are dealt out to the ranks of a stage of all replicas, else each is cut like all
      other weights. Several replicas are then the attention groups of one engine, and share one set of experts.
    - `expert_parallel`: number of parts into which experts are dealt; the ranks of a part divide the columns of its
      experts. By default there is a part for each rank; it is 1 if experts are not dealt out.
    - `devices`: each rank's number of its device in `Cluster` order. Ranks are ordered by replica, then by stage, and
      several may have the same device.
    - `device_map_strategy`: the way to put whole layers on all devices, which `planner.search.balance` explains.
    """

    tensor_parallel: int = 0
    pipeline_parallel: int = 0
    data_parallel: int = 0
    expert_parallel: int = 0
    deals_experts: bool | None = msgspec.field(default=None, name="enable_expert_parallel")
    tensor_split: tuple[float, ...] = ()
    pipeline_split: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    device_map_strategy: Spread | None = None

    def __post_init__(self) -> None:
        if self.tensor_split and not self.tensor_parallel:
            msgspec.structs.force_setattr(self, "tensor_parallel", len(self.tensor_split))
        if self.pipeline_split and not self.pipeline_parallel:
            msgspec.structs.force_setattr(self, "pipeline_parallel", len(self.pipeline_split))

    @property
    def sizes(self) -> dict[str, int]:
        """The four sizes by their names."""
        return {name: getattr(self, name) for name in SIZES}

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the ranks that divide each layer."""
        return self.tensor_split or (1.0,) * self.tensor_parallel

    @property
    def replica_size(self) -> int:
        """Number of ranks of one replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def shares_experts(self) -> bool:
        """True if the replicas share one set of experts, and take every step together."""
        return bool(self.deals_experts) and self.data_parallel > 1

    @property
    def groups(self) -> int:
        """Number of attention groups of one engine."""
        return self.data_parallel if self.shares_experts else 1

    @property
    def engine_ranks(self) -> int:
        """Number of ranks of one engine: a replica, or all replicas if they share their experts."""
        return self.replica_size * self.groups

    @property
    def engines(self) -> int:
        """Number of engines."""
        return self.data_parallel // self.groups

    @property
    def expert_columns(self) -> int:
        """Number of ranks that divide the columns of an expert."""
        return max(1, self.tensor_parallel * self.groups // self.expert_parallel)

    @property
    def expert_size(self) -> int | None:
        """The --expert-parallel-size of the layout; None without it, and for its default: a part for each rank."""
        return self.expert_parallel if self.deals_experts and self.expert_columns > 1 else None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `EngineConfig` that ask for one engine of the layout."""
        return {
            "tensor_parallel_size": self.tensor_parallel,
            "pipeline_parallel_size": self.pipeline_parallel,
            "tensor_split": self.weights,
            "pipeline_split": self.pipeline_split,
            "data_parallel_size": self.groups,
            "enable_expert_parallel": self.deals_experts,
            "expert_parallel_size": self.expert_parallel if self.deals_experts else None,
        }

    def changed(self, other: Parallelism) -> Parallelism:
        """The layout with the parts that `other` decides."""
        decided = {name: getattr(other, name) for name in other.__struct_fields__}
        return replace(self, **{name: value for name, value in decided.items() if value or value is False})

    def of_one_engine(self) -> Parallelism:
        """One engine of the layout: a size that is open is 1, and experts that are dealt out have a part per rank."""
        tensor, groups = self.tensor_parallel or 1, self.data_parallel if self.deals_experts else 1
        parts = self.expert_parallel or tensor * (groups or 1)
        return replace(
            self,
            tensor_parallel=tensor,
            pipeline_parallel=self.pipeline_parallel or 1,
            data_parallel=groups or 1,
            expert_parallel=parts if self.deals_experts else 1,
        )

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError for splits of other sizes, and PlanError for parts that the model cannot have."""
        self._check_sizes()
        if self.pipeline_parallel:
            check_stage_count(self.pipeline_parallel, len(shape.layers))
        if self.pipeline_split:
            check_pipeline_split(self.pipeline_split, len(shape.layers))
        if self.tensor_parallel:
            check_tensor_parallel_size(self.tensor_parallel, shape.q_heads)
        if self.deals_experts:
            self._check_experts(shape)

    def _check_sizes(self) -> None:
        if self.tensor_split and len(self.tensor_split) != self.tensor_parallel:
            raise ConfigError(
                f"tensor_split has {len(self.tensor_split)} weights and tensor_parallel_size is "
                f"{self.tensor_parallel}; give one weight per rank, or only tensor_split",
                code="tensor-split-of-other-size",
            )
        if self.pipeline_split and len(self.pipeline_split) != self.pipeline_parallel:
            raise ConfigError(
                f"pipeline_split has {len(self.pipeline_split)} stages and pipeline_parallel_size is "
                f"{self.pipeline_parallel}; give one number of layers per stage, or only pipeline_split",
                code="pipeline-split-of-other-size",
            )

    def _check_experts(self, shape: ModelShape) -> None:
        if shape.experts is None:
            raise PlanError(
                "--enable-expert-parallel deals experts out to ranks, and this model has no experts: leave it out",
                code="no-experts",
            )
        parts, experts = self.expert_parallel, shape.experts.count
        ranks = self.tensor_parallel * self.data_parallel
        if ranks:
            check_expert_parallel_size(parts or ranks, ranks, experts)
        elif parts > experts:  # for any number of ranks
            check_expert_parallel_size(parts, parts * experts, experts)


# One pipeline of whole layers, whose stages are open.
WHOLE_LAYERS = Parallelism(tensor_parallel=1, data_parallel=1, deals_experts=False)


def asked_parallelism(fields: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Parallelism:
    """The parts of a layout that a user has decided, by fields of `EngineConfig` or flags of their names.

    Without a pipeline split, the one in PARTITION counts, a variable of the `environment`. Raises ConfigError for
    values that are wrong for every model; `Parallelism.check` has the other rules.
    """
    weights = fields.get("tensor_split")
    layers, stages = fields.get("pipeline_split"), fields.get("pipeline_parallel_size")
    dealt, parts = fields.get("enable_expert_parallel"), fields.get("expert_parallel_size")
    if parts is not None and not dealt:
        raise ConfigError(
            f"expert_parallel_size {parts} deals experts out to ranks, which takes "
            "--enable-expert-parallel as well: add it, or leave --expert-parallel-size out",
            code="expert-size-without-expert-parallel",
        )
    if weights is not None:
        check_tensor_split(weights)
    if layers is not None and not layers:
        raise ConfigError(
            "pipeline_split is empty; give one number of layers per stage, as in 20,12",
            code="pipeline-split-of-other-size",
        )
    if layers is None and environment and environment.get(PARTITION):
        layers = _partition_layers(environment[PARTITION], stages)
    return Parallelism(
        fields.get("tensor_parallel_size") or 0,
        stages or 0,
        fields.get("data_parallel_size") or 0,
        parts or 0,
        dealt,
        weights or (),
        layers or (),
    )


def _partition_layers(partition: str, stages: int | None) -> tuple[int, ...]:
    """The layers per stage of PARTITION. Raises ConfigError for a malformed value, or one of another size."""
    try:
        layers = tuple(int(part) for part in partition.split(","))
    except ValueError:
        raise ConfigError(
            f"{PARTITION} is {partition!r}; it must be layers per stage, as in 20,12", code="bad-layer-partition"
        ) from None
    if stages not in (None, len(layers)):
        raise ConfigError(
            f"{PARTITION}={partition} has {len(layers)} stages and --pipeline-parallel-size is {stages}; make them "
            "agree or unset the variable",
            code="layer-partition-of-other-size",
        )
    return layers
