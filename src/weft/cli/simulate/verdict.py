"""The first line of weft simulate: whether the load is carried, and the promise kept."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

from weft.study.simulate.objective import format_duration
from weft.study.simulate.report import Report
from weft.study.simulate.study import Study

# Answered share of the requests that arrive, below which a load is too high. A run that is steady answers all of them
# but for the chance of its last seconds.
CARRIED = 0.95


class RunVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """`overloaded`: more requests arrive than are answered. `kept`: the promise is, None without one."""

    overloaded: bool
    kept: bool | None
    text: str


def is_overloaded(study: Study, run: Report) -> bool:
    """Return True if more requests arrive than the replicas can answer, by the simulation and by the plan."""
    if run.rate is None:
        return False  # users wait for their answers before they ask again
    return run.request_rate < CARRIED * run.rate and run.rate > CARRIED * study.capacity * run.replicas


def judge_run(study: Study, run: Report) -> RunVerdict:
    """The verdict on one run."""
    if is_overloaded(study, run):
        return RunVerdict(overloaded=True, kept=None if run.met is None else False, text=_overload_text(study, run))
    arriving = f"{run.users:,} users at once" if run.users else f"{run.rate:.4g} requests/s arrive"
    answered = f"{arriving}, {run.request_rate:,.4g} requests/s are answered"
    missed = [target for target in run.objective if not target.met]
    if missed:
        values = ", ".join(
            f"{target.target} {format_duration(target.value_s)} ({format_duration(target.limit_s)} promised)"
            for target in missed
        )
        return RunVerdict(overloaded=False, kept=False, text=f"promise not kept: {values}; {answered}")
    if run.met is not None:
        return RunVerdict(overloaded=False, kept=True, text=f"promise kept: {answered}")
    wait = f"; first token after {format_duration(run.ttft_s.p95)} at most for 95 of 100" if run.ttft_s else ""
    return RunVerdict(overloaded=False, kept=None, text=f"carried: {answered}{wait}")


def _overload_text(study: Study, run: Report) -> str:
    assert run.rate is not None
    capacity = study.capacity * run.replicas
    times = ceil(run.rate / capacity)
    more = f"{times} times the {study.device}s carry it" if times > 1 else f"more {study.device}s carry it"
    lost = f" ({run.refused:,} refused)" if run.refused else ""
    return (
        f"overloaded: {run.rate:.4g} requests/s arrive, {capacity:,.3g} can be answered{lost}; {more} "
        "(--find replicas with --slo tells how many), or fewer requests"
    )


def judge_sweep(study: Study, runs: Sequence[Report]) -> RunVerdict:
    """The verdict on runs at several rates: the highest one that is carried, and that keeps the promise."""
    carried = [run for run in runs if not is_overloaded(study, run)]
    kept = [run for run in carried if run.met]
    promised = any(run.met is not None for run in runs)
    best = max((run.rate or 0.0 for run in (kept if promised else carried)), default=None)
    what = "keep the promise" if promised else "are carried"
    if best is None:
        text = "promise not kept at any of these rates" if promised else "overloaded at each of these rates"
    else:
        text = f"up to {best:.4g} requests/s {what}, of the rates simulated"
    return RunVerdict(overloaded=not carried, kept=bool(kept) if promised else None, text=text)
