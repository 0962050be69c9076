"""Planned: a plan file, carried out on this machine, or why it cannot be."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from weft.architectures.kv import number_bytes
from weft.architectures.parameters import params
from weft.config import DEFAULT_CONFIG, EngineConfig
from weft.errors import ConfigError, PlanError
from weft.formats import gguf_types
from weft.formats.precision import OF_DTYPE, as_published, canonical
from weft.formats.schemes import MADE, asked_for
from weft.formatting import format_bytes, join_commas
from weft.hardware.gpus import spec_of
from weft.hardware.host import Host
from weft.plan import speculation
from weft.plan.layout import DTYPES
from weft.plan.plan import Plan
from weft.planner.plan_file import PlanFile, Rank

if TYPE_CHECKING:
    from weft.formats.checkpoint import Checkpoint
    from weft.hardware.topology import Gpu

logger = logging.getLogger("weft")

COMPUTED = {precision: dtype for dtype, precision in OF_DTYPE.items()}
SAME_SHARE = 0.005  # of a GPU's memory: shares that differ by less are meant to be equal


def carried_out(plan: PlanFile, config: EngineConfig, checkpoint: Checkpoint, host: Host) -> EngineConfig:
    """The config with the plan's layout in it. Raises ConfigError where a flag contradicts the plan, and PlanError
    where the model or the machine is not the one that was planned for."""
    best, ranks = plan.layout, plan.ranks
    if config.max_memory is not None:
        raise ConfigError("--plan says how much of each GPU is taken, and so does --max-memory: leave one of them out")
    _check_model(plan, checkpoint)
    _check_runs(plan, checkpoint)
    on_gpus = _check_machine(plan, config, host)
    wanted: dict[str, object] = {
        "tensor_parallel_size": best.tensor_parallel,
        "pipeline_parallel_size": best.pipeline_parallel,
        "tensor_split": best.tensor_split,
        "pipeline_split": best.pipeline_split,
        "device": "cuda" if on_gpus else "cpu",
        "speculative_config": plan.speculative_config,
    }
    wanted |= _weights(canonical(best.precision), checkpoint)
    if number_bytes(best.kv_cache_dtype) == 1:
        wanted["kv_cache_dtype"] = "fp8"
    if plan.workload.max_model_len_given:
        wanted["max_model_len"] = plan.workload.max_model_len
    for name, value in wanted.items():
        _check_flag(plan, name, getattr(config, name), value)
    if plan.max_num_seqs is not None:
        said = None if config.max_num_seqs == DEFAULT_CONFIG.max_num_seqs else config.max_num_seqs
        _check_flag(plan, "max_num_seqs", said, plan.max_num_seqs)
        wanted["max_num_seqs"] = plan.max_num_seqs
    if config.max_num_batched_tokens is None:
        wanted["max_num_batched_tokens"] = best.max_num_batched_tokens
    if on_gpus:
        wanted["device_ids"] = config.device_ids or tuple(rank.gpu_index for rank in ranks)
        wanted["gpu_memory_utilization"] = _shares(plan, config)
    elif config.kv_cache_memory_bytes is None:
        wanted["kv_cache_memory_bytes"] = max(rank.kv_bytes for rank in ranks)
    if best.data_parallel > 1:
        logger.warning(
            "%s has %d replicas (%s); Weft runs one of them yet, %s: start the others as servers of their own%s",
            plan.path,
            best.data_parallel,
            best.name,
            devices(ranks) if on_gpus else "on the CPU",
            ", with --device-ids" if on_gpus else "",
        )
    return replace(config, **wanted)  # type: ignore[arg-type]


def check_carried_out(plan: PlanFile, made: Plan) -> None:
    """Raises PlanError where what will run is not what was planned: the file is another version's, or was edited."""
    for rank, place in zip(plan.ranks, made.places, strict=True):
        planned = (rank.first_layer, rank.layers, rank.first_q_head, rank.q_heads, rank.first_kv_head, rank.kv_heads)
        real = (
            *(place.layers.start, len(place.layers)),
            *(place.q_heads.start, len(place.q_heads)),
            *(place.kv_heads.start, len(place.kv_heads)),
        )
        if planned != real:
            raise PlanError(
                f"{plan.path} gives rank {place.rank} layers, heads and KV heads {_spans(planned)}; its splits make "
                f"that {_spans(real)}; plan again"
            )
    for rank, place in zip(plan.ranks, made.places, strict=True):
        more = made.weight_bytes(place.rank) - rank.weight_bytes
        if more > rank.kv_bytes:
            raise PlanError(
                f"{plan.path} counts on {format_bytes(rank.weight_bytes)} of {plan.layout.precision} weights on rank "
                f"{place.rank}; Weft holds {format_bytes(made.weight_bytes(place.rank))} there: plan again with "
                f"--precision {OF_DTYPE[made.dtype]}"
            )
    if number_bytes(plan.layout.kv_cache_dtype) != number_bytes(made.kv_dtype):
        raise PlanError(
            f"{plan.path} counts on a KV cache in {plan.layout.kv_cache_dtype}; Weft keeps it in {made.kv_dtype}; plan "
            "again without --kv-cache-dtype"
        )


def devices(ranks: Sequence[Rank]) -> str:
    """ "GPU 0", "GPUs 0,1" """
    return f"GPU{'s' * (len(ranks) > 1)} {','.join(str(rank.gpu_index) for rank in ranks)}"


def _spans(figures: Sequence[int]) -> str:
    return ", ".join(f"{first}-{first + count - 1}" for first, count in zip(figures[::2], figures[1::2], strict=True))


def _check_model(plan: PlanFile, checkpoint: Checkpoint) -> None:
    shape = checkpoint.shape
    if (shape.architecture, params(shape)) != (plan.model.architecture, plan.model.params):
        raise PlanError(
            f"{plan.path} is a plan for {plan.model.name} ({plan.model.architecture}, {plan.model.params:,} "
            f"parameters); {checkpoint.model} has {params(shape):,} ({shape.architecture}): plan again for it"
        )


def _check_runs(plan: PlanFile, checkpoint: Checkpoint) -> None:
    best, precision = plan.layout, canonical(plan.layout.precision)
    if best.expert_parallel > 1:
        raise PlanError(
            f"{plan.path} deals experts out to {best.expert_parallel} ranks, which Weft does not run yet; plan again "
            "with --no-enable-expert-parallel"
        )
    stored = checkpoint.format == "gguf" and precision in gguf_types.MIXES
    stored = stored or as_published(checkpoint.shape, precision) is not None
    if not stored and precision not in COMPUTED and not asked_for(precision):
        known = ", ".join((*COMPUTED, *dict.fromkeys(MADE.values())))
        raise PlanError(
            f"{plan.path} is a plan for {precision} weights, which Weft does not make of {checkpoint.model}; plan "
            f"again with --precision of {known}, or with --quantization"
        )


def _weights(precision: str, checkpoint: Checkpoint) -> dict[str, object]:
    """What the config has to say for weights to be held in a precision."""
    stored = checkpoint.quantised
    if precision in COMPUTED:
        # What is quantised would be held as it lies.
        return {"dtype": COMPUTED[precision], **({"quantization": "none"} if stored else {})}
    if as_published(checkpoint.shape, precision):
        return {}
    own = {kind.lower() for kind, _ in Counter(stored.values()).most_common(1)}
    asked = asked_for(precision)
    return {"quantization": asked} if asked and precision not in own else {}


def _check_machine(plan: PlanFile, config: EngineConfig, host: Host) -> bool:
    """Whether the plan is for GPUs, which are then those that it counts on."""
    ranks = plan.ranks
    if any(rank.node != ranks[0].node for rank in ranks):
        raise PlanError(f"{plan.path} lays one replica over several machines; Weft runs on one yet: plan with --gpus")
    if all(plan.hardware.types[rank.gpu].kind == "cpu" for rank in ranks):
        need = sum(rank.weight_bytes + rank.kv_bytes for rank in ranks)
        if config.kv_cache_memory_bytes is None and need > host.memory_free_bytes:
            raise PlanError(
                f"{plan.path} takes {format_bytes(need)} for weights and KV cache; of the memory of {host.hostname} "
                f"{format_bytes(host.memory_free_bytes)} are free: plan again here, or give --kv-cache-memory-bytes"
            )
        return False
    if not host.gpus:
        raise PlanError(
            f"{plan.path} is a plan for {', '.join(dict.fromkeys(rank.gpu for rank in ranks))}, and no GPU is visible "
            f"on {host.hostname}; plan again here: weft plan {plan.model.name} --json"
        )
    indices = config.device_ids or tuple(rank.gpu_index for rank in ranks)
    if len(indices) != len(ranks):
        raise ConfigError(
            f"device_ids names {len(indices)} GPUs; {plan.path} has {len(ranks)} ranks: give one each, or leave it out"
        )
    for index, rank in zip(indices, ranks, strict=True):
        if not 0 <= index < len(host.gpus):
            raise PlanError(
                f"{plan.path} uses GPU {index}; visible here are 0 to {len(host.gpus) - 1}: plan again here, or name "
                "others with --device-ids"
            )
        _check_gpu(plan, rank, host.gpus[index])
    return True


def _check_gpu(plan: PlanFile, rank: Rank, gpu: Gpu) -> None:
    here = spec_of(gpu).name
    if here != rank.gpu:
        raise PlanError(
            f"{plan.path} counts on {rank.gpu} as GPU {gpu.index}; here that is {here}: plan again here, or name "
            "another with --device-ids"
        )
    if gpu.total_bytes < rank.memory_bytes:
        raise PlanError(
            f"{plan.path} counts on {format_bytes(rank.memory_bytes)} of GPU {gpu.index}; here it has "
            f"{format_bytes(gpu.total_bytes)}: plan again here"
        )
    if gpu.total_bytes - gpu.held_bytes < rank.usable_bytes:
        holders = ", ".join(map(str, gpu.holders)) or "other processes"
        raise PlanError(
            f"{plan.path} takes {format_bytes(rank.usable_bytes)} of GPU {gpu.index}, of which {holders} hold "
            f"{format_bytes(gpu.held_bytes)}; end those, name another with --device-ids, or plan again with a lower "
            "--gpu-memory-utilization"
        )


def _check_flag(plan: PlanFile, name: str, said: object, planned: object) -> None:
    """What the user left out is no contradiction, and neither is another word for the same."""
    same = said in (None, "auto", planned)
    if name == "dtype":
        same = same or DTYPES.get(str(said)) == planned
    if name == "speculative_config" and not same:
        assert isinstance(said, dict)
        same = isinstance(planned, dict) and speculation.read(said) == speculation.read(planned)
    if name == "tensor_split" and not same:
        assert isinstance(said, tuple) and isinstance(planned, tuple)
        ratios = [[weight / sum(weights) for weight in weights] for weights in (said, planned)]
        same = len(said) == len(planned) and all(abs(a - b) < 1e-9 for a, b in zip(*ratios, strict=True))
    if not same:
        raise ConfigError(
            f"{name} is {_told(said)} and {plan.path} has {_told(planned)}; leave the flag out, or plan again with it"
        )


def _told(value: object) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return join_commas(value) if isinstance(value, tuple) else str(value)


def _shares(plan: PlanFile, config: EngineConfig) -> tuple[float, ...]:
    """Of each rank's GPU, what the plan takes of it. Raises ConfigError where the user wants another share."""
    planned = tuple((rank.held_bytes + rank.usable_bytes) / rank.memory_bytes for rank in plan.ranks)
    said = config.gpu_memory_utilization
    each = said * len(planned) if len(said) == 1 else said
    others = any(abs(a - b) > SAME_SHARE for a, b in zip(each, planned, strict=False))
    if others and said != DEFAULT_CONFIG.gpu_memory_utilization:
        raise ConfigError(
            f"gpu_memory_utilization is {_told(said)} and {plan.path} takes {_told(planned)}; leave the flag out, or "
            "plan again with it"
        )
    return planned
