"""Layout: from what the user said, what the model is and what the machine has, to the Plan that is executed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite, prod
from typing import TYPE_CHECKING

from weft.architectures.parameters import parameter_dims, parameters
from weft.architectures.shape import DTYPE_BYTES, DType, ModelShape
from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError
from weft.formats.schemes import QUANTIZATIONS
from weft.formatting import format_bytes, format_version
from weft.hardware.gpus import BF16_CAPABILITY
from weft.hardware.host import Host
from weft.plan.backends import ATTENTION_BACKENDS, KV_CACHE_DTYPES, kv_cache_dtype, own_backend, with_backend
from weft.plan.max_memory import of_devices, read
from weft.plan.placement import check_flags
from weft.plan.places import column_unit, places
from weft.plan.plan import Plan
from weft.plan.quantization import check_cuts, cut_as, quantised_tensors, quantization_of, tell_dequantised
from weft.plan.speculation import draft_plan
from weft.plan.split import split

if TYPE_CHECKING:
    from weft.formats.checkpoint import Checkpoint

logger = logging.getLogger("weft")

DTYPES: dict[str, DType] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}

# Tokens of a step at most, by device, until the planner has chosen. GPUs: the least that the planner chooses, twice
# EngineConfig.max_num_seqs. CPUs: of 512 to 4,096 the best for SmolLM2-135M on two cores.
BATCHED_TOKENS = {"cuda": 512, "cpu": 2048}


def layout(config: EngineConfig, checkpoint: Checkpoint, host: Host) -> Plan:
    """The plan for `checkpoint` on `host` under `config`. Pure: the same values give the same plan.

    What the config leaves open: one rank; the fewest tokens of a step that such a device is ever given
    (`planner.execution` chooses more where it can); whole layers per stage so that the slowest stage is the fastest
    possible, its head counted; GPUs in their order where there are any, else the CPU. Raises ConfigError for
    a value out of its range and PlanError for a layout that this model or this machine cannot have, each
    with what is possible.
    """
    check(config)
    shape = checkpoint.shape
    config = with_partition(config, host)
    weights = tensor_weights(config)
    device = device_kind(config, host)
    ranks = len(weights) * stage_count(config, shape)
    caps = of_devices(config.max_memory, len(host.gpus), on_cpu=device == "cpu", ids=config.device_ids)
    devices = rank_devices(config, host, device, ranks, caps)
    dtype = compute_dtype(config, checkpoint, host, devices)
    config = with_backend(config, shape, dtype, host, devices)
    stages = list(config.pipeline_split or stage_layers(shape, stage_count(config, shape)))
    schemes = quantised_tensors(config, checkpoint, dtype, devices)
    tell_dequantised(config, checkpoint, dtype, schemes)
    unit = column_unit(shape, cut_as(config, shape, schemes))
    ranked = places(shape, weights, stages, ffn_unit=unit)
    check_cuts(shape, ranked, schemes)
    plan = Plan(
        model=config.model,
        checkpoint=str(checkpoint.path),
        load_format=checkpoint.format,
        shape=shape,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype(config, host, devices),
        quantization=quantization_of(config, shape, schemes),
        schemes=schemes,
        places=ranked,
        devices=devices,
        uuids=tuple(gpu.uuid for gpu in host.named(devices)),
        cores=rank_cores(host, ranks),
        max_threads=host.threads,
        max_model_len=model_length(config, shape),
        max_model_len_given=config.max_model_len is not None,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or BATCHED_TOKENS[device],
        block_size=config.block_size,
        kv_cache_bytes=config.kv_cache_memory_bytes,
        gpu_memory_utilization=utilization(config, host, devices, caps),
        max_memory=caps,
        attention_backend=config.attention_backend,
        graphs=device == "cuda" and not config.enforce_eager,
        lookahead=lookahead(config, device, len(stages)),
        seed=config.seed,
    )
    check_weights_fit(plan, host)
    return plan


def lookahead(config: EngineConfig, device: str, stages: int) -> bool:
    """Whether steps are scheduled one ahead: on GPUs, which would wait for the scheduler. Not in a pipeline, where
    as many steps are under way as there are stages."""
    wanted = device == "cuda" if config.async_scheduling is None else config.async_scheduling
    return wanted and stages == 1


def check(config: EngineConfig) -> None:
    """Raises ConfigError for the first value that is out of its range, whatever the model and the machine."""
    counts: dict[str, int | None] = {
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "block_size": config.block_size,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_queued_reqs": config.max_num_queued_reqs,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more")
    choices = {
        "dtype": (config.dtype, ("auto", *DTYPES)),
        "quantization": (config.quantization, QUANTIZATIONS),
        "device": (config.device, ("auto", "cpu", "cuda")),
        "scheduling_policy": (config.scheduling_policy, ("fcfs", "priority")),
        "executor": (config.executor or "inline", ("inline", "processes")),
        "attention_backend": (own_backend(config.attention_backend), ATTENTION_BACKENDS),
        "kv_cache_dtype": (config.kv_cache_dtype, KV_CACHE_DTYPES),
    }
    for name, (choice, known) in choices.items():
        if choice not in known:
            raise ConfigError(f"{name} is {choice!r}; it must be one of {', '.join(known)}")
    for share in config.gpu_memory_utilization:
        if not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization is {share}; it is a share of each GPU's memory, above 0 up to 1")
    if config.device_map is not None:
        if config.plan is not None:
            raise ConfigError("--plan says where each layer runs, and so does --device-map: leave one of them out")
        check_flags(config.device_map, vars(config))
    if config.max_memory is not None:
        read(config.max_memory)  # or ConfigError
    if config.seed < 0:
        raise ConfigError(f"seed is {config.seed}; it must be 0 or more")
    if config.tensor_split == ():
        raise ConfigError("tensor_split is empty; give one weight per rank, as in 2,1")
    for weight in config.tensor_split or ():
        if not isfinite(weight) or weight <= 0:
            raise ConfigError(
                f"tensor_split has a weight of {weight}; each must be above 0 (--device-ids leaves a GPU out)"
            )


def with_partition(config: EngineConfig, host: Host) -> EngineConfig:
    """The config with the layers of each stage from the environment, where it leaves them open and that says it."""
    partition = host.environment.get("VLLM_PP_LAYER_PARTITION")
    if partition and config.pipeline_split is None:
        try:
            stages = tuple(int(part) for part in partition.split(","))
        except ValueError:
            raise ConfigError(
                f"VLLM_PP_LAYER_PARTITION is {partition!r}; it must be layers per stage, as in 20,12"
            ) from None
        if config.pipeline_parallel_size not in (None, len(stages)):
            raise ConfigError(
                f"VLLM_PP_LAYER_PARTITION={partition} has {len(stages)} stages and --pipeline-parallel-size is "
                f"{config.pipeline_parallel_size}; make them agree or unset the variable"
            )
        config = replace(config, pipeline_split=stages)
    return config


def tensor_weights(config: EngineConfig) -> tuple[float, ...]:
    """Each tensor-parallel rank's share, in the ratio of these weights."""
    if config.tensor_split is None:
        return (1.0,) * (config.tensor_parallel_size or 1)
    if config.tensor_parallel_size not in (None, len(config.tensor_split)):
        raise ConfigError(
            f"tensor_split has {len(config.tensor_split)} weights and tensor_parallel_size is "
            f"{config.tensor_parallel_size}; give one weight per rank, or only tensor_split"
        )
    return config.tensor_split


def stage_count(config: EngineConfig, shape: ModelShape) -> int:
    """How many pipeline stages there are."""
    stages = len(config.pipeline_split) if config.pipeline_split is not None else config.pipeline_parallel_size or 1
    if config.pipeline_parallel_size not in (None, stages):
        raise ConfigError(
            f"pipeline_split has {stages} stages and pipeline_parallel_size is {config.pipeline_parallel_size}; "
            "give one number of layers per stage, or only pipeline_split"
        )
    if not 1 <= stages <= shape.layers:
        raise PlanError(
            f"{stages} pipeline stages for a model of {shape.layers} layers; use 1 to {shape.layers}, "
            "and tensor parallel for the rest"
        )
    return stages


def stage_layers(shape: ModelShape, stages: int) -> list[int]:
    """Layers per stage, so that the slowest stage is as fast as can be.

    A stage's time is the weights that a token goes through: its layers, and on the last stage the head as
    well; looking up an embedding costs none. Left-over layers go to the later stages, since the first holds
    the embedding's bytes.
    """
    if stages == 1:
        return [shape.layers]
    whole = places(shape, [1.0], [shape.layers])[0]
    layer = head = 0
    for parameter in parameters(shape):
        size = prod(parameter_dims(shape, whole, parameter))
        layer += size * (parameter.where == "layer")
        head += size * (parameter.where == "head")

    def layers(last: int) -> list[int]:
        before = split(shape.layers - last, [1.0] * (stages - 1), minimum=1)
        return [*(len(r) for r in reversed(before)), last]

    def slowest(last: int) -> tuple[int, int]:
        *before, end = layers(last)
        return max(max(before) * layer, end * layer + head), -end

    return layers(min(range(1, shape.layers - stages + 2), key=slowest))


def device_kind(config: EngineConfig, host: Host) -> str:
    """ "cuda" or "cpu"."""
    if config.device == "cuda" and not host.gpus:
        raise ConfigError(
            "device is cuda, but no GPU is visible here; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    if config.device == "auto":
        return "cuda" if host.gpus else "cpu"
    return config.device


def rank_devices(config: EngineConfig, host: Host, device: str, ranks: int, caps: Mapping[str, int]) -> tuple[str, ...]:
    """Each rank's device. `device_ids` may name a GPU twice: its ranks then share its memory. With `caps` it is one of
    those."""
    ids = config.device_ids
    if device == "cpu":
        if ids is not None:
            raise ConfigError(
                f"device_ids {','.join(map(str, ids))} names GPUs, but the ranks run on the CPU; leave it out"
            )
        return ("cpu",) * ranks
    visible = len(host.gpus)
    if ids is None:
        if ranks > visible:
            raise PlanError(
                f"{ranks} ranks need {ranks} GPUs and {visible} {'is' if visible == 1 else 'are'} visible; lower "
                "--tensor-parallel-size or --pipeline-parallel-size, use --device cpu, or let ranks share a GPU "
                f"with --device-ids {','.join(str(n % visible) for n in range(ranks))}"
            )
        ids = tuple(gpu.index for gpu in host.named(caps))[:ranks] if caps else tuple(range(ranks))
        if len(ids) < ranks:
            raise PlanError(
                f"{ranks} ranks need {ranks} GPUs and --max-memory leaves {len(ids)}; name more there, or lower "
                "--tensor-parallel-size or --pipeline-parallel-size"
            )
    if len(ids) != ranks:
        raise ConfigError(
            f"device_ids names {len(ids)} GPUs for {ranks} {'rank' if ranks == 1 else 'ranks'}; give one per rank, or "
            "set --tensor-parallel-size and --pipeline-parallel-size to match"
        )
    for number in ids:
        if not 0 <= number < visible:
            raise ConfigError(f"device_ids names GPU {number}; visible here are 0 to {visible - 1}")
    return tuple(f"cuda:{number}" for number in ids)


def compute_dtype(config: EngineConfig, checkpoint: Checkpoint, host: Host, devices: Sequence[str]) -> DType:
    """The dtype that the model computes in.

    "auto" is the checkpoint's own, but bfloat16 for a float32 checkpoint (half the bytes to read per token;
    ask for float32 to keep it), for a GGUF file, whose types are for storage, and on a CPU for weights that GPTQ or
    AWQ quantised, which its kernels do not multiply in float16; float16 in place of bfloat16 where a GPU is too old to
    compute in it.
    """
    old = [gpu for gpu in host.named(devices) if gpu.capability < BF16_CAPABILITY]
    if config.dtype == "auto":
        own: DType = "bfloat16" if checkpoint.format == "gguf" else checkpoint.shape.dtype
        on_cpu = checkpoint.shape.published is not None and device_kind(config, host) == "cpu"
        dtype: DType = "bfloat16" if own == "float32" or on_cpu else own
        return "float16" if old and dtype == "bfloat16" else dtype
    dtype = DTYPES[config.dtype]
    if old and dtype == "bfloat16":
        raise ConfigError(
            f"{old[0].name} (compute capability {format_version(old[0].capability)}) does not compute in "
            "bfloat16; use --dtype float16"
        )
    return dtype


def rank_cores(host: Host, ranks: int) -> tuple[tuple[int, ...], ...]:
    """This host's cores divided among its ranks, neighbours together; with more ranks than cores, one each in
    turn. OMP_NUM_THREADS limits a rank's threads and not its cores: engines side by side would all be bound to the
    first few."""
    cores = host.cores
    if ranks > len(cores):
        return tuple((cores[rank % len(cores)],) for rank in range(ranks))
    return tuple(cores[part.start : part.stop] for part in split(len(cores), [1.0] * ranks, minimum=1))


def model_length(config: EngineConfig, shape: ModelShape) -> int:
    """The longest request, prompt and answer together, in tokens; the model's own length unless given."""
    if config.max_model_len is None:
        return shape.max_positions
    if config.max_model_len > shape.longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; this model goes up to {shape.longest} tokens: give that or less"
        )
    return config.max_model_len


def utilization(config: EngineConfig, host: Host, devices: Sequence[str], caps: Mapping[str, int]) -> tuple[float, ...]:
    """Each rank's share of its GPU, within what may be taken of it."""
    shares, ranks = config.gpu_memory_utilization, len(devices)
    if len(shares) not in (1, ranks):
        raise ConfigError(
            f"gpu_memory_utilization has {len(shares)} values for {ranks} {'rank' if ranks == 1 else 'ranks'}; give "
            "one, or one per rank"
        )
    each = shares * ranks if len(shares) == 1 else shares
    totals = {f"cuda:{gpu.index}": gpu.total_bytes for gpu in host.gpus}
    capped = {name: size / totals[name] for name, size in caps.items() if name in totals}
    return tuple(min(share, capped.get(name, 1.0)) for share, name in zip(each, devices, strict=True))


def check_weights_fit(plan: Plan, host: Host) -> None:
    """Raises PlanError where a device cannot even hold its weights, before anything is read."""
    need: Counter[str] = Counter()
    for place, device in zip(plan.places, plan.devices, strict=True):
        need[device] += plan.weight_bytes(place.rank)
    if plan.speculation and plan.speculation.draft:
        draft = draft_plan(plan)
        need[draft.devices[0]] += draft.weight_bytes(0)
    for device, size in need.items():
        if device == "cpu":
            free, where, holders = host.memory_free_bytes, f"the memory of {host.hostname}", ""
        else:
            (gpu,) = host.named([device])
            free, where = gpu.free_bytes, f"{device}, {gpu.name}"
            holders = f" (in use by {', '.join(map(str, gpu.holders))})" if gpu.holders else ""
        cap = plan.max_memory.get(device)
        if cap is not None and size > cap:
            raise PlanError(
                f"{format_bytes(size)} of weights exceed the {format_bytes(cap)} that --max-memory leaves of {where}; "
                + ("raise it" if device == "cpu" else "raise it, or cut the model over more GPUs")
            )
        if size > free:
            smaller = "" if DTYPE_BYTES[plan.dtype] == 2 else ", a 16-bit --dtype"
            raise PlanError(
                f"{size / 1e9:.1f} GB of weights do not fit {where}: {free / 1e9:.1f} GB are free{holders}; free some, "
                f"or use more GPUs (--tensor-parallel-size, --pipeline-parallel-size){smaller} or a smaller model"
            )
