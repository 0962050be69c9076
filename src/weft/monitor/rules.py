"""Diagnosis rules: each finds one fault in a History, with its figure, its limit, and the change that helps.

A rule is a pure function. It is silent if the history is too short or has too little work to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from statistics import median

import msgspec

from weft.formatting import format_bytes
from weft.monitor.history import GpuMoment, History, RankShares
from weft.plan.plan import Plan

CODES = (
    "allreduce_wait",
    "straggler",
    "stage_imbalance",
    "kv_starved",
    "preemption_storm",
    "prefix_unused",
    "batch_small",
    "throttled",
    "foreign_memory",
    "slow_client",
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the rules. Shares are from 0 to 1.

    - `window_s`: what is true of a moment has to be true for so long; only counts of rare events go back further.
    - `steps`, `busy_s`, `seconds`: fewer steps, less time within steps, or a shorter history tell nothing.
    - `exchange`: share of a step that even the slowest rank of a stage spends with the others.
    - `straggler`: compute time of a rank, times the median of the others of its stage.
    - `imbalance`: share of the slowest stage's time that another split would save.
    - `kv_usage`: share of the KV cache in use while requests wait.
    - `preemptions`: preempted requests for each that ended or runs. `fewest_preemptions`: fewer are no storm.
    - `prompts`: fewer tell nothing about prefixes; `repeated`: share of them that begin like an earlier one; `hits`:
      share of their common tokens that the cache should have had.
    - `batch_room`: share of the KV cache that is free while requests wait only because of --max-num-seqs.
    - `clock`: share of its highest clock that a GPU under load should have.
    - `foreign`: share of a GPU's memory that other processes hold.
    - `unread_s`: seconds in which a client takes nothing of its answer.
    """

    window_s: float = 20.0
    steps: int = 50
    busy_s: float = 1.0
    seconds: float = 5.0
    exchange: float = 0.5
    straggler: float = 1.5
    imbalance: float = 0.15
    kv_usage: float = 0.9
    preemptions: float = 0.2
    fewest_preemptions: int = 4
    prompts: int = 48
    repeated: float = 0.4
    hits: float = 0.25
    batch_room: float = 0.5
    clock: float = 0.85
    foreign: float = 0.05
    unread_s: float = 5.0


LIMITS = Limits()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the deployment that a rule proposes; fields that stay as they are are empty.

    `speeds` are the measured speeds of the ranks for the same work, by local rank, the fastest 1. `requests` is the
    number of requests that run at once before and after.
    """

    replica: int = 0
    tensor_split: tuple[int, ...] = ()
    pipeline_split: tuple[int, ...] = ()
    as_pipeline: bool = False
    speeds: tuple[float, ...] = ()
    requests: tuple[int, int] | None = None
    freed_bytes: int = 0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault: its code, a sentence with the figure, the figure and its limit, what helps, and the change itself."""

    code: str
    text: str
    value: float
    limit: float
    remedy: str
    change: Change | None = None


Rule = Callable[[History, Limits], Iterator[Finding]]


def diagnose(history: History, limits: Limits = LIMITS) -> list[Finding]:
    """All faults of a history, the worst of each code."""
    worst: dict[str, Finding] = {}
    if len(history.snapshots) < 2:
        return []
    recent = history.recent(limits.window_s)
    for rule in RULES:
        for finding in rule(history if rule in COUNTING else recent, limits):
            known = worst.get(finding.code)
            if known is None or _excess(finding) > _excess(known):
                worst[finding.code] = finding
    return [worst[code] for code in CODES if code in worst]


def _excess(finding: Finding) -> float:
    return finding.value / finding.limit if finding.limit else finding.value


# --- ranks ---


def stage_ranks(history: History, limits: Limits) -> Iterator[tuple[Plan, list[RankShares]]]:
    """The ranks of each stage of each attention group, if all of them had enough work to tell."""
    shares = {(rank.counters.replica, rank.counters.local_rank): rank for rank in history.shares()}
    for replica, plan in enumerate(history.plans):
        for group in plan.tensor_groups:
            ranks = [shares[replica, rank] for rank in group if (replica, rank) in shares]
            if len(ranks) == len(group) and all(has_worked(rank, limits) for rank in ranks):
                yield plan, ranks


def has_worked(rank: RankShares, limits: Limits) -> bool:
    """Return True for a rank with enough steps, and time within them, to tell."""
    counters = rank.counters
    return counters.steps >= limits.steps and counters.compute_s >= limits.busy_s / 4


def allreduce_wait(history: History, limits: Limits) -> Iterator[Finding]:
    """Tensor-parallel ranks that spend their steps with each other: even the one that others wait for."""
    for plan, ranks in stage_ranks(history, limits):
        spent = [None if rank.communication is None else rank.communication + (rank.waiting or 0.0) for rank in ranks]
        known = [share for share in spent if share is not None]
        if len(ranks) < 2 or len(known) < len(ranks) or min(known) <= limits.exchange:
            continue
        first = ranks[0].counters
        stages = len(ranks) * plan.stages
        possible = stages <= len(plan.shape.layers) and plan.data_parallel == 1
        yield Finding(
            code="allreduce_wait",
            text=f"ranks {_names(ranks)} spend {min(known):.0%} of each step in sums over the ranks, each of them at "
            f"least (limit {limits.exchange:.0%})",
            value=min(known),
            limit=limits.exchange,
            remedy=f"--pipeline-parallel-size {stages} in place of --tensor-parallel-size {len(ranks)}"
            if possible
            else "fewer tensor-parallel ranks",
            change=Change(replica=first.replica, as_pipeline=True) if possible else None,
        )


def straggler(history: History, limits: Limits) -> Iterator[Finding]:
    """A rank that computes longer than the others of its stage, which wait for it: slow, or with too large a share."""
    for plan, ranks in stage_ranks(history, limits):
        if len(ranks) < 2:
            continue
        slowest = max(ranks, key=lambda rank: rank.counters.compute_s)
        others = [rank.counters.compute_s for rank in ranks if rank is not slowest]
        ratio = slowest.counters.compute_s / max(1e-9, median(others))
        if ratio <= limits.straggler:
            continue
        weights = history.weights[ranks[0].counters.replica]
        work = [float(weights[rank.counters.local_rank]) for rank in ranks]
        speeds = [share / rank.counters.compute_s for share, rank in zip(work, ranks, strict=True)]
        split = small_ratio(speeds, units=plan.shape.kv_heads)
        at = ranks.index(slowest)
        uneven = work[at] / median(share for rank, share in zip(ranks, work, strict=True) if rank is not slowest)
        cause = (
            f"the split gives it {uneven:.1f} times the work"
            if uneven > 1 + (ratio - 1) / 2
            else "it does the same work more slowly"
        )
        rank = slowest.counters
        free = f"free the device of rank {rank.rank} on {rank.node} from other work"
        feasible = len(split) == len(ranks) and split != small_ratio(work, units=plan.shape.kv_heads)
        change = " or ".join(
            ([f"--tensor-split {','.join(map(str, split))}"] if feasible else [])
            + ([free] if uneven <= 1 + (ratio - 1) / 2 or not feasible else [])
        )
        yield Finding(
            code="straggler",
            text=f"rank {rank.rank} on {rank.node} ({plan.devices[rank.local_rank].name}) computes {ratio:.1f} times as "
            f"long as the other ranks of its stage, which wait for it: {cause} (limit {limits.straggler:.1f})",
            value=ratio,
            limit=limits.straggler,
            remedy=change,
            change=Change(replica=rank.replica, tensor_split=split, speeds=all_speeds(plan, ranks, speeds))
            if feasible
            else None,
        )


def stage_imbalance(history: History, limits: Limits) -> Iterator[Finding]:
    """A pipeline whose slowest stage another split of the layers would relieve."""
    by_plan: dict[tuple[int, int], tuple[Plan, dict[int, float], list[RankShares]]] = {}
    for plan, ranks in stage_ranks(history, limits):
        place = plan.places[ranks[0].counters.local_rank]
        key = ranks[0].counters.replica, place.dp_rank
        _, seconds, every = by_plan.setdefault(key, (plan, {}, []))
        seconds[place.stage] = max(rank.counters.compute_s for rank in ranks)
        every += ranks
    for (replica, _), (plan, seconds, every) in by_plan.items():
        if plan.stages < 2 or len(seconds) < plan.stages:
            continue
        times = [seconds[stage] for stage in range(plan.stages)]
        layers = [len(plan.places[ranks[0]].layers) for ranks in plan.tensor_groups[: plan.stages]]
        split = balanced_layers(layers, times)
        expected = max(new * time / old for new, old, time in zip(split, layers, times, strict=True))
        gain = 1 - expected / max(times)
        if gain <= limits.imbalance:
            continue
        slowest = times.index(max(times))
        yield Finding(
            code="stage_imbalance",
            text=f"stage {slowest} with {layers[slowest]} of {sum(layers)} layers computes {times[slowest] / min(times):.1f} "
            f"times as long as the fastest stage: another split would take {gain:.0%} off a step "
            f"(limit {limits.imbalance:.0%})",
            value=gain,
            limit=limits.imbalance,
            remedy=f"--pipeline-split {','.join(map(str, split))}",
            change=Change(
                replica=replica,
                pipeline_split=split,
                speeds=stage_speeds(plan, layers, times),
            ),
        )


def all_speeds(plan: Plan, ranks: Sequence[RankShares], speeds: Sequence[float]) -> tuple[float, ...]:
    """Speeds of all ranks of a plan, of which some have been measured; the fastest of these is 1, and so are others."""
    known = {rank.counters.local_rank: speed for rank, speed in zip(ranks, speeds, strict=True)}
    return tuple(known.get(rank, max(speeds)) / max(speeds) for rank in range(len(plan.places)))


def stage_speeds(plan: Plan, layers: Sequence[int], times: Sequence[float]) -> tuple[float, ...]:
    """Speeds of all ranks by the layers per second of their stages, the fastest 1."""
    by_stage = [count / time for count, time in zip(layers, times, strict=True)]
    return tuple(by_stage[place.stage] / max(by_stage) for place in plan.places)


def small_ratio(weights: Sequence[float], *, units: int) -> tuple[int, ...]:
    """The ratio of the smallest whole numbers, with a sum of at most `units`, that is close to that of `weights`.

    A stage is cut in whole KV heads, `units` of them: finer ratios give the same cut. Empty if there are fewer units
    than weights.
    """
    if units < len(weights):
        return ()
    total = sum(weights)

    def error(parts: Sequence[int]) -> float:
        return max(abs(part / sum(parts) - weight / total) for part, weight in zip(parts, weights, strict=True))

    candidates = []
    for whole in range(len(weights), min(units, 64) + 1):
        parts = [max(1, round(whole * weight / total)) for weight in weights]
        if sum(parts) <= units:
            candidates.append(tuple(parts))
    best = min(map(error, candidates), default=0.0)
    return next((parts for parts in candidates if error(parts) <= best + 0.02), ())


def balanced_layers(layers: Sequence[int], times: Sequence[float]) -> tuple[int, ...]:
    """Layers per stage that make the slowest stage as fast as possible, at the measured time per layer of each."""
    each = [time / count for time, count in zip(times, layers, strict=True)]
    split = [1] * len(layers)
    for _ in range(sum(layers) - len(layers)):
        # One more layer to the stage that is the fastest with it.
        stage = min(range(len(split)), key=lambda number: (split[number] + 1) * each[number])
        split[stage] += 1
    return tuple(split)


def _names(ranks: Sequence[RankShares]) -> str:
    return ", ".join(str(rank.counters.rank) for rank in ranks)


# --- requests ---


def has_served(history: History, limits: Limits) -> bool:
    """Return True for a history that is long enough, with enough moments and steps, to judge how requests are served."""
    enough = history.seconds >= limits.seconds and len(history.snapshots) > 2
    return enough and history.counted("steps") >= limits.steps


def always_waiting(history: History) -> bool:
    """Return True if requests waited at every moment but the first, from which it is known what came since."""
    return all(snapshot.total.waiting > 0 for snapshot in history.snapshots[1:])


def kv_usage(history: History) -> float:
    """Smallest share of the KV cache in use, over all moments but the first."""
    later = [snapshot.total for snapshot in history.snapshots[1:]]
    return min(total.blocks_used / max(1, total.blocks_total) for total in later)


def kv_starved(history: History, limits: Limits) -> Iterator[Finding]:
    """Requests that wait because the KV cache is full."""
    usage, total = kv_usage(history), history.last.total
    most = sum(plan.max_running for plan in history.plans)
    if not has_served(history, limits) or not always_waiting(history) or total.running >= most:
        return
    if usage <= limits.kv_usage:
        return
    wanted = min(most, total.running + total.waiting)
    cache_bytes = needed_cache_bytes(history, wanted)
    yield Finding(
        code="kv_starved",
        text=f"{usage:.0%} of the KV cache is in use, and {total.waiting} requests wait for room beside "
        f"{total.running} that run (limit {limits.kv_usage:.0%})",
        value=usage,
        limit=limits.kv_usage,
        remedy=f"--kv-cache-memory-bytes {cache_bytes} ({format_bytes(cache_bytes)} per rank), for {wanted} requests at "
        f"once",
        change=Change(requests=(max(1, total.running), wanted)),
    )


def needed_cache_bytes(history: History, requests: int) -> int:
    """Bytes per rank of a KV cache for `requests` requests at once of the size that those have which run now."""
    plan, total = history.plans[0], history.last.total
    blocks = ceil(total.blocks_used / max(1, total.running)) * requests / len(history.plans)
    return ceil(blocks) * max(plan.block_bytes(rank) for rank in range(len(plan.places)))


def preemption_storm(history: History, limits: Limits) -> Iterator[Finding]:
    """Requests that lose their KV again and again, and compute it anew."""
    preemptions, total = history.counted("preemptions"), history.last.total
    ratio = preemptions / max(1, history.grown("finished") + total.running)
    if preemptions < limits.fewest_preemptions or ratio <= limits.preemptions or not has_served(history, limits):
        return
    running = [snapshot.total.running for snapshot in history.snapshots[1:]]
    fewer = max(1, int(0.75 * median(running) / len(history.plans)))
    wanted = max(1, total.running + total.waiting)
    yield Finding(
        code="preemption_storm",
        text=f"{preemptions:.0f} requests were preempted in {history.seconds:.0f} s, {ratio:.1f} for each that ended or "
        f"runs (limit {limits.preemptions:.1f}): the KV cache has no room for them all",
        value=ratio,
        limit=limits.preemptions,
        remedy=f"--max-num-seqs {fewer}, or --kv-cache-memory-bytes {needed_cache_bytes(history, wanted)}",
        change=Change(requests=(max(1, total.running), wanted)),
    )


def prefix_unused(history: History, limits: Limits) -> Iterator[Finding]:
    """Prompts that begin alike, and are computed anew each time."""
    prompts, repeated = history.grown("prompts"), history.grown("repeated_prompts")
    tokens = history.grown("repeated_tokens")
    if prompts < limits.prompts or repeated <= limits.repeated * prompts or not tokens:
        return
    hits = history.counted("prefix_hits") / tokens
    if hits >= limits.hits:
        return
    if not history.caching:
        remedy = "--enable-prefix-caching, which is off"
    elif len(history.plans) > 1:
        remedy = "weft gateway --policy prefix over single servers, or a larger --kv-cache-memory-bytes"
    else:
        remedy = f"--kv-cache-memory-bytes {2 * needed_cache_bytes(history, max(1, history.last.total.running))}, so "
        remedy += "that prefixes stay; with a cache_salt per request nothing is shared"
    yield Finding(
        code="prefix_unused",
        text=f"{repeated} of {prompts} prompts begin like an earlier one, and the cache had {hits:.0%} of these tokens "
        f"(limit {limits.hits:.0%})",
        value=hits,
        limit=limits.hits,
        remedy=remedy,
        change=Change(freed_bytes=0),
    )


def batch_small(history: History, limits: Limits) -> Iterator[Finding]:
    """Requests that wait only because of --max-num-seqs, while the KV cache has room."""
    total, most = history.last.total, sum(plan.max_running for plan in history.plans)
    if not has_served(history, limits) or not always_waiting(history) or total.running < most:
        return
    later = [snapshot.total for snapshot in history.snapshots[1:]]
    used = max(one.blocks_used / max(1, one.blocks_total) for one in later)
    if 1 - used <= limits.batch_room:
        return
    room = int(total.running * 0.9 / max(used, 0.01))
    wanted = min(total.running + total.waiting, room)
    each = max(1, wanted // len(history.plans))
    if wanted <= most:
        return
    yield Finding(
        code="batch_small",
        text=f"{total.waiting} requests wait although {1 - used:.0%} of the KV cache is free "
        f"(limit {limits.batch_room:.0%}): only {most} may run at once",
        value=1 - used,
        limit=limits.batch_room,
        remedy=f"--max-num-seqs {each}",
        change=Change(requests=(total.running, wanted)),
    )


# --- GPUs and clients ---


def throttled(history: History, limits: Limits) -> Iterator[Finding]:
    """A GPU whose clock is lowered at every moment but the first."""
    for gpu in history.last.gpus:
        moments = moments_of(history, gpu.figures.index)
        reasons = [moment.figures.throttle for moment in moments]
        clocks = [moment.figures.sm_clock_mhz for moment in moments]
        if not all(reasons) or gpu.most_clock_mhz is None or None in clocks:
            continue
        share = max(clock or 0 for clock in clocks) / gpu.most_clock_mhz
        if share >= limits.clock:
            continue
        why = ", ".join(gpu.figures.throttle)
        limit_w = gpu.figures.power_limit_w
        power = f"a higher limit: nvidia-smi --power-limit, now {limit_w:.0f} W" if limit_w else "a higher power limit"
        yield Finding(
            code="throttled",
            text=f"GPU {gpu.figures.index} runs at {share:.0%} of its clock because of {why} (limit {limits.clock:.0%})",
            value=share,
            limit=limits.clock,
            remedy=power if "power cap" in gpu.figures.throttle else "better airflow, or fewer watts to its neighbours",
            change=Change(speeds=(share,)),
        )


def moments_of(history: History, index: int) -> list[GpuMoment]:
    """A GPU at every moment but the first."""
    return [gpu for snapshot in history.snapshots[1:] for gpu in snapshot.gpus if gpu.figures.index == index]


def foreign_memory(history: History, limits: Limits) -> Iterator[Finding]:
    """Memory of our GPUs that other processes hold."""
    for gpu in history.last.gpus:
        held = sum(holder.nbytes or 0 for holder in gpu.foreign)
        share = held / gpu.figures.memory_total_bytes
        if share <= limits.foreign:
            continue
        names = ", ".join(f"{holder.name or 'process'} ({holder.pid})" for holder in gpu.foreign)
        yield Finding(
            code="foreign_memory",
            text=f"{names} holds {format_bytes(held)} of GPU {gpu.figures.index}, {share:.0%} of its memory "
            f"(limit {limits.foreign:.0%})",
            value=share,
            limit=limits.foreign,
            remedy=f"stop these processes ({', '.join(str(holder.pid) for holder in gpu.foreign)}) and start again, or "
            "plan around them",
            change=Change(freed_bytes=held),
        )


def slow_client(history: History, limits: Limits) -> Iterator[Finding]:
    """Clients that do not read their answers."""
    slow = [seconds for seconds in history.last.unread_s if seconds > limits.unread_s]
    if slow:
        yield Finding(
            code="slow_client",
            text=f"{len(slow)} of {len(history.last.unread_s)} stalled clients has taken nothing for {max(slow):.0f} s "
            f"(limit {limits.unread_s:.0f} s)"
            if len(slow) > 1
            else f"a client has taken nothing of its answer for {max(slow):.0f} s (limit {limits.unread_s:.0f} s)",
            value=max(slow),
            limit=limits.unread_s,
            remedy="have the client read as tokens come, or end; a proxy in front should not hold answers back",
        )


RULES: tuple[Rule, ...] = (
    allreduce_wait,
    straggler,
    stage_imbalance,
    kv_starved,
    preemption_storm,
    prefix_unused,
    batch_small,
    throttled,
    foreign_memory,
    slow_client,
)
COUNTING: tuple[Rule, ...] = (preemption_storm, prefix_unused)
