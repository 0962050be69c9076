"""Faults that follow from others: a slow rank also makes its stage slow, and the ranks of other stages wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from weft.monitor.finding import Code, Finding
from weft.monitor.history import History


class Cause(NamedTuple):
    """A fault that explains another one if both are of the same rank, of the same replica, or of the same server."""

    code: Code
    same: Literal["rank", "replica", "server"]


# The causes of a code. The first one that applies is named, so the causes that have causes of their own come last.
CAUSES: Mapping[Code, tuple[Cause, ...]] = {
    Code.ALLREDUCE_WAIT: (Cause(Code.STRAGGLER, "replica"), Cause(Code.STAGE_IMBALANCE, "replica")),
    Code.STRAGGLER: (Cause(Code.THROTTLED, "rank"),),
    Code.STAGE_IMBALANCE: (Cause(Code.THROTTLED, "rank"), Cause(Code.STRAGGLER, "rank")),
    Code.PREEMPTION_STORM: (Cause(Code.KV_STARVED, "server"),),
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


def _belong_together(finding: Finding, other: Finding, cause: Cause, history: History) -> bool:
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
