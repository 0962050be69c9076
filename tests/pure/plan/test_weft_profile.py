"""The planner's profile of Weft has the engine's own constants."""

from __future__ import annotations

import pytest

from weft.plan.layout import BATCHED_TOKENS
from weft.plan.memory import CPU_RUNTIME_BYTES
from weft.planner.profiles import load_profile


def test_memory_of_a_rank_on_a_cpu() -> None:
    assert int(load_profile("weft", on_cpu=True).runtime_MiB.value) << 20 == CPU_RUNTIME_BYTES


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_smallest_number_of_tokens_in_a_step(device: str) -> None:
    assert load_profile("weft", on_cpu=device == "cpu").small_num_batched_tokens.value == BATCHED_TOKENS[device]
