"""Findings that follow from others, the ranks that they name, and the complete flags of a restart."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.pure.monitor.test_diagnosis import EVEN, FULL, STAGES, counters, figures, grown, history, loads, ranks_of
from tests.pure.shapes import SMOLLM2, with_experts
from tests.pure.worlds import PLAN
from weft.checkpoint.architectures.shape import Experts
from weft.engine.core.request import Stats
from weft.machine.hardware.topology import Holder
from weft.monitor.figures import FINDING_FIELDS, cache_bytes, describe_finding, describe_model, describe_ranks
from weft.monitor.finding import Code, Finding
from weft.monitor.history import GpuMoment, History, Snapshot, weights_of
from weft.monitor.restart import restart_with_cut
from weft.monitor.rules import CAUSES, diagnose, link_causes
from weft.plan.parallelism import Parallelism
from weft.plan.places import cut_places
from weft.plan.plan import Plan, named_devices

BOTH = replace(
    PLAN,
    places=tuple(cut_places(SMOLLM2, [1, 1], [15, 15])),
    devices=named_devices(*["cpu"] * 4),
    cores=((0,), (1,), (2,), (3,)),
)
MIXTURE = with_experts(SMOLLM2, Experts(count=8, top_k=2, width=64, normalised=True))
GROUPS = replace(PLAN, shape=MIXTURE, places=tuple(cut_places(MIXTURE, [1], [30], data_parallel=2, expert_parallel=2)))


def causes(findings: list[Finding]) -> dict[str, str | None]:
    """The cause of each finding, by its code."""
    return {finding.code: finding.follows_from for finding in findings}


def test_a_slow_rank_explains_its_stage_and_the_stages_that_wait() -> None:
    """Rank 1 of the first of two stages is slow: three rules see it."""
    slow, others = counters(1, 9.0), [counters(rank, 3.0, waiting_s=6.0) for rank in (0, 2, 3)]
    findings = ranks_of(BOTH, others[0], slow, *others[1:])
    assert causes(findings) == {"straggler": None, "stage_imbalance": "straggler", "allreduce_wait": "straggler"}
    assert {finding.code: finding.ranks for finding in findings} == {
        "straggler": (1,),
        "stage_imbalance": (0, 1),
        "allreduce_wait": (2, 3),
    }


def test_an_uneven_split_explains_the_stage_that_waits() -> None:
    times = [counters(0, 9.0), counters(1, 9.0), counters(2, 3.0, waiting_s=6.0), counters(3, 3.0, waiting_s=6.0)]
    assert causes(ranks_of(BOTH, *times)) == {"stage_imbalance": None, "allreduce_wait": "stage_imbalance"}


def test_a_full_cache_explains_its_preemptions() -> None:
    stats = [replace(one, preemptions=10 * number) for number, one in enumerate(grown(FULL, starved=0.9), 1)]
    assert causes(loads(EVEN, *stats)) == {"kv_starved": None, "preemption_storm": "kv_starved"}
    alone = [replace(one, preemptions=10 * number) for number, one in enumerate(grown(FULL), 1)]
    assert causes(loads(EVEN, *alone)) == {"preemption_storm": None}


def test_faults_of_other_ranks_and_of_other_replicas_are_no_causes() -> None:
    def finding(code: Code, *ranks: int) -> Finding:
        return Finding(code=code, text="", value=1.0, limit=1.0, remedy="", ranks=ranks)

    two = History(plans=(EVEN, EVEN), weights=weights_of((EVEN, EVEN)), snapshots=(Snapshot(time_s=0.0),))
    wait = finding(Code.ALLREDUCE_WAIT, 2, 3)
    for slow, cause in ((1, None), (2, "straggler")):
        assert link_causes([wait, finding(Code.STRAGGLER, slow)], two)[0].follows_from == cause
    straggler = finding(Code.STRAGGLER, 1)
    for hot, cause in (((0,), None), ((0, 1), "throttled")):
        assert link_causes([straggler, finding(Code.THROTTLED, *hot)], two)[0].follows_from == cause


def test_no_fault_follows_from_itself() -> None:
    for code in CAUSES:
        seen, ends = {code}, [code]
        while ends:
            before = {cause.code for end in ends for cause in CAUSES.get(end, ())}
            assert code not in before
            ends = sorted(before - seen)
            seen |= before


# --- what a finding is about ---


def test_the_ranks_of_a_gpu() -> None:
    held = GpuMoment(figures=figures(), holders=(Holder(7, "game", 8 << 30),))
    plan = replace(EVEN, devices=named_devices("cuda:1", "cuda:0"))
    two = history(plan, Snapshot(time_s=10.0, stats=(Stats(),), gpus=(held,)))
    two = replace(two, plans=(plan, plan), weights=weights_of((plan, plan)))
    (finding,) = diagnose(two)
    assert finding.code == "foreign_memory" and finding.ranks == (1, 3), "rank 1 of each replica"


def test_a_finding_as_json() -> None:
    (finding,) = ranks_of(STAGES, counters(0, 8.0), counters(1, 4.0, waiting_s=4.0))
    row = describe_finding("demo", finding)
    assert list(row) == list(FINDING_FIELDS) and list(row)[:4] == ["code", "text", "value", "remedy"]
    about = {name: row[name] for name in ("limit", "model", "ranks", "stage", "follows_from")}
    assert about == {"limit": 0.15, "model": "demo", "ranks": (0,), "stage": 0, "follows_from": None}


# --- flags ---


def one_of(plan: Plan, replicas: int = 1) -> History:
    plans = (plan,) * replicas
    return History(plans=plans, weights=weights_of(plans), snapshots=(Snapshot(time_s=0.0),))


@pytest.mark.parametrize(
    ("plan", "replicas", "splits", "flags"),
    [
        (EVEN, 1, {"tensor_split": (2, 1)}, "--tensor-split 2,1"),
        (STAGES, 1, {"pipeline_split": (13, 17)}, "--pipeline-split 13,17"),
        (EVEN, 2, {"tensor_split": (2, 1)}, "--tensor-split 2,1 --data-parallel-size 2"),
        (BOTH, 1, {"tensor_split": (2, 1)}, "--tensor-split 2,1 --pipeline-split 15,15"),
        (BOTH, 1, {"pipeline_split": (13, 17)}, "--tensor-parallel-size 2 --pipeline-split 13,17"),
        (
            replace(BOTH, places=tuple(cut_places(SMOLLM2, [2, 1], [15, 15]))),
            1,
            {"pipeline_split": (13, 17)},
            "--tensor-split 2,1 --pipeline-split 13,17",
        ),
        (
            GROUPS,
            1,
            {"pipeline_split": (20, 10)},
            "--pipeline-split 20,10 --data-parallel-size 2 --enable-expert-parallel",
        ),
        (
            replace(GROUPS, places=tuple(cut_places(MIXTURE, [1], [30], data_parallel=2))),
            1,
            {"pipeline_split": (20, 10)},
            "--pipeline-split 20,10 --data-parallel-size 2 --enable-expert-parallel --expert-parallel-size 1",
        ),
    ],
)
def test_a_restart_has_every_flag_of_the_cut(
    plan: Plan, replicas: int, splits: dict[str, tuple[int, ...]], flags: str
) -> None:
    assert restart_with_cut(one_of(plan, replicas), plan, Parallelism(**splits)) == f"restart with {flags}"


# --- layout and cache ---


def test_the_layout_and_the_cache_of_a_model() -> None:
    half = Snapshot(time_s=1.0, stats=(Stats(blocks_used=5, blocks_total=10),) * 2)
    model = describe_model("demo", replace(one_of(EVEN, 2), snapshots=(half,)))
    sizes = {"tensor_parallel": 2, "pipeline_parallel": 1, "data_parallel": 2, "expert_parallel": 1}
    assert model["layout"] == sizes
    whole = 2 * 10 * sum(map(EVEN.block_bytes, range(2)))
    assert (model["kv_used_bytes"], model["kv_size_bytes"]) == (whole // 2, whole)
    unknown = describe_model("demo", one_of(EVEN))
    assert unknown["kv_used_bytes"] is None and unknown["kv_size_bytes"] is None


def test_attention_groups_divide_the_blocks_of_an_engine() -> None:
    groups = replace(one_of(GROUPS), snapshots=(Snapshot(time_s=1.0, stats=(Stats(blocks_used=2, blocks_total=10),)),))
    assert [row["kv_bytes"] for row in describe_ranks(groups, {})] == [5 * GROUPS.block_bytes(rank) for rank in (0, 1)]
    assert cache_bytes(groups) == (2 * GROUPS.block_bytes(0), 10 * GROUPS.block_bytes(0))
    assert describe_model("moe", groups)["layout"]["expert_parallel"] == 2


def test_a_rank_s_row_has_the_share_without_its_core() -> None:
    ranks = counters(0, 6.0), replace(counters(1, 3.0, waiting_s=3.0), delayed_s=2.6)
    rows = describe_ranks(history(EVEN, Snapshot(time_s=10.0, ranks=ranks, stats=(Stats(),))), {})
    assert [row["delayed"] for row in rows] == [0.0, pytest.approx(0.4)]
