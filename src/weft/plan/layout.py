"""The Plan that is executed, from a user's config, a checkpoint and the facts about this machine."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from weft.checkpoint.architectures.library import PREFIX
from weft.checkpoint.architectures.parameters import model_parameters, parameter_dims
from weft.checkpoint.architectures.place import whole
from weft.checkpoint.architectures.shape import DTYPE_BYTES, DType, ModelShape
from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError
from weft.formatting import format_bytes, format_version
from weft.machine.hardware.gpus import BF16_CAPABILITY
from weft.machine.hardware.host import Host
from weft.machine.hardware.topology import Gpu
from weft.plan.backends import (
    AttentionSpec,
    check_backend_name,
    check_equal_attention,
    choose_attention_backend,
    kernel_device,
    kv_cache_dtype,
)
from weft.plan.decision import Decision
from weft.plan.determinism import fixed_order_backend
from weft.plan.devices import RankDevices, choose_devices, rank_cores, rank_uuids, utilization
from weft.plan.max_memory import parse_max_memory
from weft.plan.parallelism import Parallelism, asked_parallelism
from weft.plan.placement import check_flags
from weft.plan.places import engine_places
from weft.plan.plan import Plan, RankDevice, named_devices
from weft.plan.products import choose_product_backend, repacking_bytes
from weft.plan.quantization import (
    HeldWeights,
    check_cuts,
    held_weights,
    log_dequantised,
)
from weft.plan.shards import check_shards
from weft.plan.speculation import draft_plan
from weft.plan.split import split

if TYPE_CHECKING:
    from weft.checkpoint.checkpoint import Checkpoint

logger = logging.getLogger("weft")

DTYPES: dict[str, DType] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}

# Largest number of tokens in a step, by device, unless the planner or the user gives another one. GPUs: the smallest
# number that the planner chooses, twice EngineConfig.max_num_seqs. CPUs: of 512 to 4,096 the best for SmolLM2-135M on
# two cores.
BATCHED_TOKENS = {"cuda": 512, "cpu": 2048}


class ChosenKernels(NamedTuple):
    """The numbers that an engine computes with, and the backends that do."""

    dtype: Decision[DType]
    cache_dtype: str
    attention: Decision[str]
    held: HeldWeights
    products: Decision[str]
    deterministic: bool


def build_plan(config: EngineConfig, checkpoint: Checkpoint, host: Host) -> Plan:
    """Build the plan for `checkpoint` on `host` under `config`, which `check_config` has checked.

    Pure: the same values give the same plan. Every decision is made once, and later ones are made from its value.
    Defaults for what the config leaves open:

    - ranks: one;
    - tokens in a step: BATCHED_TOKENS (`planner.execution.execution` chooses more if possible);
    - layers per stage: the layers that make the slowest stage as fast as possible (`layers_by_weight`);
    - devices: GPUs in their order, or the CPU if there are no GPUs.

    Raises ConfigError for a value out of its range and PlanError for a layout that this model or this machine cannot
    have. Both name what is possible.
    """
    shape = checkpoint.shape
    cut = engine_parallelism(config, shape, host.environment)
    devices = choose_devices(config, host, cut)
    kernels = choose_kernels(config, checkpoint, host, devices)
    schemes = kernels.held.schemes
    places = engine_places(shape, cut, kernels.held.precision)
    check_cuts(shape, places, schemes)
    plan = Plan(
        model=config.model,
        checkpoint=str(checkpoint.path),
        load_format=checkpoint.format,
        shape=shape,
        dtype=kernels.dtype.value,
        kv_cache_dtype=kernels.cache_dtype,
        quantization=kernels.held.quantization,
        schemes=schemes,
        places=places,
        devices=named_devices(*devices.names),
        uuids=rank_uuids(host, devices.names),
        cores=rank_cores(host, devices.names),
        max_threads=host.threads,
        max_model_len=model_length(config, shape),
        max_model_len_given=config.max_model_len is not None,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or BATCHED_TOKENS[devices.kind],
        block_size=config.block_size,
        kv_cache_bytes=config.kv_cache_memory_bytes,
        gpu_memory_utilization=utilization(config.gpu_memory_utilization, host, devices),
        max_memory=devices.caps,
        attention_backend=kernels.attention.value,
        product_backend=kernels.products.value,
        deterministic=kernels.deterministic,
        graphs=devices.kind == "cuda" and not config.enforce_eager and shape.library is None,
        lookahead=lookahead(config, devices.kind, cut.pipeline_parallel),
        seed=config.seed,
    )
    if checkpoint.sharded is not None:
        check_shards(plan, checkpoint.sharded)
    check_weights_fit(plan, host)
    if shape.library is not None:
        logger.info(
            "%s runs through Transformers' class, with Weft's products and attention: no layers are fused, and no CUDA "
            "graphs are captured",
            shape.architecture.removeprefix(PREFIX),
        )
    return plan


def choose_kernels(config: EngineConfig, checkpoint: Checkpoint, host: Host, devices: RankDevices) -> ChosenKernels:
    """The numbers and the kernels of an engine on these devices, each with what decided it.

    Raises ConfigError for a choice of the user's that these devices or this model cannot have.
    """
    shape, device = checkpoint.shape, kernel_device(host, devices.names)
    dtype = compute_dtype(config.dtype, checkpoint, host, devices.names)
    cache_dtype = kv_cache_dtype(config.kv_cache_dtype, shape, () if "cpu" in devices.names else device.cards)
    spec = AttentionSpec.from_shape(shape, dtype.value, fp8_cache=cache_dtype == "fp8")
    check_equal_attention(shape)
    fixed = fixed_order_backend(config, shape, spec, host, devices.names)
    attention = fixed or choose_attention_backend(config.attention_backend, host.environment, spec, device)
    held = held_weights(config.quantization, attention.value, checkpoint, dtype.value, devices.names)
    schemes = set(held.schemes.values())
    if fixed:
        products = Decision("own", fixed.reason)
    else:
        products = choose_product_backend(config.product_backend, attention.value, dtype.value, schemes, device)
    log_dequantised(config, attention.value, checkpoint, dtype.value, held.schemes)
    logger.debug("dtype %s (%s), attention %s (%s), products %s (%s)", *dtype, *attention, *products)
    return ChosenKernels(dtype, cache_dtype, attention, held, products, deterministic=fixed is not None)


def lookahead(config: EngineConfig, device: str, stages: int) -> bool:
    """Return True if each step is scheduled before the tokens of the previous one are known.

    The default is True on GPUs, which would otherwise wait for the scheduler. A pipeline never looks ahead: it has as
    many steps in flight as stages.
    """
    wanted = device == "cuda" if config.async_scheduling is None else config.async_scheduling
    return wanted and stages == 1


def check_config(config: EngineConfig) -> None:
    """Check what EngineConfig does not check itself: rules for several fields, and values with a form of their own.

    Raises ConfigError for the first value that is wrong for every model and machine.
    """
    check_backend_name(config.attention_backend)
    for share in config.gpu_memory_utilization:
        if not 0 < share <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {share}; it is a share of each GPU's memory, above 0 up to 1",
                code="bad-utilization",
            )
    asked_parallelism(vars(config))
    if config.device_map is not None:
        if config.plan is not None:
            raise ConfigError(
                "--plan says where each layer runs, and so does --device-map: leave one of them out",
                code="plan-beside-device-map",
            )
        check_flags(config.device_map, vars(config))
    if config.max_memory is not None:
        parse_max_memory(config.max_memory)  # raises ConfigError


def engine_parallelism(
    config: EngineConfig, shape: ModelShape, environment: Mapping[str, str] | None = None
) -> Parallelism:
    """The cut of one engine: the config's, and the default for each part that it leaves open.

    Raises as `asked_parallelism` and `Parallelism.check`.
    """
    cut = asked_parallelism(vars(config), environment).of_one_engine()
    cut.check(shape)
    layers = cut.pipeline_split or tuple(layers_by_weight(shape, cut.pipeline_parallel))
    return cut.changed(Parallelism(pipeline_split=layers))


def layers_by_weight(shape: ModelShape, stages: int) -> list[int]:
    """Number of layers of each stage, so that the slowest stage is as fast as possible.

    The time of a stage is taken as the weights that a token goes through: its layers, and on the last stage the head as
    well; looking up an embedding takes none. Left-over layers go to the later stages, since the first stage holds the
    embedding's bytes.
    """
    if stages == 1:
        return [len(shape.layers)]
    place = whole(shape)
    layers_size = head_size = 0
    for parameter, layer in model_parameters(shape):
        size = prod(parameter_dims(place, parameter))
        layers_size += size * (layer is not None)
        head_size += size * (parameter.where == "head")
    layer_size = layers_size / len(shape.layers)

    def layers(last: int) -> list[int]:
        before = split(len(shape.layers) - last, [1.0] * (stages - 1), minimum=1)
        return [*(len(part) for part in reversed(before)), last]

    def slowest(last: int) -> tuple[float, int]:
        *before, end = layers(last)
        return max(max(before) * layer_size, end * layer_size + head_size), -end

    return layers(min(range(1, len(shape.layers) - stages + 2), key=slowest))


def _check_float16_on_cpu(checkpoint: Checkpoint, old: Gpu) -> None:
    """Raise ConfigError if the CPU cannot compute in float16 together with a GPU that is too old for bfloat16."""
    published = checkpoint.shape.published
    if published is not None:
        raise ConfigError(
            f"{old.name} (compute capability {format_version(old.capability)}) does not compute in bfloat16, and the "
            f"CPU does not multiply {published.precision} weights in float16; leave the CPU out, or load a checkpoint "
            "in 16 bits",
            code="gpu-without-bfloat16",
        )


def _dtype_beside_old_gpus(checkpoint: Checkpoint, old: Sequence[Gpu], *, on_cpu: bool) -> Decision[DType]:
    """The dtype for "auto", where the GPUs `old` do not compute in bfloat16."""
    dtype = _auto_dtype(checkpoint, on_cpu=on_cpu)
    if old and on_cpu:
        _check_float16_on_cpu(checkpoint, old[0])
    return Decision("float16", old[0].name) if old and dtype.value == "bfloat16" else dtype


def compute_dtype(wanted: str, checkpoint: Checkpoint, host: Host, devices: Sequence[str]) -> Decision[DType]:
    """The dtype that the model computes in. Raises ConfigError for bfloat16 on a GPU that is too old.

    "auto" is the checkpoint's own dtype, with these exceptions:

    - bfloat16 for a float32 checkpoint: half the bytes to read per token (dtype float32 keeps them);
    - bfloat16 for a GGUF file, whose types are for storage;
    - bfloat16 if a CPU computes, alone or with GPUs, for weights that GPTQ or AWQ quantised: the CPU kernels do not
      multiply them in float16;
    - float16 in place of bfloat16 on GPUs that are too old to compute in bfloat16.
    """
    old = [gpu for gpu in host.gpus_of(devices) if gpu.capability < BF16_CAPABILITY]
    if wanted == "auto":
        return _dtype_beside_old_gpus(checkpoint, old, on_cpu="cpu" in devices)
    dtype = DTYPES[wanted]
    if old and dtype == "bfloat16":
        raise ConfigError(
            f"{old[0].name} (compute capability {format_version(old[0].capability)}) does not compute in "
            "bfloat16; use --dtype float16",
            code="gpu-without-bfloat16",
        )
    return Decision(dtype, "--dtype")


def _auto_dtype(checkpoint: Checkpoint, *, on_cpu: bool) -> Decision[DType]:
    """The dtype of "auto" on devices that compute in every dtype. `on_cpu`: a CPU is one of them."""
    if checkpoint.format == "gguf" or checkpoint.shape.dtype == "float32":
        return Decision("bfloat16", "the default for a checkpoint in another format")
    if checkpoint.shape.published is not None and on_cpu:
        return Decision("bfloat16", "the kernels of the CPU")
    return Decision(checkpoint.shape.dtype, "the checkpoint")


def model_length(config: EngineConfig, shape: ModelShape) -> int:
    """Length of the longest request, prompt and answer together, in tokens; by default the model's own length.

    Raises ConfigError for a length beyond the model's rotary embedding.
    """
    if config.max_model_len is None:
        return shape.max_positions
    if config.max_model_len > shape.longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; this model goes up to {shape.longest} tokens: give that or less",
            code="beyond-model-length",
        )
    return config.max_model_len


def check_weights_fit(plan: Plan, host: Host) -> None:
    """Raise PlanError if a device cannot hold its weights alone, before any of them is read."""
    need: Counter[RankDevice] = Counter()
    for place, device in zip(plan.places, plan.devices, strict=True):
        need[device] += plan.weight_bytes(place.rank) + repacking_bytes(plan, place.rank)
    if plan.speculation and plan.speculation.draft:
        draft = draft_plan(plan)
        need[draft.devices[0]] += draft.weight_bytes(0)
    for device, size in need.items():
        _check_device(plan, host, device, size)


def _check_device(plan: Plan, host: Host, device: RankDevice, size: int) -> None:
    """Raise PlanError if `size` bytes of weights exceed the device's cap or its free memory."""
    if device.kind == "cpu":
        free, where, holders = host.memory_free_bytes, f"the memory of {host.hostname}", ""
    else:
        gpu = host.gpus[device.index]
        free, where = gpu.free_bytes, f"{device.name}, {gpu.name}"
        holders = f" (in use by {', '.join(map(str, gpu.holders))})" if gpu.holders else ""
    cap = plan.max_memory.get(device.name)
    if cap is not None and size > cap:
        raise PlanError(
            f"{format_bytes(size)} of weights exceed the {format_bytes(cap)} that --max-memory leaves of {where}; "
            + ("raise it" if device.kind == "cpu" else "raise it, or cut the model over more GPUs"),
            code="weights-exceed-max-memory",
        )
    if size > free:
        smaller = "" if DTYPE_BYTES[plan.dtype] == 2 else ", a 16-bit --dtype"
        raise PlanError(
            f"{size / 1e9:.1f} GB of weights do not fit {where}: {free / 1e9:.1f} GB are free{holders}; free some, "
            f"or use more GPUs (--tensor-parallel-size, --pipeline-parallel-size){smaller} or a smaller model",
            code="weights-exceed-free-memory",
        )
