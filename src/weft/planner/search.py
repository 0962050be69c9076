"""Search: every layout worth trying, the best first, and what was wrong with the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from weft.architectures.place import Span, whole
from weft.errors import PlanError
from weft.formats.precision import canonical
from weft.formatting import format_bytes
from weft.hardware.gpus import GpuSpec
from weft.plan.device_map import Spread
from weft.plan.quantization import check_planned_cuts
from weft.planner.balance import load_of, spread
from weft.planner.batch import shortest
from weft.planner.cost import Prediction, predict
from weft.planner.cuts import Cut, Draft, drafts, rearranged
from weft.planner.deployment import Layout, deploy
from weft.planner.domains import alike, usable
from weft.planner.footprint import Footprint, Holding, footprint
from weft.planner.objections import objection
from weft.planner.profiles import Constant, Profile, calibrated, profile
from weft.planner.question import Question, Wish
from weft.planner.ranking import Candidate, merit, ranked
from weft.planner.stages import Seat, stage_layers

REARRANGED = 4  # candidates of which other orders of the stages are tried
DEPTHS = 6  # pipeline depths that are costed for one size of tensor parallelism: the shallowest that fit


class Rejected(msgspec.Struct, frozen=True):
    """A cut that cannot be, and why, in numbers. `short_bytes` is what its fullest GPU lacks, 0 where it is not
    for want of memory."""

    cut: Cut
    reason: str
    short_bytes: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Candidates with the best first; none where nothing fits."""

    question: Question
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    @property
    def obstacle(self) -> str:
        """Why nothing fits, told of what comes closest."""
        it = closest(self.rejected)
        return f"{it.cut}: {it.reason}" if it else "no layout of these ranks is possible on so many GPUs"


def closest(rejected: Sequence[Rejected]) -> Rejected | None:
    """The one that lacks least, of those that lack memory if there are any."""
    short = [it for it in rejected if it.short_bytes]
    return min(short or rejected, key=lambda it: it.short_bytes, default=None)


def search(question: Question) -> Answer:
    """Every candidate by the objective, the best first."""
    found: dict[Cut, Candidate] = {}
    drafted: dict[Cut, Draft] = {}
    reasons: list[Rejected] = []
    for fits in fitting(question, reasons):
        for candidate in _candidates(question, fits):
            known = found.get(fits.cut)
            if known is None or merit(question, candidate) < merit(question, known):
                found[fits.cut], drafted[fits.cut] = candidate, fits.draft
    # Where stages run on different GPUs their order counts, which is tried for the best few only.
    for known in sorted(found.values(), key=lambda candidate: merit(question, candidate))[:REARRANGED]:
        for draft in rearranged(question, drafted[known.cut]):
            other = _fitting(question, draft, [])
            for candidate in _candidates(question, other) if other else ():
                # As it was given, where another order gains nothing to speak of.
                if merit(question, candidate)[0] < merit(question, found[known.cut])[0]:
                    found[known.cut] = candidate
    # A cut may be laid on the GPUs of a mixed cluster in several ways: it is rejected where none of them fits.
    rejected: dict[Cut, Rejected] = {}
    for reason in sorted(reasons, key=lambda it: it.short_bytes):
        if reason.cut not in found:
            rejected.setdefault(reason.cut, reason)
    candidates = tuple(ranked(question, list(found.values())))
    return Answer(question=question, candidates=candidates, rejected=tuple(rejected.values()))


class Fitting(msgspec.Struct, frozen=True):
    """A draft, and the ways of dividing the model unevenly, or evenly, that fit."""

    draft: Draft
    layouts: tuple[tuple[Layout, Footprint], ...]

    @property
    def cut(self) -> Cut:
        return self.draft.cut


def fitting(question: Question, rejected: list[Rejected]) -> Iterator[Fitting]:
    """Every cut that fits, in no order; those that do not are added to `rejected`."""
    if question.wish.spread:
        for precision in question.precisions:
            yield from fitting(_spread_out(question, precision, question.wish.spread), rejected)
        return
    depths: dict[tuple[str, int, bool], set[int]] = {}
    for draft in drafts(question):
        cut = draft.cut
        tried = depths.setdefault((cut.precision, cut.tensor_parallel, cut.expert_parallel > 1), set())
        if len(tried) == DEPTHS and cut.pipeline_parallel not in tried:
            continue
        fits = _fitting(question, draft, rejected)
        if fits:
            tried.add(cut.pipeline_parallel)
            yield fits


def _fitting(question: Question, draft: Draft, rejected: list[Rejected]) -> Fitting | None:
    problem = objection(question, draft)
    if problem:
        rejected.append(Rejected(draft.cut, problem))
        return None
    try:
        layouts = [(layout, _footprint(question, layout)) for layout in _layouts(question, draft)]
    except PlanError as error:
        rejected.append(Rejected(draft.cut, str(error)))
        return None
    fits = tuple((layout, memory) for layout, memory in layouts if memory.fits)
    if not fits:
        rejected.append(_too_large(draft.cut, [memory for _, memory in layouts]))
        return None
    return Fitting(draft, fits)


def _candidates(question: Question, fits: Fitting) -> Iterator[Candidate]:
    for layout, memory in fits.layouts:
        predicted = _predict(question, layout, memory)
        yield Candidate(cut=fits.cut, layout=layout, memory=memory, predicted=predicted)


def engine_profile(question: Question) -> Profile:
    """The engine's constants, with the limits that were asked for in the place of its own."""
    cluster, asked = question.cluster, {}
    found = calibrated(profile(question.engine, on_cpu=cluster.on_cpu), cluster.gpus)
    if question.gpu_memory_utilization is not None:
        share = Constant(question.gpu_memory_utilization, "--gpu-memory-utilization")
        asked = {"utilization": share, "utilization_most": share}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if (most := getattr(question, name)) is not None:
            asked[name] = Constant(most, f"--{name.replace('_', '-')}")
            asked[name.replace("max", "small", 1)] = asked[name]  # whatever the memory
    if "max_num_batched_tokens" in asked:
        asked["hold_up_ms"] = Constant(0.0, "--max-num-batched-tokens")
    return msgspec.structs.replace(found, speculation=question.speculation, **asked)


def kv_dtype(question: Question, precision: str) -> str:
    """What the cache is kept in: as asked, or what the engine takes beside these weights."""
    return question.kv_dtype or engine_profile(question).kv_dtype(precision)


def _footprint(question: Question, layout: Layout) -> Footprint:
    return footprint(question.shape, layout, question.cluster, engine_profile(question), question.workload)


def _predict(question: Question, layout: Layout, memory: Footprint) -> Prediction:
    return predict(question.shape, layout, question.cluster, question.workload, engine_profile(question), memory)


def _spread_out(question: Question, precision: str, mode: Spread) -> Question:
    """The question with the stages that a word of Transformers' comes to in this precision."""
    shape, engine, dtype = question.shape, engine_profile(question), kv_dtype(question, precision)
    holding = Holding(shape, canonical(precision), dtype, engine)
    gpus, one = usable(question.cluster), msgspec.structs.replace(whole(shape), layers=Span(0, 1), stages=3)

    def kept(gpu: GpuSpec, stage: int) -> int:
        return holding.rank(msgspec.structs.replace(one, stage=stage), gpu, at_most=True).other_bytes

    load = load_of(
        shape,
        holding.precision,
        dtype,
        question.workload.longest,
        window_cache=bool(engine.window_cache.value),
    )
    load = msgspec.structs.replace(load, sampling=max(kept(it.gpu, 2) - kept(it.gpu, 1) for it in gpus))
    most = engine.utilization_most.value
    layers = spread(load, [it.gpu.takes(most) - kept(it.gpu, 1) for it in gpus], mode)
    used = [(it.number, count) for it, count in zip(gpus, layers, strict=True) if count]
    wish = Wish(
        tensor_parallel=1,
        pipeline_parallel=len(used),
        data_parallel=1,
        expert_parallel=False,
        pipeline_split=tuple(count for _, count in used),
        devices=tuple(number for number, _ in used),
    )
    return msgspec.structs.replace(question, precisions=(precision,), wish=wish)


def _layouts(question: Question, draft: Draft) -> list[Layout]:
    """The ways to divide the model over a draft's GPUs: as the user says, else evenly over equal ones, and over
    different ones by their bandwidth and by their memory. Raises PlanError where there is none."""
    found, problem = [], None
    for weights in _tensor_weights(question, draft):
        for layers in _stage_layers(question, draft, weights):
            layout = _deployed(question, draft, weights, layers)
            try:
                if question.engine == "weft":
                    check_planned_cuts(question.shape, layout.places, layout.precision)
                found.append(layout)
            except PlanError as error:
                problem = error
    if problem is not None and not found:
        raise problem
    return found


def _deployed(question: Question, draft: Draft, weights: Sequence[float], layers: Sequence[int]) -> Layout:
    cut = draft.cut
    return deploy(
        question.shape,
        tensor_weights=weights,
        stage_layers=layers,
        gpus=draft.gpus,
        precision=cut.precision,
        kv_dtype=kv_dtype(question, cut.precision),
        expert_parallel=cut.expert_parallel > 1,
    )


def _tensor_weights(question: Question, draft: Draft) -> list[tuple[float, ...]]:
    ranks = draft.cut.tensor_parallel
    if question.wish.tensor_split:
        return [question.wish.tensor_split]
    even = (1.0,) * ranks
    # A rank has one share in every stage and replica: what the poorest GPU of its position can take.
    stages = [stage for replica in draft.replicas for stage in replica]
    if all(map(alike, stages)):
        return [even]
    bandwidth = tuple(min(stage[rank].gpu.bandwidth_Bps for stage in stages) for rank in range(ranks))
    memory = tuple(float(min(stage[rank].gpu.takes(1.0) for stage in stages)) for rank in range(ranks))
    found = [bandwidth, memory, even]
    if any(device.gpu.limit_bytes is not None for stage in stages for device in stage):
        # Of a small part of a GPU the engine's own takes much: what is left for the model.
        own = _own_bytes(question, draft, even)
        found.append(tuple(max(1.0, it - max(own[rank::ranks])) for rank, it in enumerate(memory)))
    return list(dict.fromkeys(found))


def _stage_layers(question: Question, draft: Draft, weights: Sequence[float]) -> list[tuple[int, ...]]:
    shape, cut, stages = question.shape, draft.cut, draft.cut.pipeline_parallel
    if question.wish.pipeline_split:
        return [question.wish.pipeline_split]
    if stages == 1:
        return [(shape.layers,)]
    dtype, tokens = kv_dtype(question, cut.precision), question.workload.longest
    group = (0, cut.data_parallel) if cut.expert_parallel > 1 else None
    even = _even(shape.layers, stages)
    kept = _own_bytes(question, draft, weights)
    most, tensor = engine_profile(question).utilization_most.value, cut.tensor_parallel
    # A stage has as many layers in every replica: what the poorest GPU of its position can take.
    seats = []
    for position, other in enumerate(kept):
        stage, rank = divmod(position, tensor)
        there = {id(gpu): gpu for gpu in (replica[stage][rank].gpu for replica in draft.replicas)}.values()
        seats.append(
            Seat(
                min(gpu.takes(most) for gpu in there) - other,
                min(gpu.bandwidth_Bps for gpu in there),
            )
        )
    by_stage = [seats[start : start + tensor] for start in range(0, len(seats), tensor)]
    held = engine_profile(question).held(canonical(cut.precision))
    found = [
        stage_layers(shape, held, dtype, tokens, weights, by_stage, expert_group=group, by_room=by_room)
        for by_room in (False, True)
    ]
    known = dict.fromkeys(layers for layers in found if layers is not None)
    # Where nothing fits, the even split shows by how much.
    return list(known) or [even]


def _own_bytes(question: Question, draft: Draft, weights: Sequence[float]) -> list[int]:
    """What an engine keeps of each GPU for itself, as is seen on one replica with even stages."""
    cut = msgspec.structs.replace(draft.cut, data_parallel=1, expert_parallel=1)
    layers = _even(question.shape.layers, cut.pipeline_parallel)
    layout = _deployed(question, Draft(cut, draft.replicas[:1]), weights, layers)
    engine = shortest(engine_profile(question))
    return [
        rank.other_bytes
        for rank in footprint(question.shape, layout, question.cluster, engine, question.workload).ranks
    ]


def _even(layers: int, stages: int) -> tuple[int, ...]:
    each, rest = divmod(layers, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


def _too_large(cut: Cut, tried: Sequence[Footprint]) -> Rejected:
    """Why a cut does not fit, told of the way of dividing it that comes closest."""
    memory = max(tried, key=lambda it: it.ranks[it.fullest].kv_room_bytes)
    gpus, rank = memory.layout.gpus, memory.ranks[memory.fullest]
    number = gpus[memory.fullest]
    on_it = [it for it, other in zip(memory.ranks, gpus, strict=True) if other == number]
    replica = min(memory.replicas, key=lambda it: it.kv_tokens)
    held, own = sum(it.weights.total for it in on_it), sum(it.other_bytes for it in on_it)
    draft = " and its draft model" if any(it.draft_bytes for it in on_it) else ""
    parts = f"{format_bytes(held)} of weights + {format_bytes(own)} for the engine{draft}"
    where = " on one GPU" if cut.device == "GPU" else ""
    limit = " (--max-memory)" if rank.limit_bytes == rank.usable_bytes else ""
    have = f"{format_bytes(rank.usable_bytes)} of {format_bytes(rank.memory_bytes)}"
    usable = f"the {rank.gpu} has {have} usable{limit}"
    if cut.device == "CPU":
        usable = f"{have} that are free beside the {rank.gpu} are usable{limit}"
    room = sum(it.kv_room_bytes for it in on_it)
    if room < 0:
        told = f"needs {format_bytes(held + own)}{where} ({parts}); {usable}: {format_bytes(-room)} short"
        return Rejected(cut, told, -room)
    short = replica.length * sum(it.kv_bytes_per_token for it in on_it) - room
    return Rejected(
        cut,
        f"{parts}{where} leave room for {replica.kv_tokens:,} tokens of context ({usable}); "
        f"one request of {replica.length:,} needs {format_bytes(short)} more",
        max(1, short),
    )
