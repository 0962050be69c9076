"""Diagnosis: rules that each find one fault in a History, with its figure, its limit, and the change that helps.

A rule is a pure function. It is silent if the history is too short or has too little work to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from weft.formatting import format_bytes
from weft.machine.hardware.gpu_figures import GpuFigures
from weft.monitor.finding import LIMITS, Change, Code, Finding, RuleLimits
from weft.monitor.history import GpuMoment, History
from weft.monitor.rank_rules import allreduce_wait, delayed_straggler, straggler
from weft.monitor.request_rules import batch_small, kv_starved, preemption_storm, prefix_unused
from weft.monitor.stage_rules import stage_imbalance

Rule = Callable[[History, RuleLimits], Iterator[Finding]]

CODES: tuple[str, ...] = tuple(Code)


def diagnose(history: History, limits: RuleLimits = LIMITS) -> list[Finding]:
    """All faults of a history, the worst of each code; one that follows from another says so."""
    worst: dict[str, Finding] = {}
    if len(history.snapshots) < 2:
        return []
    recent = history.recent(limits.window_s)
    for rule in RULES:
        for finding in rule(history if rule in COUNTING else recent, limits):
            known = worst.get(finding.code)
            if known is None or _excess(finding) > _excess(known):
                worst[finding.code] = finding
    return link_causes([worst[code] for code in CODES if code in worst], history)


def _excess(finding: Finding) -> float:
    return finding.value / finding.limit if finding.limit else finding.value


def throttled(history: History, limits: RuleLimits) -> Iterator[Finding]:
    """A GPU whose clock is lowered at every moment but the first."""
    for gpu in history.last.gpus:
        moments = moments_of(history, gpu.figures.index)
        if len(moments) < 2 or not all(moment.figures.throttle for moment in moments):
            continue
        share = _clock_share(gpu.most_clock_mhz, moments)
        if share is None or share >= limits.clock:
            continue
        why = ", ".join(gpu.figures.throttle)
        yield Finding(
            code=Code.THROTTLED,
            text=f"GPU {gpu.figures.index} runs at {share:.0%} of its clock: {why} (alarm below {limits.clock:.0%})",
            value=share,
            limit=limits.clock,
            remedy=_throttle_remedy(gpu.figures),
            ranks=ranks_on_gpu(history, gpu.figures.index),
        )


def _clock_share(most_mhz: int | None, moments: Sequence[GpuMoment]) -> float | None:
    """The highest share of its clock that a GPU reaches; None if the driver does not report clocks at all moments."""
    clocks = [moment.figures.sm_clock_mhz for moment in moments]
    known = [clock for clock in clocks if clock is not None]
    if most_mhz is None or len(known) < len(clocks):
        return None
    return max(known) / most_mhz


def _throttle_remedy(figures: GpuFigures) -> str:
    if "power cap" not in figures.throttle:
        return "better airflow, or fewer watts to its neighbours"
    if figures.power_limit_w:
        return f"a higher limit: nvidia-smi --power-limit, now {figures.power_limit_w:.0f} W"
    return "a higher power limit"


def ranks_on_gpu(history: History, index: int) -> tuple[int, ...]:
    """The ranks on a GPU of the server's own node, numbered over all replicas."""
    return tuple(
        history.first_rank(replica) + rank
        for replica, plan in enumerate(history.plans)
        for rank in plan.ranks_of(0)
        if plan.devices[rank].name == f"cuda:{index}"
    )


def moments_of(history: History, index: int) -> list[GpuMoment]:
    """A GPU at every moment but the first."""
    return [gpu for snapshot in history.snapshots[1:] for gpu in snapshot.gpus if gpu.figures.index == index]


def foreign_memory(history: History, limits: RuleLimits) -> Iterator[Finding]:
    """Memory of our GPUs that other processes hold."""
    for gpu in history.last.gpus:
        held = sum(holder.nbytes or 0 for holder in gpu.foreign)
        share = held / gpu.figures.memory_total_bytes
        if share <= limits.foreign:
            continue
        names = ", ".join(f"{holder.name or 'process'} ({holder.pid})" for holder in gpu.foreign)
        yield Finding(
            code=Code.FOREIGN_MEMORY,
            text=f"{names} holds {format_bytes(held)} of GPU {gpu.figures.index}, {share:.0%} of its memory "
            f"(alarm above {limits.foreign:.0%})",
            value=share,
            limit=limits.foreign,
            remedy=f"stop these processes ({', '.join(str(holder.pid) for holder in gpu.foreign)}) and restart with "
            "the same flags, or plan around them",
            ranks=ranks_on_gpu(history, gpu.figures.index),
            change=Change(freed_bytes=held),
        )


def slow_client(history: History, limits: RuleLimits) -> Iterator[Finding]:
    """Clients that do not read their answers."""
    slow = [seconds for seconds in history.last.unread_s if seconds > limits.unread_s]
    if slow:
        yield Finding(
            code=Code.SLOW_CLIENT,
            text=f"{len(slow)} of {len(history.last.unread_s)} stalled clients has taken nothing for {max(slow):.0f} s "
            f"(alarm above {limits.unread_s:.0f} s)"
            if len(slow) > 1
            else f"a client has taken nothing of its answer for {max(slow):.0f} s "
            f"(alarm above {limits.unread_s:.0f} s)",
            value=max(slow),
            limit=limits.unread_s,
            remedy="have the client read as tokens come, or end; a proxy in front should not hold answers back",
        )


RULES: tuple[Rule, ...] = (
    allreduce_wait,
    straggler,
    delayed_straggler,
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


class RootCause(NamedTuple):
    """A fault that explains another one if both are of the same rank, of the same replica, or of the same server."""

    code: Code
    same: Literal["rank", "replica", "server"]


# The causes of a code. The first one that applies is named, so the causes that have causes of their own come last.
CAUSES: Mapping[Code, tuple[RootCause, ...]] = {
    Code.ALLREDUCE_WAIT: (RootCause(Code.STRAGGLER, "replica"), RootCause(Code.STAGE_IMBALANCE, "replica")),
    Code.STRAGGLER: (RootCause(Code.THROTTLED, "rank"),),
    Code.STAGE_IMBALANCE: (RootCause(Code.THROTTLED, "rank"), RootCause(Code.STRAGGLER, "rank")),
    Code.PREEMPTION_STORM: (RootCause(Code.KV_STARVED, "server"),),
}


def link_causes(findings: Sequence[Finding], history: History) -> list[Finding]:
    """The findings of a history, each with the other one that it follows from."""
    by_code = {finding.code: finding for finding in findings}
    return [replace(finding, follows_from=_cause_of(finding, by_code, history)) for finding in findings]


def _cause_of(finding: Finding, by_code: Mapping[Code, Finding], history: History) -> Code | None:
    for cause in CAUSES.get(finding.code, ()):
        other = by_code.get(cause.code)
        if other is not None and _belong_together(finding, other, cause, history):
            return cause.code
    return None


def _belong_together(finding: Finding, other: Finding, cause: RootCause, history: History) -> bool:
    match cause.same:
        case "rank":
            return not set(finding.ranks).isdisjoint(other.ranks)
        case "replica":
            return not _replicas(finding, history).isdisjoint(_replicas(other, history))
        case "server":
            return True


def _replicas(finding: Finding, history: History) -> set[int]:
    """The replicas whose ranks are at fault."""
    firsts = [history.first_rank(replica) for replica in range(len(history.plans))]
    return {sum(first <= rank for first in firsts) - 1 for rank in finding.ranks}
