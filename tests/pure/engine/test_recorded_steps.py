"""All policies, groups, windows and drafts give the steps and outputs that are recorded."""

from __future__ import annotations

import json

import pytest

from tests.pure.recorded_steps import POLICIES, RECORDED, SEEDS, Scenario

PARTS = 16  # of the scenarios; the first is played in every run


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_steps_are_as_recorded(policy: str, part: int) -> None:
    recorded = json.loads(RECORDED.read_text())[policy]
    assert len(recorded) == SEEDS
    for seed in range(part, SEEDS, PARTS):
        assert Scenario(policy, seed).play() == recorded[str(seed)], f"policy {policy}, seed {seed}"
