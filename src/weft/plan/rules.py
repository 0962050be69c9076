"""The rules for a layout's sizes and splits. The engine and `weft plan` both check a user's layout here."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from weft.architectures.shape import ModelShape
from weft.errors import ConfigError, PlanError
from weft.formatting import join_commas


def check_layout(
    shape: ModelShape,
    *,
    tensor_parallel_size: int | None,
    tensor_split: Sequence[float] | None,
    pipeline_parallel_size: int | None,
    pipeline_split: Sequence[int] | None,
) -> tuple[int | None, int | None]:
    """Check a layout against its own fields and the model. Arguments are named as the fields of EngineConfig.

    Returns the tensor-parallel size and the number of pipeline stages, None for one that the arguments leave open.
    Raises ConfigError for arguments that contradict each other, PlanError for a layout that the model cannot have.
    """
    if tensor_split is not None:
        check_tensor_split(tensor_split)
        if tensor_parallel_size not in (None, len(tensor_split)):
            raise ConfigError(
                f"tensor_split has {len(tensor_split)} weights and tensor_parallel_size is {tensor_parallel_size}; "
                "give one weight per rank, or only tensor_split",
                code="tensor-split-of-other-size",
            )
        tensor_parallel_size = len(tensor_split)
    if pipeline_split is not None:
        if pipeline_parallel_size not in (None, len(pipeline_split)):
            raise ConfigError(
                f"pipeline_split has {len(pipeline_split)} stages and pipeline_parallel_size is "
                f"{pipeline_parallel_size}; give one number of layers per stage, or only pipeline_split",
                code="pipeline-split-of-other-size",
            )
        pipeline_parallel_size = len(pipeline_split)
    if pipeline_parallel_size is not None:
        check_stage_count(pipeline_parallel_size, len(shape.layers))
    if pipeline_split is not None:
        check_pipeline_split(pipeline_split, len(shape.layers))
    if tensor_parallel_size is not None:
        check_tensor_parallel_size(tensor_parallel_size, shape.q_heads)
    return tensor_parallel_size, pipeline_parallel_size


def check_tensor_split(weights: Sequence[float]) -> None:
    """Raise ConfigError unless there are weights, each finite and above 0."""
    if not weights:
        raise ConfigError("tensor_split is empty; give one weight per rank, as in 2,1", code="empty-tensor-split")
    for weight in weights:
        if not isfinite(weight) or weight <= 0:
            raise ConfigError(
                f"tensor_split has a weight of {weight}; each must be above 0 (--device-ids leaves a GPU out)",
                code="bad-tensor-split-weight",
            )


def check_tensor_parallel_size(ranks: int, q_heads: int) -> None:
    """Raise PlanError if a stage has more ranks than the model has query heads."""
    if ranks > q_heads:
        raise PlanError(
            f"tensor_parallel_size is {ranks}, and this model has {q_heads} query heads; use 1 to {q_heads}, and "
            "pipeline parallelism for more ranks",
            code="more-ranks-than-heads",
        )


def check_stage_count(stages: int, layers: int) -> None:
    """Raise PlanError unless every stage can have a layer."""
    if not 1 <= stages <= layers:
        raise PlanError(
            f"{stages} pipeline stages for a model of {layers} layers; use 1 to {layers}, and tensor parallelism for "
            "more ranks",
            code="more-stages-than-layers",
        )


def check_pipeline_split(stage_layers: Sequence[int], layers: int) -> None:
    """Raise PlanError unless the stages hold all layers of the model, at least one each."""
    if sum(stage_layers) != layers or any(count < 1 for count in stage_layers):
        raise PlanError(
            f"pipeline_split {join_commas(stage_layers)} holds {sum(stage_layers)} layers; it must add up to the "
            f"model's {layers}, with at least one layer per stage",
            code="pipeline-split-of-other-sum",
        )
