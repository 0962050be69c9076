"""Diagnosis rules of tensor-parallel ranks: of their sums, and of a slow one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from weft.monitor.finding import Change, Code, Finding, RuleLimits
from weft.monitor.history import History, RankCounters, RankShares
from weft.monitor.restart import restart_as_pipeline, restart_with_cut, small_ratio
from weft.plan.parallelism import Parallelism
from weft.plan.plan import Plan

SLOW_AT_SAME_WORK = "it does the same work more slowly"


def stage_ranks(history: History, limits: RuleLimits) -> Iterator[tuple[Plan, list[RankShares]]]:
    """The ranks of each stage of each attention group, if all of them had enough work to tell."""
    shares = {(rank.counters.replica, rank.counters.local_rank): rank for rank in history.shares()}
    for replica, plan in enumerate(history.plans):
        for group in plan.tensor_groups:
            ranks = [shares[replica, rank] for rank in group if (replica, rank) in shares]
            if len(ranks) == len(group) and all(has_worked(rank, limits) for rank in ranks):
                yield plan, ranks


def has_worked(rank: RankShares, limits: RuleLimits) -> bool:
    """Return True for a rank with enough steps, and time within them, to tell."""
    counters = rank.counters
    within_s = counters.compute_s + counters.waiting_s - (counters.idle_s or 0.0) + (counters.communication_s or 0.0)
    return counters.steps >= limits.steps and within_s >= limits.busy_s


def own_seconds(ranks: Sequence[RankShares]) -> list[float]:
    """Seconds of each rank of a stage in which it did not wait for the others.

    A rank whose core others use comes late out of its exchanges too. Transports that do not tell waits apart have them
    in these exchanges, which are left out then.
    """
    tells = any(rank.waiting for rank in ranks)
    return [rank.counters.compute_s + ((rank.counters.communication_s or 0.0) if tells else 0.0) for rank in ranks]


def slowness(ranks: Sequence[RankShares]) -> tuple[int, float]:
    """Position of the slowest of several ranks of a stage, and its time, times the median of the others."""
    seconds = own_seconds(ranks)
    slowest = seconds.index(max(seconds))
    return slowest, seconds[slowest] / max(1e-9, median(seconds[:slowest] + seconds[slowest + 1 :]))


def _least_exchange(ranks: Sequence[RankShares]) -> float | None:
    """The smallest share of their steps that ranks spend with each other; None for one rank, or if it is unknown."""
    shares = [_exchange_share(rank) for rank in ranks]
    known = [share for share in shares if share is not None]
    return min(known) if 1 < len(ranks) == len(known) else None


def _exchange_share(rank: RankShares) -> float | None:
    """The share of its steps that a rank spends in exchanges and waits for them."""
    return None if rank.communication is None else rank.communication + (rank.waiting or 0.0)


def allreduce_wait(history: History, limits: RuleLimits) -> Iterator[Finding]:
    """Tensor-parallel ranks that spend their steps with each other: even the rank that others wait for."""
    for plan, ranks in stage_ranks(history, limits):
        share = _least_exchange(ranks)
        if share is None or share <= limits.exchange:
            continue
        if slowness(ranks)[1] > limits.straggler or most_delayed(ranks, limits):  # the sums are not what is slow
            continue
        first = ranks[0].counters
        stages = len(ranks) * plan.stages
        possible = stages <= len(plan.shape.layers) and plan.data_parallel == 1
        yield Finding(
            code=Code.ALLREDUCE_WAIT,
            text=f"ranks {_names(ranks)} spend {share:.0%} of each step in sums over the ranks, each of them at "
            f"least (alarm above {limits.exchange:.0%})",
            value=share,
            limit=limits.exchange,
            remedy=restart_as_pipeline(history, stages) if possible else "restart with fewer tensor-parallel ranks",
            ranks=rank_numbers(ranks),
            change=Change(replica=first.replica, parallelism=Parallelism(1, stages)) if possible else None,
            alternative=f"free the devices of ranks {_names(ranks)} from other work",
        )


def most_delayed(ranks: Sequence[RankShares], limits: RuleLimits) -> RankShares | None:
    """The rank of a stage whose core has other work, more of it than the cores of the others; None if there is none."""
    delays = [rank.delayed or 0.0 for rank in ranks]
    most = max(delays)
    at = delays.index(most)
    others = delays[:at] + delays[at + 1 :]
    if not others or most <= limits.delayed or most <= limits.delayed_more * median(others):
        return None
    return ranks[at]


def delayed_straggler(history: History, limits: RuleLimits) -> Iterator[Finding]:
    """A rank that waits for its core, while the others of its stage wait for the rank.

    It may compute as fast as they do whenever it has the core.
    """
    for plan, ranks in stage_ranks(history, limits):
        slow = most_delayed(ranks, limits)
        if slow is None:
            continue
        rank = slow.counters
        yield Finding(
            code=Code.STRAGGLER,
            text=f"rank {rank.rank} on {rank.node} ({plan.devices[rank.local_rank].name}) is slow: other programs used "
            f"its core in {slow.delayed:.0%} of its steps (alarm above {limits.delayed:.0%}); the other ranks of its "
            "stage wait for it",
            value=slow.delayed or 0.0,
            limit=limits.delayed,
            remedy=_core_remedy(rank, plan.cores[rank.local_rank]),
            ranks=(rank.rank,),
        )


def _core_remedy(rank: RankCounters, cores: Sequence[int]) -> str:
    which = f"core {', '.join(map(str, cores))}" if cores else "the cores"
    return f"move other programs off {which} of {rank.node}, where rank {rank.rank} runs"


def _straggler_remedies(rank: RankCounters, restart: str, uneven_split: bool) -> Iterator[str]:
    """The rank to free, unless the split alone makes it slow, and the restart with another split, if one helps.

    The restart comes last: the planner's gain is written behind it.
    """
    if not restart or not uneven_split:
        yield f"free the device of rank {rank.rank} on {rank.node} from other work"
    if restart:
        yield restart


def straggler(history: History, limits: RuleLimits) -> Iterator[Finding]:
    """A rank that takes longer than the others of its stage, which wait for it: slow, or with too large a share."""
    for plan, ranks in stage_ranks(history, limits):
        if len(ranks) < 2:
            continue
        at, ratio = slowness(ranks)
        if ratio <= limits.straggler:
            continue
        slowest, seconds = ranks[at], own_seconds(ranks)
        weights = history.weights[slowest.counters.replica]
        work = [float(weights[rank.counters.local_rank]) for rank in ranks]
        speeds = [share / spent for share, spent in zip(work, seconds, strict=True)]
        split = small_ratio(speeds, units=plan.shape.kv_heads)
        uneven = work[at] / median(work[:at] + work[at + 1 :])
        uneven_split = uneven > 1 + (ratio - 1) / 2
        cause = f"the split gives it {uneven:.1f} times the work" if uneven_split else SLOW_AT_SAME_WORK
        rank, device = slowest.counters, plan.devices[slowest.counters.local_rank].name
        feasible = len(split) == len(ranks) and split != small_ratio(work, units=plan.shape.kv_heads)
        cut = Parallelism(tensor_split=split)
        restart = restart_with_cut(history, plan, cut) if feasible else ""
        yield Finding(
            code=Code.STRAGGLER,
            text=f"rank {rank.rank} on {rank.node} ({device}) takes {ratio:.1f} times as long as the other ranks of "
            f"its stage, which wait for it: {cause} (alarm above {limits.straggler:.1f})",
            value=ratio,
            limit=limits.straggler,
            remedy=", or ".join(_straggler_remedies(rank, restart, uneven_split)),
            ranks=(rank.rank,),
            change=Change(replica=rank.replica, parallelism=cut, speeds=all_speeds(plan, ranks, speeds))
            if feasible
            else None,
        )


def all_speeds(plan: Plan, ranks: Sequence[RankShares], speeds: Sequence[float]) -> tuple[float, ...]:
    """Speeds of all ranks of a plan, of which some have been measured; the fastest of these is 1, and so are others."""
    known = {rank.counters.local_rank: speed for rank, speed in zip(ranks, speeds, strict=True)}
    return tuple(known.get(rank, max(speeds)) / max(speeds) for rank in range(len(plan.places)))


def rank_numbers(ranks: Sequence[RankShares]) -> tuple[int, ...]:
    """Numbers of ranks over all replicas."""
    return tuple(rank.counters.rank for rank in ranks)


def _names(ranks: Sequence[RankShares]) -> str:
    return ", ".join(map(str, rank_numbers(ranks)))
