"""The rules for a layout's sizes and splits, of which `Parallelism.check` makes use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import isfinite

from weft.checkpoint.architectures.library import PREFIX
from weft.checkpoint.architectures.shape import ModelShape
from weft.errors import ConfigError, PlanError
from weft.formatting import join_commas


def check_expert_parallel_size(parts: int, ranks: int, experts: int) -> None:
    """Raise PlanError unless `experts` can be dealt into `parts` parts of equally many of the `ranks` ranks."""
    possible = [size for size in range(1, min(ranks, experts) + 1) if ranks % size == 0]
    if ranks % parts:
        raise PlanError(
            f"expert_parallel_size is {parts}, which does not divide the {ranks} ranks of a stage (tensor times data "
            f"parallel); use one of {join_commas(possible)}",
            code="expert-size-not-dividing",
        )
    if parts > experts:
        raise PlanError(
            f"{parts} ranks cannot each have one of the {experts} experts of this model; use "
            f"--expert-parallel-size {possible[-1]}, or fewer ranks",
            code="more-expert-ranks-than-experts",
        )


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


def check_library_cut(shape: ModelShape, weights: Sequence[float], stages: int) -> None:
    """Raise PlanError for a cut that a model cannot have that runs through Transformers' class: it is cut evenly."""
    library, ranks = shape.library, len(weights)
    if library is None:
        return
    name = shape.architecture.removeprefix(PREFIX)
    if stages > 1 and library.one_stage:
        raise PlanError(
            f"pipeline_parallel_size is {stages}, and {library.one_stage}; run {name} in one stage",
            code="library-model-without-pipeline",
        )
    if ranks == 1:
        return
    if library.whole:
        raise PlanError(
            f"tensor_parallel_size is {ranks}, and {library.whole}; use pipeline parallelism, or one rank",
            code="library-model-without-tensor-plan",
        )
    if len(set(weights)) > 1:
        raise PlanError(
            f"tensor_split {join_commas(weights)} is uneven, and {name} runs through Transformers' class, which is cut "
            f"evenly; use --tensor-parallel-size {ranks}",
            code="library-model-uneven-split",
        )
    lengths = {"query heads": shape.q_heads, "KV heads": shape.kv_heads}
    for tensor in chain(*library.kinds):
        if tensor.cut:
            lengths[f"{tensor.cut} of {tensor.name}"] = tensor.dims[tensor.cut == "cols"]
    for what, length in lengths.items():
        if length % ranks:
            raise PlanError(
                f"tensor_parallel_size is {ranks}, which does not divide the {length} {what} of {name}: Transformers' "
                "class is cut evenly; use another size, or pipeline parallelism",
                code="library-model-uneven-split",
            )
