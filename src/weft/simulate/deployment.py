"""Deployment: the replicas of a plan, as a simulation runs them."""

from __future__ import annotations

import msgspec

from weft.config import EngineConfig
from weft.errors import PlanError
from weft.planner.footprint import BLOCK
from weft.planner.question import Question
from weft.planner.ranking import Candidate
from weft.planner.replica import build_replicas
from weft.planner.search import engine_profile
from weft.planner.steps import StepPredictor
from weft.simulate.replica import Spec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the user says of each replica's scheduler; None is what the engine takes by itself. With `lookahead` it
    schedules a step before the one under way is over, where there is no pipeline."""

    max_num_seqs: int | None = None
    max_num_queued: int = EngineConfig.max_num_queued_reqs
    lookahead: bool | None = None


def specs(question: Question, candidate: Candidate, limits: Limits) -> list[Spec]:
    """Of each replica of a candidate, in order; those that are equal are one object. Raises PlanError for limits under
    which no step could run."""
    layout, profile = candidate.layout, engine_profile(question)
    by_stage = layout.pipeline_parallel if profile.max_num_seqs_by_stage.value else 1
    steps: dict[int, StepPredictor] = {}
    known: dict[tuple[int, int], Spec] = {}
    found = []
    runs = build_replicas(question.shape, layout, question.cluster, profile)
    # An engine without a pipeline has one step under way, on one GPU after the other.
    stages = layout.pipeline_parallel if profile.pipelined.value else 1
    # As plan.layout.lookahead: on GPUs, where there is no pipeline.
    ahead = not question.cluster.on_cpu if limits.lookahead is None else limits.lookahead
    for replica, memory in zip(runs, candidate.memory.replicas, strict=True):
        key = id(replica), id(memory)
        if key not in known:
            most = min(profile.batch_limits(rank.memory_bytes)[1] for rank in memory.ranks)
            sequences = limits.max_num_seqs or by_stage * most
            known[key] = Spec(
                steps=steps.setdefault(id(replica), StepPredictor(replica)),
                num_blocks=memory.kv_tokens // BLOCK,
                block_size=BLOCK,
                max_num_seqs=sequences,
                max_num_batched_tokens=memory.batched_tokens,
                max_num_queued=limits.max_num_queued,
                max_model_len=question.workload.max_model_len or question.shape.longest,
                stages=stages,
                lookahead=ahead and stages == 1,
            )
        found.append(known[key])
    if not found[0].num_blocks:
        raise PlanError(f"the KV cache holds {candidate.memory.kv_tokens:,} tokens, less than one block of {BLOCK}")
    return found
