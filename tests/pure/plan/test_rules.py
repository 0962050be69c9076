"""One rule-book for layouts: `weft plan` and the engine refuse the same ones in the same words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pure.commands import weft
from tests.pure.machines import host, plan
from tests.pure.shapes import SMOLLM2
from tests.refusals import refuses
from weft.checkpoint.names.catalogue import find
from weft.errors import ConfigError, PlanError
from weft.plan.parallelism import asked_parallelism
from weft.planner.report.table import layout_json


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, (0, 0)),
        ({"tensor_parallel_size": 9, "pipeline_parallel_size": 30}, (9, 30)),
        ({"tensor_split": (2.0, 1.0), "pipeline_split": (20, 10)}, (2, 2)),
        ({"tensor_split": (2.0, 1.0), "tensor_parallel_size": 2}, (2, 0)),
    ],
)
def test_sizes_follow_from_splits(fields: dict[str, Any], sizes: tuple[int, int]) -> None:
    asked = asked_parallelism(fields)
    asked.check(SMOLLM2)
    assert (asked.tensor_parallel, asked.pipeline_parallel) == sizes


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"tensor_split": (2.0, 0.0)}, "--tensor-split 2,0"),
        ({"tensor_split": (2.0, 1.0), "tensor_parallel_size": 3}, "--tensor-split 2,1 -tp 3"),
        ({"tensor_parallel_size": 10}, "-tp 10"),
        ({"pipeline_parallel_size": 31}, "-pp 31"),
        ({"pipeline_split": (20, 12)}, "--pipeline-split 20,12"),
        ({"pipeline_split": (30, 0)}, "--pipeline-split 30,0"),
        ({"pipeline_split": (15, 15), "pipeline_parallel_size": 3}, "--pipeline-split 15,15 -pp 3"),
    ],
)
def test_the_engine_and_the_planner_use_the_same_words(fields: dict[str, Any], flags: str) -> None:
    with pytest.raises((ConfigError, PlanError)) as engine:
        plan(None, SMOLLM2, **fields)
    status, _, err = weft("plan", "demo", "--gpus", "16xH100", *flags.split())
    assert status == 2 and str(engine.value) in err


MIXTRAL = find("Mixtral-8x7B").shape  # 8 experts, 32 query heads


@pytest.mark.parametrize(
    ("fields", "groups", "parts"),
    [
        ({}, 1, 1),
        ({"data_parallel_size": 1}, 1, 1),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, 1, 2),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, 2, 2),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}, 2, 4),
        ({"tensor_split": (2.0, 1.0), "enable_expert_parallel": True, "expert_parallel_size": 1}, 1, 1),
        ({"data_parallel_size": 2, "enable_expert_parallel": True, "expert_parallel_size": 1}, 2, 1),
        ({"tensor_parallel_size": 4, "enable_expert_parallel": True, "expert_parallel_size": 2}, 1, 2),
    ],
    ids=str,
)
def test_how_ranks_share_experts(fields: dict[str, Any], groups: int, parts: int) -> None:
    made = plan(host(memory_free_bytes=10**12), MIXTRAL, **fields)
    assert made.data_parallel == groups
    assert len({place.experts for place in made.places}) == parts
    tensor = made.tensor_parallel
    assert len(made.devices) == len(made.cores) == tensor * groups
    assert made.attention_groups == [list(range(g * tensor, (g + 1) * tensor)) for g in range(groups)]
    assert made.tensor_groups == made.attention_groups and made.expert_groups == [list(range(tensor * groups))]
    assert made.data_groups == [list(range(t, tensor * groups, tensor)) for t in range(tensor)]


def test_ranks_of_a_pipeline_of_two_attention_groups() -> None:
    made = plan(
        host(memory_free_bytes=10**12),
        MIXTRAL,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        data_parallel_size=2,
        enable_expert_parallel=True,
    )
    assert made.tensor_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert made.pipelines == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert made.attention_groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert made.expert_groups == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert made.data_groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [place.rank for place in made.places if place.samples] == [made.output_rank, 6] == [2, 6]
    rows = layout_json(made, 1)
    assert [row["replica"] for row in rows] == [0] * 4 + [1] * 4
    held = [range(row["first_expert"], row["first_expert"] + row["experts"]) for row in rows]
    assert held == [range(2), range(2, 4)] * 2 + [range(4, 6), range(6, 8)] * 2


@pytest.mark.parametrize(
    ("fields", "error", "code", "names"),
    [
        ({"expert_parallel_size": 2}, ConfigError, "expert-size-without-expert-parallel", ("2",)),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_parallel_size": 3},
            PlanError,
            "expert-size-not-dividing",
            ("3", "2", "1,2"),
        ),
        (
            {"tensor_parallel_size": 16, "enable_expert_parallel": True},
            PlanError,
            "more-expert-ranks-than-experts",
            ("16", "8", "--expert-parallel-size 8"),
        ),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_parallel_size": 4},
            PlanError,
            "expert-size-not-dividing",
            ("4", "2"),
        ),
    ],
    ids=str,
)
def test_experts_that_cannot_be_shared_so(
    fields: dict[str, Any], error: type[Exception], code: str, names: tuple[str, ...]
) -> None:
    with refuses(error, code, *names):
        plan(host(memory_free_bytes=10**12), MIXTRAL, **fields)


def test_no_experts_to_deal_out() -> None:
    with refuses(PlanError, "no-experts", "--enable-expert-parallel"):
        plan(None, SMOLLM2, tensor_parallel_size=2, enable_expert_parallel=True)


@pytest.mark.parametrize(
    "flags", [{"data_parallel_size": 2, "enable_expert_parallel": True}, {"enable_expert_parallel": True}]
)
def test_experts_beside_a_device_map(flags: dict[str, Any]) -> None:
    with refuses(ConfigError, "device-map-beside-other-cut", "--device-map"):
        plan(None, MIXTRAL, device_map="0", **flags)
