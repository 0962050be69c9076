"""The flags of a restart with another cut of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.formatting import join_commas
from weft.monitor.history import History
from weft.plan.parallelism import Parallelism
from weft.plan.plan import Plan

FINEST = 64  # largest sum of the numbers of a ratio


def restart_with_cut(history: History, plan: Plan, change: Parallelism) -> str:
    """The restart that changes a split of `plan`, with every flag that keeps the rest of the cut.

    All of them are needed: a flag for one part of the cut sets each part without a flag to one rank.
    """
    cut = plan.parallelism.changed(change)
    flags = [*_tensor_flags(plan, cut.tensor_split), *_stage_flags(cut.pipeline_split), *_group_flags(history, cut)]
    return f"restart with {' '.join(flags)}"


def restart_as_pipeline(history: History, stages: int) -> str:
    """The restart with a pipeline of `stages` single ranks in place of tensor parallelism."""
    flags = ["--tensor-parallel-size 1", f"--pipeline-parallel-size {stages}", *_replica_flags(len(history.plans))]
    return f"restart with {' '.join(flags)}"


def tensor_weights(plan: Plan) -> tuple[int, ...]:
    """Weights of the tensor-parallel ranks, by their shares of the vocabulary: heads are cut in larger units."""
    return small_ratio([len(plan.places[rank].vocab) for rank in plan.tensor_groups[0]], units=FINEST)


def small_ratio(weights: Sequence[float], *, units: int) -> tuple[int, ...]:
    """The ratio of the smallest whole numbers, with a sum of at most `units`, that is close to the ratio of `weights`.

    A stage is cut in whole KV heads, `units` of them: finer ratios give the same cut. Empty if there are fewer units
    than weights.
    """
    if units < len(weights):
        return ()
    total = sum(weights)

    def error(parts: Sequence[int]) -> float:
        return max(abs(part / sum(parts) - weight / total) for part, weight in zip(parts, weights, strict=True))

    candidates = []
    for whole in range(len(weights), min(units, FINEST) + 1):
        parts = [max(1, round(whole * weight / total)) for weight in weights]
        if sum(parts) <= units:
            candidates.append(tuple(parts))
    best = min(map(error, candidates), default=0.0)
    return next((parts for parts in candidates if error(parts) <= best + 0.01), ())


def _tensor_flags(plan: Plan, split: Sequence[float]) -> Iterator[str]:
    kept = tensor_weights(plan)
    if split or len(set(kept)) > 1:
        yield f"--tensor-split {join_commas(split or kept)}"
    elif plan.tensor_parallel > 1:
        yield f"--tensor-parallel-size {plan.tensor_parallel}"


def _stage_flags(layers: Sequence[int]) -> Iterator[str]:
    if len(layers) > 1:
        yield f"--pipeline-split {join_commas(layers)}"


def _group_flags(history: History, cut: Parallelism) -> Iterator[str]:
    """Flags of replicas, or of attention groups, and of experts."""
    yield from _replica_flags(len(history.plans) * cut.data_parallel)
    if cut.deals_experts:
        yield "--enable-expert-parallel"
    if cut.expert_size:
        yield f"--expert-parallel-size {cut.expert_size}"


def _replica_flags(count: int) -> Iterator[str]:
    if count > 1:
        yield f"--data-parallel-size {count}"
