"""Plans of sharded state: the layout of its files, and the refusal of every other one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weft.checkpoint.files.sharded import ShardedState, cut_words
from weft.config import DEFAULT_CONFIG, EngineConfig
from weft.errors import PlanError

if TYPE_CHECKING:
    from weft.checkpoint.checkpoint import Checkpoint
    from weft.plan.plan import Plan

# Options that cut a model. The first ones change the number of ranks or their shares, even if they are the only ones.
CUT = (
    "tensor_parallel_size",
    "tensor_split",
    "pipeline_parallel_size",
    "pipeline_split",
    "data_parallel_size",
    "enable_expert_parallel",
    "expert_parallel_size",
)


def cut_of(config: EngineConfig) -> dict[str, object]:
    """The options of a config that cut the model, without options that are left out."""
    return {name: getattr(config, name) for name in CUT if getattr(config, name) != getattr(DEFAULT_CONFIG, name)}


def config_of_shards(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """The config with what sharded state decides, as far as the user leaves it open; the same config for other formats.

    These are the cut, the dtype and the quantization.
    """
    state = checkpoint.sharded
    if state is None:
        return config
    if not cut_of(config) and config.plan is None and config.device_map is None:
        cut: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in state.cut.items()
        }
        config = replace(config, **cut)
    dtype = state.dtype if config.dtype == "auto" else config.dtype
    quantization = state.quantization if config.quantization == "auto" else config.quantization
    return replace(config, dtype=dtype, quantization=quantization)


def check_shards(plan: Plan, state: ShardedState) -> None:
    """Raise PlanError if the files of sharded state are not of this plan's layout."""
    difference = shard_difference(plan, state)
    if difference:
        raise PlanError(
            f"{plan.checkpoint} is cut for {cut_words(state.cut)}, and {difference}; leave the layout out, or give the "
            "whole model (weft shard cuts it for another layout)",
            code="shards-of-other-layout",
        )


def shard_difference(plan: Plan, state: ShardedState) -> str:
    """The first difference between a plan and sharded state; "" if the ranks of the plan hold what the files do."""
    if len(plan.places) != len(state.places):
        return f"this plan has {len(plan.places)} ranks, not {len(state.places)}"
    for ours, theirs in zip(plan.places, state.places, strict=True):
        if ours != theirs:
            return f"rank {ours.rank} has another share of the model here"
    if plan.dtype != state.dtype:
        return f"its dtype is {state.dtype}, not {plan.dtype}"
    if plan.schemes != state.schemes:
        return f"its weights are held in {state.precision}, which this plan does not"
    return ""
