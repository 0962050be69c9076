"""Divisions: the ways to divide a model over the GPUs of a candidate layout: shares of ranks and layers of stages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weft.checkpoint.architectures.place import Span, whole
from weft.checkpoint.quantised.precision import canonical
from weft.errors import PlanError
from weft.machine.hardware.gpus import GpuSpec
from weft.plan.device_map import Spread
from weft.plan.parallelism import WHOLE_LAYERS
from weft.plan.quantization import check_planned_cuts
from weft.planner.deployment import DeploymentLayout, deploy
from weft.planner.memory.footprint import EngineMemory, footprint
from weft.planner.profiles import engine_profile, kv_cache_dtype
from weft.planner.question import Question
from weft.planner.search.balance import balance_layers, model_bytes
from weft.planner.search.cuts import CandidateLayout
from weft.planner.search.domains import Device, same_gpu_type, usable_devices
from weft.planner.search.stages import RankCapacity, layers_by_capacity
from weft.planner.work.batch import with_smallest_budget

ROOM_BESIDE_CPU = (4, 16)  # requests for which GPUs get room if the CPU is used with them


def with_balanced_stages(question: Question, precision: str, strategy: Spread) -> Question:
    """The question with the stages that Transformers' strategy gives for this precision."""
    shape, engine, dtype = question.shape, engine_profile(question), kv_cache_dtype(question, precision)
    memory_of = EngineMemory(shape, canonical(precision), dtype, engine)
    gpus, one = usable_devices(question.cluster), msgspec.structs.replace(whole(shape), layers=Span(0, 1), stages=3)

    def engine_bytes(gpu: GpuSpec, stage: int) -> int:
        return memory_of.rank(msgspec.structs.replace(one, stage=stage), gpu, at_most=True).other_bytes

    model = model_bytes(
        shape,
        memory_of.precision,
        dtype,
        question.workload.longest,
        window_cache=bool(engine.window_cache.value),
    )
    sampling = max(engine_bytes(device.gpu, 2) - engine_bytes(device.gpu, 1) for device in gpus)
    most = engine.utilization_most.value
    rooms = [device.gpu.usable_bytes(most) - engine_bytes(device.gpu, 1) for device in gpus]
    layers = balance_layers(msgspec.structs.replace(model, sampling=sampling), rooms, strategy)
    used = [(device.number, count) for device, count in zip(gpus, layers, strict=True) if count]
    constraints = msgspec.structs.replace(
        WHOLE_LAYERS,
        pipeline_split=tuple(count for _, count in used),
        devices=tuple(number for number, _ in used),
    )
    return msgspec.structs.replace(question, precisions=(precision,), constraints=constraints)


def divisions(question: Question, layout: CandidateLayout) -> list[DeploymentLayout]:
    """The ways to divide the model over a candidate's GPUs: the user's; else evenly over equal GPUs, and over different
    ones by their bandwidth and by their memory. Raises PlanError if there is none."""
    divided, problem = [], None
    for weights in _tensor_weights(question, layout):
        for layers in _stage_layers(question, layout, weights):
            one = _deployed(question, layout, weights, layers)
            try:
                if question.engine == "weft":
                    check_planned_cuts(question.shape, one.places, one.precision)
                divided.append(one)
            except PlanError as error:
                problem = error
    if problem is not None and not divided:
        raise problem
    return divided


def _deployed(
    question: Question, layout: CandidateLayout, weights: tuple[float, ...], layers: tuple[int, ...]
) -> DeploymentLayout:
    cut = layout.cut
    return deploy(
        question.shape,
        msgspec.structs.replace(cut.parallelism, tensor_split=weights, pipeline_split=layers, devices=layout.gpus),
        precision=cut.precision,
        kv_dtype=kv_cache_dtype(question, cut.precision),
    )


def _weakest_of_positions(stages: Sequence[Sequence[Device]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The least bandwidth and the least usable memory of each position, over all stages."""
    gpus_of_rank = [[device.gpu for device in position] for position in zip(*stages, strict=True)]
    bandwidth = tuple(min(gpu.bandwidth_Bps for gpu in gpus) for gpus in gpus_of_rank)
    memory = tuple(float(min(gpu.usable_bytes(1.0) for gpu in gpus)) for gpus in gpus_of_rank)
    return bandwidth, memory


def _tensor_weights(question: Question, layout: CandidateLayout) -> list[tuple[float, ...]]:
    ranks = layout.cut.parallelism.tensor_parallel
    if question.constraints.tensor_split:
        return [question.constraints.tensor_split]
    even = (1.0,) * ranks
    # A rank has one share in every stage and replica: as much as the weakest GPU of its position can take.
    stages = [stage for replica in layout.replicas for stage in replica]
    if all(map(same_gpu_type, stages)):
        return [even]
    bandwidth, memory = _weakest_of_positions(stages)
    choices = [bandwidth, memory, even]
    if any(device.gpu.limit_bytes is not None for device in layout.devices):
        # If only a small part of a GPU may be used, the engine takes much of it: divide what is left for the model.
        own = _engine_bytes(question, layout, even)
        choices.append(tuple(max(1.0, size - max(own[rank::ranks])) for rank, size in enumerate(memory)))
    return list(dict.fromkeys(choices))


def _stage_layers(question: Question, layout: CandidateLayout, weights: tuple[float, ...]) -> list[tuple[int, ...]]:
    shape, cut, stages = question.shape, layout.cut, layout.cut.parallelism.pipeline_parallel
    if question.constraints.pipeline_split:
        return [question.constraints.pipeline_split]
    if stages == 1:
        return [(len(shape.layers),)]
    dtype, tokens = kv_cache_dtype(question, cut.precision), question.workload.longest
    sharing = {"data_parallel": cut.parallelism.groups, "expert_parallel": cut.parallelism.expert_parallel}
    capacities = _capacities(question, layout, weights)
    held = engine_profile(question).held_precision(canonical(cut.precision))
    if len({device.gpu.kind for device in layout.devices}) > 1:
        # The fewest layers on the CPU that leave the GPUs room for some requests; more layers give larger batches.
        ways = [(requests * tokens, False) for requests in (1, *ROOM_BESIDE_CPU)]
    else:
        ways = [(tokens, False), (tokens, True)]
    choices = [
        layers_by_capacity(shape, held, dtype, length, weights, capacities, by_room=by_room, **sharing)
        for length, by_room in ways
    ]
    known = dict.fromkeys(layers for layers in choices if layers is not None)
    # If nothing fits, the even split shows by how much.
    return list(known) or [_even(len(shape.layers), stages)]


def _capacities(question: Question, layout: CandidateLayout, weights: tuple[float, ...]) -> list[list[RankCapacity]]:
    """The capacity of each rank of each stage. A stage has equally many layers in every replica: as many as the weakest
    GPU of its position can take."""
    most, tensor = engine_profile(question).utilization_most.value, layout.cut.parallelism.tensor_parallel

    def capacity(devices: Sequence[Device], engine_bytes: int) -> RankCapacity:
        gpus = {id(device.gpu): device.gpu for device in devices}.values()
        return RankCapacity(
            min(gpu.usable_bytes(most) for gpu in gpus) - engine_bytes, min(gpu.bandwidth_Bps for gpu in gpus)
        )

    ranks = [
        capacity([replica[position // tensor][position % tensor] for replica in layout.replicas], engine_bytes)
        for position, engine_bytes in enumerate(_engine_bytes(question, layout, weights))
    ]
    return [ranks[start : start + tensor] for start in range(0, len(ranks), tensor)]


def _engine_bytes(question: Question, layout: CandidateLayout, weights: tuple[float, ...]) -> list[int]:
    """Bytes of each rank's GPU that an engine takes for itself, as computed for one replica with even stages."""
    replica = msgspec.structs.replace(layout.cut.parallelism, data_parallel=1, expert_parallel=1, deals_experts=False)
    cut = msgspec.structs.replace(layout.cut, parallelism=replica)
    layers = _even(len(question.shape.layers), replica.pipeline_parallel)
    one = _deployed(question, CandidateLayout(cut, layout.replicas[:1]), weights, layers)
    engine = with_smallest_budget(engine_profile(question))
    memory = footprint(question.shape, one, question.cluster, engine, question.workload)
    return [rank.other_bytes for rank in memory.ranks]


def _even(layers: int, stages: int) -> tuple[int, ...]:
    each, left_over = divmod(layers, stages)
    return tuple(each + (stage < left_over) for stage in range(stages))
