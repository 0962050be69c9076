"""One rule-book for layouts: `weft plan` and the engine refuse the same ones in the same words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pure.commands import weft
from tests.pure.machines import plan
from tests.pure.shapes import SMOLLM2
from weft.errors import ConfigError, PlanError
from weft.plan.rules import check_layout

OPEN = {
    "tensor_parallel_size": None,
    "tensor_split": None,
    "pipeline_parallel_size": None,
    "pipeline_split": None,
}


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, (None, None)),
        ({"tensor_parallel_size": 9, "pipeline_parallel_size": 30}, (9, 30)),
        ({"tensor_split": (2.0, 1.0), "pipeline_split": (20, 10)}, (2, 2)),
        ({"tensor_split": (2.0, 1.0), "tensor_parallel_size": 2}, (2, None)),
    ],
)
def test_sizes_follow_from_splits(fields: dict[str, Any], sizes: tuple[int | None, int | None]) -> None:
    assert check_layout(SMOLLM2, **{**OPEN, **fields}) == sizes


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
