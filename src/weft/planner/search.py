"""Search: every layout worth trying, the best first, and what was wrong with the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from weft.errors import PlanError
from weft.planner.cost import Prediction, predict
from weft.planner.cuts import Cut, Draft, drafts
from weft.planner.deployment import Layout, deploy
from weft.planner.footprint import Footprint, footprint
from weft.planner.objections import objection
from weft.planner.profiles import Constant, Profile, profile
from weft.planner.question import Question
from weft.planner.stages import Seat, stage_layers
from weft.planner.words import gigabytes

SPLIT_GAIN = 1.5  # by as much differ two predictions of the same that are 20 % off, one up and one down
DEPTHS = 6  # pipeline depths that are costed for one size of tensor parallelism: the shallowest that fit


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that fits, with what it holds and how fast it will be."""

    cut: Cut
    layout: Layout
    memory: Footprint
    predicted: Prediction


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


def search(question: Question) -> Answer:
    """Every candidate by the objective, the best first."""
    found: dict[Cut, Candidate] = {}
    reasons: list[Rejected] = []
    for fits in fitting(question, reasons):
        for layout, memory in fits.layouts:
            predicted = _predict(question, layout, memory)
            candidate = Candidate(cut=fits.cut, layout=layout, memory=memory, predicted=predicted)
            known = found.get(fits.cut)
            if known is None or merit(question, candidate) < merit(question, known):
                found[fits.cut] = candidate
    # A cut may be laid on the GPUs of a mixed cluster in several ways: it is rejected where none of them fits.
    rejected: dict[Cut, Rejected] = {}
    for reason in sorted(reasons, key=lambda it: it.short_bytes):
        if reason.cut not in found:
            rejected.setdefault(reason.cut, reason)
    candidates = sorted(found.values(), key=lambda candidate: merit(question, candidate))
    return Answer(question=question, candidates=tuple(candidates), rejected=tuple(rejected.values()))


class Fitting(msgspec.Struct, frozen=True):
    """A cut, and the ways of dividing the model unevenly, or evenly, that fit."""

    cut: Cut
    layouts: tuple[tuple[Layout, Footprint], ...]


def fitting(question: Question, rejected: list[Rejected]) -> Iterator[Fitting]:
    """Every cut that fits, in no order; those that do not are added to `rejected`."""
    depths: dict[tuple[str, int, bool], set[int]] = {}
    for draft in drafts(question):
        cut = draft.cut
        tried = depths.setdefault((cut.precision, cut.tensor_parallel, cut.expert_parallel > 1), set())
        if len(tried) == DEPTHS and cut.pipeline_parallel not in tried:
            continue
        problem = objection(question, draft)
        if problem:
            rejected.append(Rejected(cut, problem))
            continue
        try:
            layouts = [(layout, _footprint(question, layout)) for layout in _layouts(question, draft)]
        except PlanError as error:
            rejected.append(Rejected(cut, str(error)))
            continue
        fits = tuple((layout, memory) for layout, memory in layouts if memory.fits)
        if fits:
            tried.add(cut.pipeline_parallel)
            yield Fitting(cut, fits)
        else:
            rejected.append(_too_large(cut, [memory for _, memory in layouts]))


def merit(question: Question, candidate: Candidate) -> tuple[float, ...]:
    """What is minimised: seconds of a request for latency, seconds of a token of the whole deployment for
    throughput, GPU-seconds of a token for cost. Between equals the simpler layout is better, and splitting a model
    that fits one GPU has to gain SPLIT_GAIN over its replicas: those are simpler, and one that fails leaves the others.
    """
    predicted, layout = candidate.predicted, candidate.layout
    asked = question.workload.concurrency
    if question.objective == "latency":
        each = 1 / predicted.single_tok_s if asked is None else predicted.tpot_s
        main = predicted.ttft_s + question.workload.output_len * each
    else:
        main = 1 / output_tok_s(question, predicted)
        if question.objective == "cost":
            main *= len(set(layout.gpus))
        if layout.size == 1:
            main /= SPLIT_GAIN
    # To three digits: a difference below the model's own noise is none.
    simple = layout.size, layout.pipeline_parallel, layout.expert_parallel, len(layout.gpus)
    return float(f"{main:.3g}"), *map(float, simple), main


def output_tok_s(question: Question, predicted: Prediction) -> float:
    """Tokens per second of the whole deployment at the concurrency that was asked for, or saturated."""
    if question.workload.concurrency is None:
        return predicted.saturated_tok_s
    return predicted.concurrency / predicted.tpot_s


def engine_profile(question: Question) -> Profile:
    """The engine's constants, with the share of the memory that was asked for."""
    found, share = profile(question.engine), question.gpu_memory_utilization
    if share is None:
        return found
    asked = Constant(share, "--gpu-memory-utilization")
    return msgspec.structs.replace(found, utilization=asked, utilization_most=asked)


def kv_dtype(question: Question, precision: str) -> str:
    """What the cache is kept in: as asked, or what the engine takes beside these weights."""
    return question.kv_dtype or engine_profile(question).kv_dtype(precision)


def _footprint(question: Question, layout: Layout) -> Footprint:
    return footprint(question.shape, layout, question.cluster, engine_profile(question), question.workload)


def _predict(question: Question, layout: Layout, memory: Footprint) -> Prediction:
    return predict(question.shape, layout, question.cluster, question.workload, engine_profile(question), memory)


def _layouts(question: Question, draft: Draft) -> list[Layout]:
    """The ways to divide the model over a draft's GPUs: as the user says, else evenly over equal ones, and over
    different ones by their bandwidth and by their memory."""
    return [
        _deployed(question, draft, weights, layers)
        for weights in _tensor_weights(question, draft)
        for layers in _stage_layers(question, draft, weights)
    ]


def _deployed(question: Question, draft: Draft, weights: Sequence[float], layers: Sequence[int]) -> Layout:
    cut = draft.cut
    return deploy(
        question.shape,
        tensor_weights=weights,
        stage_layers=layers,
        gpus=[device.number for replica in draft.replicas for stage in replica for device in stage],
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
    if all(len({device.gpu for device in stage}) == 1 for stage in stages):
        return [even]
    bandwidth = tuple(min(stage[rank].gpu.bandwidth_Bps for stage in stages) for rank in range(ranks))
    memory = tuple(float(min(stage[rank].gpu.memory_bytes for stage in stages)) for rank in range(ranks))
    return list(dict.fromkeys([bandwidth, memory, even]))


def _stage_layers(question: Question, draft: Draft, weights: Sequence[float]) -> list[tuple[int, ...]]:
    shape, cut, stages = question.shape, draft.cut, draft.cut.pipeline_parallel
    if question.wish.pipeline_split:
        return [question.wish.pipeline_split]
    if stages == 1:
        return [(shape.layers,)]
    dtype, tokens = kv_dtype(question, cut.precision), question.workload.longest
    group = (0, cut.data_parallel) if cut.expert_parallel > 1 else None
    even = _even(shape.layers, stages)
    # What an engine keeps of a GPU for itself is seen on one replica with even shares.
    one = Draft(msgspec.structs.replace(cut, data_parallel=1, expert_parallel=1), draft.replicas[:1])
    kept = [rank.other_bytes for rank in _footprint(question, _deployed(question, one, weights, even)).ranks]
    most, tensor = engine_profile(question).utilization_most.value, cut.tensor_parallel
    # A stage has as many layers in every replica: what the poorest GPU of its position can take.
    seats = []
    for position, other in enumerate(kept):
        stage, rank = divmod(position, tensor)
        alike = {replica[stage][rank].gpu for replica in draft.replicas}
        seats.append(
            Seat(
                min(gpu.memory_bytes for gpu in alike) * most - other,
                min(gpu.bandwidth_Bps for gpu in alike),
            )
        )
    by_stage = [seats[start : start + tensor] for start in range(0, len(seats), tensor)]
    found = [
        stage_layers(shape, cut.precision, dtype, tokens, weights, by_stage, expert_group=group, by_room=by_room)
        for by_room in (False, True)
    ]
    known = dict.fromkeys(layers for layers in found if layers is not None)
    # Where nothing fits, the even split shows by how much.
    return list(known) or [even]


def _even(layers: int, stages: int) -> tuple[int, ...]:
    each, rest = divmod(layers, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


def _too_large(cut: Cut, tried: Sequence[Footprint]) -> Rejected:
    """Why a cut does not fit, told of the way of dividing it that comes closest."""
    memory = max(tried, key=lambda it: it.ranks[it.fullest].kv_room_bytes)
    rank = memory.ranks[memory.fullest]
    replica = min(memory.replicas, key=lambda it: it.kv_tokens)
    have = f"{gigabytes(rank.usable_bytes)} of the {gigabytes(rank.memory_bytes)} of {rank.gpu}"
    need = f"{gigabytes(rank.weights.total)} of weights and {gigabytes(rank.other_bytes)} for the engine on one GPU"
    if rank.kv_room_bytes < 0:
        short = -rank.kv_room_bytes
        return Rejected(cut, f"{need} exceed {have} by {gigabytes(short)}", short)
    short = replica.length * rank.kv_bytes_per_token - rank.kv_room_bytes
    return Rejected(
        cut,
        f"{need} leave room in {have} for {replica.kv_tokens:,} tokens of KV; "
        f"one request of {replica.length:,} needs {gigabytes(short)} more",
        max(1, short),
    )
