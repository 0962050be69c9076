"""A plan file applied to this machine, or the reason for which it cannot be."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from weft.checkpoint.architectures.kv import number_bytes
from weft.checkpoint.architectures.parameters import parameter_count
from weft.checkpoint.architectures.place import Place
from weft.checkpoint.files import gguf_types
from weft.checkpoint.quantised.precision import OF_DTYPE, canonical, own_quantization
from weft.checkpoint.quantised.schemes import ONLINE_QUANTIZATIONS, online_quantization
from weft.config import DEFAULT_CONFIG, DeviceIds, EngineConfig
from weft.errors import ConfigError, PlanError
from weft.formatting import format_bytes, join_commas
from weft.machine.hardware.gpus import gpu_spec
from weft.machine.hardware.host import Host
from weft.plan import speculation
from weft.plan.layout import DTYPES
from weft.plan.limits import limits_of
from weft.plan.plan import Plan
from weft.planner.report.plan_file import PlanFile, PlannedRank

if TYPE_CHECKING:
    from weft.checkpoint.checkpoint import Checkpoint
    from weft.machine.hardware.topology import Gpu

COMPUTED = {precision: dtype for dtype, precision in OF_DTYPE.items()}
SAME_SHARE = 0.005  # share of a GPU's memory: shares that differ by less are taken as equal


def apply_plan_file(plan: PlanFile, config: EngineConfig, checkpoint: Checkpoint, host: Host) -> EngineConfig:
    """The config with the plan's layout in it.

    Raises ConfigError if a flag contradicts the plan, and PlanError if the plan is for another model or machine.
    """
    if config.max_memory is not None:
        raise ConfigError(
            "--plan sets how much of each GPU is used, and so does --max-memory: leave one of them out",
            code="plan-beside-max-memory",
        )
    _check_model(plan, checkpoint)
    _check_precision(plan, checkpoint)
    on_gpus = _check_machine(plan, config, host)
    wanted = _layout_fields(plan, checkpoint, on_gpus)
    for name, value in wanted.items():
        _check_flag(plan, name, getattr(config, name), value)
    wanted |= _limit_fields(plan, config) | _memory_fields(plan, config, on_gpus)
    return replace(config, **wanted)  # type: ignore[arg-type]


def _layout_fields(plan: PlanFile, checkpoint: Checkpoint, on_gpus: bool) -> dict[str, object]:
    """Fields of a config that a flag must not contradict."""
    best = plan.layout
    fields: dict[str, object] = {
        **best.parallelism.fields,
        "device": "cuda" if on_gpus else "cpu",
        "speculative_config": plan.speculative_config,
    }
    fields |= _weights_fields(canonical(best.precision), checkpoint)
    if number_bytes(best.kv_cache_dtype) == 1:
        fields["kv_cache_dtype"] = "fp8"
    if plan.workload.max_model_len_given:
        fields["max_model_len"] = plan.workload.max_model_len
    return fields


def _limit_fields(plan: PlanFile, config: EngineConfig) -> dict[str, object]:
    fields: dict[str, object] = {}
    given, usual = limits_of(config), limits_of(DEFAULT_CONFIG)
    for name, limit in limits_of(plan).items():
        if limit is not None:
            _check_flag(plan, name, None if given[name] == usual[name] else given[name], limit)
            fields[name] = limit
    if config.max_num_batched_tokens is None:
        fields["max_num_batched_tokens"] = plan.layout.max_num_batched_tokens
    return fields


def _memory_fields(plan: PlanFile, config: EngineConfig, on_gpus: bool) -> dict[str, object]:
    ranks = plan.ranks
    if on_gpus:
        return {
            "device_ids": config.device_ids or _device_ids(plan),
            "gpu_memory_utilization": _shares(plan, config),
        }
    if config.kv_cache_memory_bytes is None:
        return {"kv_cache_memory_bytes": max(rank.kv_bytes for rank in ranks)}
    return {}


def check_applied(plan: PlanFile, actual: Plan) -> None:
    """Check that the engine's plan is the file's.

    Raises PlanError if not: the file is from another version, or was edited.
    """
    for rank, place in zip(plan.ranks, actual.places, strict=True):
        _check_place(plan, rank, place)
    for rank, place in zip(plan.ranks, actual.places, strict=True):
        excess = actual.weight_bytes(place.rank) - rank.weight_bytes
        if excess > rank.kv_bytes:
            raise PlanError(
                f"{plan.path} counts on {format_bytes(rank.weight_bytes)} of {plan.layout.precision} weights on rank "
                f"{place.rank}; Weft holds {format_bytes(actual.weight_bytes(place.rank))} there: plan again with "
                f"--precision {OF_DTYPE[actual.dtype]}",
                code="plan-weights-differ",
            )
    if number_bytes(plan.layout.kv_cache_dtype) != number_bytes(actual.kv_dtype):
        raise PlanError(
            f"{plan.path} counts on a KV cache in {plan.layout.kv_cache_dtype}; Weft keeps it in {actual.kv_dtype}; "
            "plan again without --kv-cache-dtype",
            code="plan-kv-cache-dtype-differs",
        )


def _check_place(plan: PlanFile, rank: PlannedRank, place: Place) -> None:
    planned = {
        "layers": (rank.first_layer, rank.layers),
        "heads": (rank.first_q_head, rank.q_heads),
        "KV heads": (rank.first_kv_head, rank.kv_heads),
        "experts": (rank.first_expert, rank.experts),
    }
    spans = (place.layers, place.q_heads, place.kv_heads, place.experts)
    actual = {name: (span.start, len(span)) for name, span in zip(planned, spans, strict=True)}
    for name, span in planned.items():
        if span != actual[name]:
            raise PlanError(
                f"{plan.path} gives rank {place.rank} {name} {_numbers(*span)}; its splits make that "
                f"{_numbers(*actual[name])}; plan again",
                code="plan-spans-differ",
            )


def _numbers(first: int, count: int) -> str:
    return f"{first}-{first + count - 1}" if count else "none"


def _check_model(plan: PlanFile, checkpoint: Checkpoint) -> None:
    shape = checkpoint.shape
    if (shape.architecture, parameter_count(shape)) != (plan.model.architecture, plan.model.params):
        raise PlanError(
            f"{plan.path} is a plan for {plan.model.name} ({plan.model.architecture}, {plan.model.params:,} "
            f"parameters); {checkpoint.model} has {parameter_count(shape):,} ({shape.architecture}): plan again for it",
            code="plan-for-other-model",
        )


def _check_precision(plan: PlanFile, checkpoint: Checkpoint) -> None:
    precision = canonical(plan.layout.precision)
    stored = checkpoint.format == "gguf" and precision in gguf_types.MIXES
    stored = stored or own_quantization(checkpoint.shape, precision) is not None
    if not stored and precision not in COMPUTED and not online_quantization(precision):
        known = ", ".join((*COMPUTED, *dict.fromkeys(ONLINE_QUANTIZATIONS.values())))
        raise PlanError(
            f"{plan.path} is a plan for {precision} weights, to which Weft cannot convert {checkpoint.model}; plan "
            f"again with one of --precision {known}, or with --quantization",
            code="plan-precision-not-converted",
        )


def _weights_fields(precision: str, checkpoint: Checkpoint) -> dict[str, object]:
    """Fields of a config that make the engine hold weights in a precision."""
    stored = checkpoint.quantised
    if precision in COMPUTED:
        # Quantised weights would otherwise be held as they are stored.
        return {"dtype": COMPUTED[precision], **({"quantization": "none"} if stored else {})}
    if own_quantization(checkpoint.shape, precision):
        return {}
    own = {kind.lower() for kind, _ in Counter(stored.values()).most_common(1)}
    quantization = online_quantization(precision)
    return {"quantization": quantization} if quantization and precision not in own else {}


def _check_machine(plan: PlanFile, config: EngineConfig, host: Host) -> bool:
    """Check the machine against the plan, and return True if the plan is for GPUs.

    Raises PlanError if the machine lacks the plan's CPU memory or GPUs.
    """
    ranks = plan.ranks
    if len({rank.device.node for rank in ranks}) > 1:
        raise PlanError(
            f"{plan.path} puts one replica on several machines; Weft runs on one machine so far: plan with --gpus",
            code="plan-replica-on-several-machines",
        )
    if all(rank.device.kind == "cpu" for rank in ranks):
        _check_cpu(plan, config, host)
        return False
    _check_gpus(plan, config, host)
    return True


def _check_cpu(plan: PlanFile, config: EngineConfig, host: Host) -> None:
    need = sum(rank.weight_bytes + rank.kv_bytes for rank in plan.ranks)
    if config.kv_cache_memory_bytes is None and need > host.memory_free_bytes:
        raise PlanError(
            f"{plan.path} takes {format_bytes(need)} for weights and KV cache; {host.hostname} has "
            f"{format_bytes(host.memory_free_bytes)} of free memory: plan again here, or give --kv-cache-memory-bytes",
            code="plan-exceeds-host-memory",
        )


def _check_gpus(plan: PlanFile, config: EngineConfig, host: Host) -> None:
    ranks = plan.ranks
    if not host.gpus:
        raise PlanError(
            f"{plan.path} is a plan for {', '.join(dict.fromkeys(rank.gpu for rank in ranks))}, and no GPU is visible "
            f"on {host.hostname}; plan again here: weft plan {plan.model.name} --json",
            code="plan-without-gpu-here",
        )
    indices = config.device_ids or _device_ids(plan)
    if len(indices) != len(ranks):
        raise ConfigError(
            f"device_ids names {len(indices)} GPUs; {plan.path} has {len(ranks)} ranks: give one each, or leave it out",
            code="device-ids-not-per-rank",
        )
    for number, (index, rank) in enumerate(zip(indices, ranks, strict=True)):
        if (index == "cpu") != (rank.device.kind == "cpu"):
            raise ConfigError(
                f"device_ids puts rank {number} on {index}, and {plan.path} counts on {rank.gpu}: leave it out",
                code="device-ids-of-other-kind",
            )
        if index == "cpu":
            continue
        if not 0 <= index < len(host.gpus):
            raise PlanError(
                f"{plan.path} uses GPU {index}; visible here are 0 to {len(host.gpus) - 1}: plan again here, or name "
                "others with --device-ids",
                code="plan-beyond-gpus-here",
            )
        _check_gpu(plan, rank, host.gpus[index])


def _device_ids(plan: PlanFile) -> DeviceIds:
    """The device of each rank of the file: a GPU's number, or the CPU."""
    return tuple("cpu" if rank.device.kind == "cpu" else rank.device.index for rank in plan.ranks)


def _check_gpu(plan: PlanFile, rank: PlannedRank, gpu: Gpu) -> None:
    here = gpu_spec(gpu).name
    if here != rank.gpu:
        raise PlanError(
            f"{plan.path} counts on {rank.gpu} as GPU {gpu.index}; here that is {here}: plan again here, or name "
            "another with --device-ids",
            code="plan-for-other-gpu",
        )
    if gpu.total_bytes < rank.memory_bytes:
        raise PlanError(
            f"{plan.path} counts on {format_bytes(rank.memory_bytes)} of GPU {gpu.index}; here it has "
            f"{format_bytes(gpu.total_bytes)}: plan again here",
            code="plan-gpu-smaller-here",
        )
    if gpu.total_bytes - gpu.held_bytes < rank.usable_bytes:
        holders = ", ".join(map(str, gpu.holders)) or "other processes"
        raise PlanError(
            f"{plan.path} takes {format_bytes(rank.usable_bytes)} of GPU {gpu.index}, of which {holders} hold "
            f"{format_bytes(gpu.held_bytes)}; end those, name another with --device-ids, or plan again with a lower "
            "--gpu-memory-utilization",
            code="plan-gpu-in-use",
        )


def _check_flag(plan: PlanFile, name: str, given: object, planned: object) -> None:
    """Raise ConfigError if a flag contradicts the plan.

    A flag that was left out (None, "auto", or False for a switch), or is another word for the same, does not.
    """
    if given not in (None, "auto", False, planned) and not _means_the_same(name, given, planned):
        raise ConfigError(
            f"{name} is {_format_value(given)} and {plan.path} has {_format_value(planned)}; leave the flag out, or "
            "plan again with it",
            code="flag-contradicts-plan",
        )


def _means_the_same(name: str, given: object, planned: object) -> bool:
    match name:
        case "dtype":
            return DTYPES.get(str(given)) == planned
        case "speculative_config":
            if not isinstance(given, Mapping) or not isinstance(planned, Mapping):
                return False
            return speculation.parse_speculative_config(given) == speculation.parse_speculative_config(planned)
        case "tensor_split":
            return isinstance(given, tuple) and isinstance(planned, tuple) and _same_ratios(given, planned)
    return False


def _same_ratios(given: tuple[float, ...], planned: tuple[float, ...]) -> bool:
    if len(given) != len(planned):
        return False
    ratios = [[weight / sum(weights) for weight in weights] for weights in (given, planned)]
    return all(abs(a - b) < 1e-9 for a, b in zip(*ratios, strict=True))


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return join_commas(value) if isinstance(value, tuple) else str(value)


def _shares(plan: PlanFile, config: EngineConfig) -> tuple[float, ...]:
    """The share of its GPU that the plan takes for each rank. Raises ConfigError if a flag gives another share."""
    planned = tuple((rank.held_bytes + rank.usable_bytes) / rank.memory_bytes for rank in plan.ranks)
    given = config.gpu_memory_utilization
    each = given * len(planned) if len(given) == 1 else given
    differ = any(abs(a - b) > SAME_SHARE for a, b in zip(each, planned, strict=False))
    if differ and given != DEFAULT_CONFIG.gpu_memory_utilization:
        raise ConfigError(
            f"gpu_memory_utilization is {_format_value(given)} and {plan.path} takes {_format_value(planned)}; "
            "leave the flag out, or plan again with it",
            code="flag-contradicts-plan",
        )
    return planned
