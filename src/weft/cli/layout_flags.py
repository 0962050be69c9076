"""Layout flags of weft plan: the part of the layout that they fix, checked against the model and the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from msgspec.structs import asdict, replace

from weft.checkpoint.architectures.model import Model
from weft.cli.flags.plan_flags import Layout
from weft.cli.parser import UsageError
from weft.errors import ConfigError, PlanError
from weft.machine.hardware.cluster import Cluster
from weft.plan import device_map, max_memory, placement
from weft.plan.parallelism import WHOLE_LAYERS, Parallelism, asked_parallelism
from weft.planner.note import Note, create_note
from weft.planner.search.domains import usable_devices


def rank_count(flags: Layout) -> int:
    """Number of ranks that the flags ask for; a size that is not given counts as 1."""
    tensor = flags.tensor_parallel_size or len(flags.tensor_split or ())
    stages = flags.pipeline_parallel_size or len(flags.pipeline_split or ())
    return prod(size or 1 for size in (tensor, stages, flags.data_parallel_size))


def asks_for_cpu(flags: Layout) -> bool:
    """Return True if --max-memory or --device-map names the CPU."""
    on_cpu = isinstance(flags.device_map, dict) and "cpu" in flags.device_map.values()
    return on_cpu or bool((flags.max_memory or {}).get("cpu"))


def limit_memory(flags: Layout, cluster: Cluster) -> Cluster:
    """The cluster with the limits of --max-memory. Raises ConfigError for a device that the cluster does not have."""
    limits = flags.max_memory
    return cluster if limits is None else max_memory.cap_cluster(cluster, max_memory.parse_max_memory(limits))


def remarks(flags: Layout, cluster: Cluster) -> tuple[Note, ...]:
    """Notes on flags that have no effect."""
    limits = flags.max_memory or {}
    if "disk" not in limits or cluster.on_cpu:
        return ()
    return (create_note("max_memory_without_effect", device="disk", limit=limits["disk"]),)


def parse_layout_flags(flags: Layout, cluster: Cluster, model: Model, precision: str) -> Parallelism:
    """The part of the layout that the flags fix; `precision` gives the weights' size for --device-map.

    Raises UsageError for flags that contradict each other, the model or the hardware, and ConfigError for a device map
    that is not a pipeline of the model.
    """
    if flags.device_map is not None:
        return parse_device_map(flags, cluster, model, precision)
    wanted = _checked(flags, model)
    sizes = [size for size in (wanted.tensor_parallel, wanted.pipeline_parallel, wanted.data_parallel) if size]
    check_rank_count(sizes, cluster)
    # Sizes describe the whole layout.
    closed = wanted.deals_experts is None and sizes
    return replace(wanted, deals_experts=False) if closed else wanted


def _checked(flags: Layout, model: Model) -> Parallelism:
    """The parts of a layout that the flags fix. Raises UsageError if they contradict each other or the model."""
    if flags.enable_expert_parallel and model.shape.experts is None:
        raise UsageError(
            f"--enable-expert-parallel deals experts out to ranks, and {model.name} has none: leave it out",
            code="no-experts",
        )
    try:
        wanted = asked_parallelism(asdict(flags))
        wanted.check(model.shape)
    except (ConfigError, PlanError) as error:
        raise UsageError(str(error), code=error.code) from None
    return wanted


def check_rank_count(sizes: Sequence[int], cluster: Cluster) -> None:
    """Raise UsageError if the parallel sizes need more GPUs than the cluster has."""
    needed, available = prod(sizes), len(usable_devices(cluster))
    if needed <= available:
        return
    factors = [str(size) for size in sizes if size > 1]
    product = f"{' x '.join(factors)} = {needed}" if len(factors) > 1 else str(needed)
    has = "the hardware has" if available == len(cluster.gpus) else "--max-memory leaves"
    raise UsageError(f"{product} ranks need as many GPUs; {has} {available}", code="more-ranks-than-gpus")


def parse_device_map(flags: Layout, cluster: Cluster, model: Model, precision: str) -> Parallelism:
    """The layout of --device-map: a pipeline, or whole layers spread by a strategy of Transformers."""
    mapping = flags.device_map
    assert mapping is not None
    placement.check_flags(mapping, asdict(flags))
    spread = placement.spread_word(mapping)
    if spread:
        return replace(WHOLE_LAYERS, device_map_strategy=spread)
    room = mapping_room(cluster, model, precision)
    stages = device_map.map_to_stages(model.shape, placement.module_devices(mapping), room)
    gpus = len(room.gpus) + len(room.left_out)
    if gpus and set(stages.devices) == {"cpu"}:
        raise UsageError(
            f"--device-map puts the whole model on cpu, but the plan is for {gpus} GPU{'s' * (gpus > 1)}: leave "
            "--device-map out, or plan for a machine without GPUs",
            code="device-map-on-cpu",
        )
    placement.check_stages(stages, asdict(flags))
    return replace(
        WHOLE_LAYERS,
        pipeline_split=stages.layers,
        # The CPU comes behind the GPUs; without them it is the cluster's only device.
        devices=tuple(device if isinstance(device, int) else gpus for device in stages.devices),
    )


def mapping_room(cluster: Cluster, model: Model, precision: str) -> device_map.AvailableDevices:
    """The GPUs that a device map may use, by number, and the bytes of each part of the model."""
    gpus = {number: gpu for number, gpu in enumerate(cluster.gpus) if gpu.kind == "gpu"}
    return device_map.AvailableDevices(
        gpus=[number for number, gpu in gpus.items() if gpu.limit_bytes != 0],
        left_out=[number for number, gpu in gpus.items() if gpu.limit_bytes == 0],
        nbytes=lambda unit: placement.unit_bytes(model.shape, precision, unit),
    )
