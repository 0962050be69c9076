"""Search: every layout worth trying, the best first, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from weft.errors import PlanError
from weft.plan.parallelism import WHOLE_LAYERS, Parallelism
from weft.planner.deployment import DeploymentLayout
from weft.planner.memory.footprint import Footprint, footprint
from weft.planner.note import Note, create_note
from weft.planner.profiles import engine_profile
from weft.planner.question import Question
from weft.planner.search.cuts import CandidateLayout, Cut, candidate_layouts, reordered_layouts
from weft.planner.search.divisions import divisions, with_balanced_stages
from weft.planner.search.domains import usable_devices
from weft.planner.search.objections import objection
from weft.planner.search.ranking import Candidate, rank_candidates, sort_key
from weft.planner.speed.cost import Prediction, predict

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
        """The reason for which nothing fits: the closest cut's."""
        miss = closest_miss(self.rejected)
        return f"{miss.cut}: {miss.reason}" if miss else str(create_note("no_such_layout"))


def closest_miss(rejected: Sequence[Rejected]) -> Rejected | None:
    """The rejected cut that lacks the least memory; if none lacks memory, any one of them."""
    short = [miss for miss in rejected if miss.short_bytes]
    return min(short or rejected, key=lambda miss: miss.short_bytes, default=None)


def search(question: Question) -> SearchResult:
    """Every candidate by the objective, the best first.

    If nothing fits the GPUs and the cluster has a CPU too, the CPU is the first stage of a pipeline over all of them,
    with as few layers as necessary. The head, which every token reads, stays on a GPU.
    """
    result = _search_devices(question)
    if result.best is None and (with_cpu := _with_cpu_stage(question)) is not None:
        other = _search_devices(with_cpu)
        return SearchResult(
            question=other.question if other.best else question,
            candidates=other.candidates,
            rejected=(*other.rejected, *result.rejected),
        )
    return result


def _decides_more_than_stages(wanted: Parallelism) -> bool:
    """Return True if the user has decided more of the layout than the number and the sizes of pipeline stages."""
    return bool(wanted.devices or wanted.deals_experts or wanted.tensor_parallel > 1 or wanted.data_parallel > 1)


def _with_cpu_stage(question: Question) -> Question | None:
    """The question for a pipeline over the CPU and all GPUs; None without a CPU, or for another layout of the user."""
    wanted, gpus = question.constraints, usable_devices(question.cluster)
    stages = wanted.pipeline_parallel or len(gpus) + 1
    if question.cluster.cpu is None or _decides_more_than_stages(wanted) or not 1 < stages <= len(gpus) + 1:
        return None
    constraints = msgspec.structs.replace(
        WHOLE_LAYERS,
        pipeline_parallel=stages,
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
    """Every layout that fits, in no order; layouts that do not fit are added to `rejected`."""
    strategy = question.constraints.device_map_strategy
    if strategy:
        for precision in question.precisions:
            yield from fitting_layouts(with_balanced_stages(question, precision, strategy), rejected)
        return
    depths: dict[tuple[str, int, int, bool], set[int]] = {}
    for layout in candidate_layouts(question):
        cut = layout.cut.parallelism
        kind = layout.cut.precision, cut.tensor_parallel, cut.expert_columns, cut.expert_parallel > 1
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
        divided = [(one, _footprint(question, one)) for one in divisions(question, layout)]
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


def _footprint(question: Question, layout: DeploymentLayout) -> Footprint:
    return footprint(question.shape, layout, question.cluster, engine_profile(question), question.workload)


def _predict(question: Question, layout: DeploymentLayout, memory: Footprint) -> Prediction:
    return predict(question.shape, layout, question.cluster, question.workload, engine_profile(question), memory)


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
