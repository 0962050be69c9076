"""Search: every layout worth trying, the best first, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from weft.architectures.place import Span, whole
from weft.errors import PlanError
from weft.formats.precision import canonical
from weft.hardware.gpus import GpuSpec
from weft.plan.device_map import Spread
from weft.plan.quantization import check_planned_cuts
from weft.planner.balance import balance_layers, model_bytes
from weft.planner.batch import with_smallest_budget
from weft.planner.cost import Prediction, predict
from weft.planner.cuts import CandidateLayout, Cut, candidate_layouts, reordered_layouts
from weft.planner.deployment import DeploymentLayout, deploy
from weft.planner.domains import Device, same_gpu_type, usable_devices
from weft.planner.footprint import EngineMemory, Footprint, footprint
from weft.planner.note import Note, create_note
from weft.planner.objections import objection
from weft.planner.profiles import Constant, Profile, calibrated, load_profile
from weft.planner.question import LayoutConstraints, Question
from weft.planner.ranking import Candidate, rank_candidates, sort_key
from weft.planner.stages import RankCapacity, layers_by_capacity

REORDERED = 4  # candidates of which other orders of the stages are tried
DEPTHS = 6  # pipeline depths that are costed for one size of tensor parallelism: the shallowest that fit


class Rejected(msgspec.Struct, frozen=True):
    """A cut that is not possible, with the reason. `short_bytes` is the memory that its fullest GPU lacks, 0 if the
    reason is another one."""

    cut: Cut
    reason: Note
    short_bytes: int = 0


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates that fit, the best first, and the cuts that were rejected."""

    question: Question
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    @property
    def obstacle(self) -> str:
        """The reason for which nothing fits: that of the closest cut."""
        miss = closest_miss(self.rejected)
        return f"{miss.cut}: {miss.reason}" if miss else str(create_note("no_such_layout"))


def closest_miss(rejected: Sequence[Rejected]) -> Rejected | None:
    """The rejected cut that lacks the least memory; if none lacks memory, any one of them."""
    short = [miss for miss in rejected if miss.short_bytes]
    return min(short or rejected, key=lambda miss: miss.short_bytes, default=None)


def search(question: Question) -> SearchResult:
    """Every candidate by the objective, the best first.

    If nothing fits the GPUs and the cluster has a CPU beside them, the CPU is the first stage of a pipeline over all of
    them, with as few layers as it has to take: the head, which every token reads, stays on a GPU.
    """
    result = _search_devices(question)
    if result.best is None and (beside := _with_cpu_stage(question)) is not None:
        other = _search_devices(beside)
        return SearchResult(
            question=other.question if other.best else question,
            candidates=other.candidates,
            rejected=(*other.rejected, *result.rejected),
        )
    return result


def _decides_more_than_stages(wanted: LayoutConstraints) -> bool:
    """Return True if the user has decided more of the layout than the number and the sizes of pipeline stages."""
    if wanted.devices or wanted.expert_parallel:
        return True
    sizes = (wanted.tensor_parallel, wanted.data_parallel, len(wanted.tensor_split or (1.0,)))
    return any(size not in (None, 1) for size in sizes)


def _with_cpu_stage(question: Question) -> Question | None:
    """The question for a pipeline over the CPU and all GPUs; None without a CPU, or for another layout of the user."""
    wanted, gpus = question.constraints, usable_devices(question.cluster)
    stages = wanted.pipeline_parallel or len(wanted.pipeline_split or ()) or len(gpus) + 1
    if question.cluster.cpu is None or _decides_more_than_stages(wanted) or not 1 < stages <= len(gpus) + 1:
        return None
    constraints = LayoutConstraints(
        tensor_parallel=1,
        pipeline_parallel=stages,
        data_parallel=1,
        expert_parallel=False,
        pipeline_split=wanted.pipeline_split,
        devices=(len(question.cluster.gpus), *(device.number for device in gpus[: stages - 1])),
    )
    return msgspec.structs.replace(question, constraints=constraints)


def _search_devices(question: Question) -> SearchResult:
    """Every candidate on the GPUs, or on the devices that the user names."""
    best_by_cut: dict[Cut, Candidate] = {}
    layout_by_cut: dict[Cut, CandidateLayout] = {}
    misses: list[Rejected] = []
    for fits in fitting_layouts(question, misses):
        for candidate in _candidates(question, fits):
            known = best_by_cut.get(fits.cut)
            if known is None or sort_key(question, candidate) < sort_key(question, known):
                best_by_cut[fits.cut], layout_by_cut[fits.cut] = candidate, fits.layout
    _improve_by_order(question, best_by_cut, layout_by_cut)
    # A cut may be placed on the GPUs of a mixed cluster in several ways: it is rejected if none of them fits.
    rejected: dict[Cut, Rejected] = {}
    for miss in sorted(misses, key=lambda miss: miss.short_bytes):
        if miss.cut not in best_by_cut:
            rejected.setdefault(miss.cut, miss)
    candidates = tuple(rank_candidates(question, list(best_by_cut.values())))
    return SearchResult(question=question, candidates=candidates, rejected=tuple(rejected.values()))


def _improve_by_order(
    question: Question, best_by_cut: dict[Cut, Candidate], layout_by_cut: dict[Cut, CandidateLayout]
) -> None:
    """Replace candidates by faster ones whose stages are in another order. It matters if stages run on different GPUs,
    and is tried for the best few only."""
    by_merit = sorted(best_by_cut.values(), key=lambda candidate: sort_key(question, candidate))
    for known in by_merit[:REORDERED]:
        for layout in reordered_layouts(question, layout_by_cut[known.cut]):
            fits = _fitting(question, layout, [])
            for candidate in _candidates(question, fits) if fits else ():
                # The given order stays if another one gains next to nothing.
                if sort_key(question, candidate)[0] < sort_key(question, best_by_cut[known.cut])[0]:
                    best_by_cut[known.cut] = candidate


class Fitting(msgspec.Struct, frozen=True):
    """A candidate layout, and the ways of dividing the model over it, unevenly or evenly, that fit."""

    layout: CandidateLayout
    divided: tuple[tuple[DeploymentLayout, Footprint], ...]

    @property
    def cut(self) -> Cut:
        return self.layout.cut


def fitting_layouts(question: Question, rejected: list[Rejected]) -> Iterator[Fitting]:
    """Every layout that fits, in no order; those that do not are added to `rejected`."""
    strategy = question.constraints.device_map_strategy
    if strategy:
        for precision in question.precisions:
            yield from fitting_layouts(_with_balanced_stages(question, precision, strategy), rejected)
        return
    depths: dict[tuple[str, int, int, bool], set[int]] = {}
    for layout in candidate_layouts(question):
        cut = layout.cut
        kind = cut.precision, cut.tensor_parallel, cut.expert_columns, cut.expert_parallel > 1
        tried = depths.setdefault(kind, set())
        if len(tried) == DEPTHS and cut.pipeline_parallel not in tried:
            continue
        fits = _fitting(question, layout, rejected)
        if fits:
            tried.add(cut.pipeline_parallel)
            yield fits


def _fitting(question: Question, layout: CandidateLayout, rejected: list[Rejected]) -> Fitting | None:
    reason = objection(question, layout)
    if reason:
        rejected.append(Rejected(layout.cut, reason))
        return None
    try:
        divided = [(one, _footprint(question, one)) for one in _divisions(question, layout)]
    except PlanError as error:
        rejected.append(Rejected(layout.cut, create_note("not_possible", reason=str(error), fault=error.code)))
        return None
    fits = tuple((one, memory) for one, memory in divided if memory.fits)
    if not fits:
        rejected.append(_too_large(layout.cut, [memory for _, memory in divided]))
        return None
    return Fitting(layout, fits)


def _candidates(question: Question, fits: Fitting) -> Iterator[Candidate]:
    for layout, memory in fits.divided:
        predicted = _predict(question, layout, memory)
        yield Candidate(cut=fits.cut, layout=layout, memory=memory, predicted=predicted)


ROOM_BESIDE_CPU = (4, 16)  # requests for which GPUs beside a CPU get room, too


def engine_profile(question: Question) -> Profile:
    """The engine's constants, with the limits that the question gives in place of the engine's own."""
    cluster, given = question.cluster, {}
    profile = calibrated(load_profile(question.engine, on_cpu=cluster.on_cpu), cluster.gpus)
    if question.gpu_memory_utilization is not None:
        share = Constant(question.gpu_memory_utilization, "--gpu-memory-utilization")
        given = {"utilization": share, "utilization_most": share}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        most = getattr(question, name)
        if most is not None:
            given[name] = Constant(most, f"--{name.replace('_', '-')}")
            given[name.replace("max", "small", 1)] = given[name]  # on cards of any memory size
    if "max_num_batched_tokens" in given:
        given["hold_up_ms"] = Constant(0.0, "--max-num-batched-tokens")
    profile = msgspec.structs.replace(profile, speculation=question.speculation, **given)
    if cluster.cpu is None:
        return profile
    beside = calibrated(load_profile(question.engine, on_cpu=True), [cluster.cpu])
    return msgspec.structs.replace(profile, cpu=msgspec.structs.replace(beside, speculation=question.speculation))


def kv_cache_dtype(question: Question, precision: str) -> str:
    """The dtype of the KV cache: the question's, or the engine's own beside weights of this precision."""
    return question.kv_dtype or engine_profile(question).kv_dtype(precision)


def _footprint(question: Question, layout: DeploymentLayout) -> Footprint:
    return footprint(question.shape, layout, question.cluster, engine_profile(question), question.workload)


def _predict(question: Question, layout: DeploymentLayout, memory: Footprint) -> Prediction:
    return predict(question.shape, layout, question.cluster, question.workload, engine_profile(question), memory)


def _with_balanced_stages(question: Question, precision: str, strategy: Spread) -> Question:
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
    constraints = LayoutConstraints(
        tensor_parallel=1,
        pipeline_parallel=len(used),
        data_parallel=1,
        expert_parallel=False,
        pipeline_split=tuple(count for _, count in used),
        devices=tuple(number for number, _ in used),
    )
    return msgspec.structs.replace(question, precisions=(precision,), constraints=constraints)


def _divisions(question: Question, layout: CandidateLayout) -> list[DeploymentLayout]:
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
    question: Question, layout: CandidateLayout, weights: Sequence[float], layers: Sequence[int]
) -> DeploymentLayout:
    cut = layout.cut
    return deploy(
        question.shape,
        tensor_weights=weights,
        stage_layers=layers,
        gpus=layout.gpus,
        precision=cut.precision,
        kv_dtype=kv_cache_dtype(question, cut.precision),
        expert_parallel=cut.expert_parallel,
        shares_experts=cut.shares_experts,
    )


def _weakest_of_positions(stages: Sequence[Sequence[Device]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The least bandwidth and the least usable memory of each position, over all stages."""
    gpus_of_rank = [[device.gpu for device in position] for position in zip(*stages, strict=True)]
    bandwidth = tuple(min(gpu.bandwidth_Bps for gpu in gpus) for gpus in gpus_of_rank)
    memory = tuple(float(min(gpu.usable_bytes(1.0) for gpu in gpus)) for gpus in gpus_of_rank)
    return bandwidth, memory


def _tensor_weights(question: Question, layout: CandidateLayout) -> list[tuple[float, ...]]:
    ranks = layout.cut.tensor_parallel
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


def _stage_layers(question: Question, layout: CandidateLayout, weights: Sequence[float]) -> list[tuple[int, ...]]:
    shape, cut, stages = question.shape, layout.cut, layout.cut.pipeline_parallel
    if question.constraints.pipeline_split:
        return [question.constraints.pipeline_split]
    if stages == 1:
        return [(len(shape.layers),)]
    dtype, tokens = kv_cache_dtype(question, cut.precision), question.workload.longest
    groups = cut.data_parallel if cut.shares_experts else 1
    sharing = {"data_parallel": groups, "expert_parallel": cut.expert_parallel}
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


def _capacities(question: Question, layout: CandidateLayout, weights: Sequence[float]) -> list[list[RankCapacity]]:
    """The capacity of each rank of each stage. A stage has equally many layers in every replica: as many as the weakest
    GPU of its position can take."""
    most, tensor = engine_profile(question).utilization_most.value, layout.cut.tensor_parallel

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


def _engine_bytes(question: Question, layout: CandidateLayout, weights: Sequence[float]) -> list[int]:
    """Bytes of each rank's GPU that an engine takes for itself, as computed for one replica with even stages."""
    cut = msgspec.structs.replace(layout.cut, data_parallel=1, expert_parallel=1, shares_experts=False)
    layers = _even(len(question.shape.layers), cut.pipeline_parallel)
    one = _deployed(question, CandidateLayout(cut, layout.replicas[:1]), weights, layers)
    engine = with_smallest_budget(engine_profile(question))
    memory = footprint(question.shape, one, question.cluster, engine, question.workload)
    return [rank.other_bytes for rank in memory.ranks]


def _even(layers: int, stages: int) -> tuple[int, ...]:
    each, left_over = divmod(layers, stages)
    return tuple(each + (stage < left_over) for stage in range(stages))


def _too_large(cut: Cut, tried: Sequence[Footprint]) -> Rejected:
    """The memory that a cut lacks, in the way of dividing it that comes closest."""
    memory = max(tried, key=lambda memory: memory.ranks[memory.fullest].kv_room_bytes)
    gpus, fullest = memory.layout.gpus, memory.ranks[memory.fullest]
    same_gpu = [rank for rank, gpu in zip(memory.ranks, gpus, strict=True) if gpu == gpus[memory.fullest]]
    replica = min(memory.replicas, key=lambda replica: replica.kv_tokens)
    room = sum(rank.kv_room_bytes for rank in same_gpu)
    usable = create_note(
        "usable_beside_cpu" if cut.device == "CPU" else "usable_of_gpu",
        gpu=fullest.gpu,
        usable_bytes=fullest.usable_bytes,
        memory_bytes=fullest.memory_bytes,
        limited=fullest.limit_bytes == fullest.usable_bytes,
    )
    weight_bytes = sum(rank.weights.total for rank in same_gpu)
    engine_bytes = sum(rank.other_bytes for rank in same_gpu)
    parts = {
        "weight_bytes": weight_bytes,
        "engine_bytes": engine_bytes,
        "draft": any(rank.draft_bytes for rank in same_gpu),
        "per_gpu": cut.device == "GPU",
        "usable": usable,
    }
    if room < 0:
        need = weight_bytes + engine_bytes
        return Rejected(cut, create_note("weights_too_large", need_bytes=need, short_bytes=-room, **parts), -room)
    short = sum(rank.kv_request_bytes for rank in same_gpu) - room
    reason = create_note(
        "context_too_small", kv_tokens=replica.kv_tokens, length=replica.length, short_bytes=short, **parts
    )
    return Rejected(cut, reason, max(1, short))
