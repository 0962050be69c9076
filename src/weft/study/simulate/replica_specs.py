"""Specifications of the replicas of a planned deployment, for their simulation."""

from __future__ import annotations

import msgspec

from weft.config import EngineConfig
from weft.engine.core.view import SchedulerSettings
from weft.errors import PlanError
from weft.planner.memory.footprint import ReplicaMemory
from weft.planner.memory.request_kv import BLOCK
from weft.planner.profiles import EngineProfile, engine_profile
from weft.planner.question import Question
from weft.planner.search.ranking import Candidate
from weft.planner.speed.steps import StepPredictor
from weft.planner.work.replica import build_replicas
from weft.study.simulate.replica import ReplicaSpec


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The user's limits for each replica's scheduler.

    `max_num_seqs`: None or 0 for the default of the planned engine. `max_num_queued`: Weft's default if not given.
    `lookahead`: asynchronous scheduling, which plans a step before the current one has finished; None enables it on
    GPUs. It is ignored with a pipeline.
    """

    max_num_seqs: int | None = None
    max_num_queued: int = EngineConfig.max_num_queued_reqs
    lookahead: bool | None = None


def replica_specs(question: Question, candidate: Candidate, limits: SchedulerLimits) -> list[ReplicaSpec]:
    """Specifications of a candidate's replicas, in order; equal replicas share one object.

    Replicas that share their experts are the attention groups of one engine, and have one specification together.

    Raises PlanError for limits under which no step could run.
    """
    profile = engine_profile(question)
    # By id: `build_replicas` and the footprint return one object for equal replicas.
    predictors: dict[int, StepPredictor] = {}
    cache: dict[tuple[int, int], ReplicaSpec] = {}
    specs = []
    planned = build_replicas(question.shape, candidate.layout, question.cluster, profile)
    if candidate.layout.parallelism.shares_experts:
        groups = tuple(predictors.setdefault(id(replica), StepPredictor(replica)) for replica in planned)
        specs.append(_replica_spec(question, candidate, limits, profile, groups, candidate.memory.replicas[0]))
        _require_kv_blocks(specs, candidate)
        return specs
    for replica, memory in zip(planned, candidate.memory.replicas, strict=True):
        key = id(replica), id(memory)
        if key not in cache:
            predictor = predictors.setdefault(id(replica), StepPredictor(replica))
            cache[key] = _replica_spec(question, candidate, limits, profile, (predictor,), memory)
        specs.append(cache[key])
    _require_kv_blocks(specs, candidate)
    return specs


def _require_kv_blocks(specs: list[ReplicaSpec], candidate: Candidate) -> None:
    """Raise PlanError for a replica whose KV cache has no block."""
    if any(not spec.num_blocks for spec in specs):
        least = min(replica.kv_tokens for replica in candidate.memory.replicas)
        raise PlanError(
            f"the KV cache holds {least:,} tokens, less than one block of {BLOCK}", code="kv-cache-below-block"
        )


def _replica_spec(
    question: Question,
    candidate: Candidate,
    limits: SchedulerLimits,
    profile: EngineProfile,
    predictors: tuple[StepPredictor, ...],
    memory: ReplicaMemory,
) -> ReplicaSpec:
    depth = candidate.layout.parallelism.pipeline_parallel
    # An engine without pipelining has one step in flight, which passes through one GPU after the other.
    stages = depth if profile.pipelined.value else 1
    # On GPUs, if there is no pipeline, as in plan.layout.lookahead.
    lookahead = not question.cluster.on_cpu if limits.lookahead is None else limits.lookahead
    max_num_seqs = limits.max_num_seqs
    if not max_num_seqs:
        _, sequences = zip(*(profile.batch_limits(rank.memory_bytes) for rank in memory.ranks), strict=True)
        max_num_seqs = min(sequences) * (depth if profile.max_num_seqs_by_stage.value else 1)
    return ReplicaSpec(
        predictors=predictors,
        kv=memory.kv.layout,
        num_blocks=memory.num_blocks,
        scheduler=SchedulerSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=memory.batched_tokens,
            max_num_queued=limits.max_num_queued,
            max_model_len=question.workload.max_model_len or question.shape.longest,
            stages=stages,
            policy="fcfs",
            lookahead=lookahead and stages == 1,
        ),
    )
