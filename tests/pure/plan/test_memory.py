"""KV blocks and lengths, from what the ranks report."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.shapes import SMOLLM2
from tests.refusals import refuses
from weft.errors import PlanError
from weft.plan.memory import Capacity, capacity_lines, fit_length, kv_blocks
from weft.plan.places import cut_places
from weft.plan.plan import Plan, named_devices


def plan(weights: tuple[float, ...] = (1.0,), stages: tuple[int, ...] = (30,), **limits: Any) -> Plan:
    ranked = cut_places(SMOLLM2, weights, stages)
    defaults: dict[str, Any] = {
        "max_model_len": 8192,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 16,
    }
    return Plan(
        model="m",
        checkpoint="",
        load_format="dummy",
        shape=SMOLLM2,
        dtype="bfloat16",
        places=ranked,
        devices=named_devices(*("cpu",) * len(ranked)),
        cores=((0,),) * len(ranked),
        **(defaults | limits),
    )


def reports(cut: Plan, devices: list[str], free: list[int], hosts: list[str] | None = None) -> list[Capacity]:
    return [
        Capacity(
            rank=rank,
            host=(hosts or ["here"] * len(devices))[rank],
            device=device,
            weight_bytes=0,
            activation_bytes=0,
            free_bytes=free[rank],
            block_bytes=cut.block_bytes(rank),
            load_s=0.0,
        )
        for rank, device in enumerate(devices)
    ]


def test_block_bytes_follow_the_cut() -> None:
    token = 2 * 3 * 64 * 2 * 30  # keys and values, KV heads, head_dim, bytes, layers
    assert plan().block_bytes(0) == 16 * token
    cut = plan((2, 1), (20, 10))
    assert [cut.block_bytes(r) * 9 // (16 * token) for r in range(4)] == [4, 2, 2, 1]


def test_each_gpu_counts_alone_and_the_poorest_decides() -> None:
    cut = plan((2, 1))
    big, small = cut.block_bytes(0), cut.block_bytes(1)
    assert kv_blocks(cut, reports(cut, ["cuda:0", "cuda:1"], [big * 10 + 1, small * 99])) == 10
    assert kv_blocks(cut, reports(cut, ["cuda:0", "cuda:1"], [big * 10, small * 9])) == 9


def test_ranks_of_a_gpu_share_it() -> None:
    cut = plan((2, 1))
    both = cut.block_bytes(0) + cut.block_bytes(1)
    assert kv_blocks(cut, reports(cut, ["cuda:0", "cuda:0"], [both * 7 + 5, both * 50])) == 7
    # The same name on another machine is another GPU.
    free = [cut.block_bytes(0) * 10, cut.block_bytes(1) * 12]
    assert kv_blocks(cut, reports(cut, ["cuda:0", "cuda:0"], free, ["a", "b"])) == 10


def test_the_memory_of_a_cpu_host_is_one_device() -> None:
    cut = plan((2, 1))
    both = cut.block_bytes(0) + cut.block_bytes(1)
    assert kv_blocks(cut, reports(cut, ["cpu", "cpu"], [4 * both * 7, 4 * both * 8])) == 7  # a quarter
    assert kv_blocks(cut, reports(cut, ["cpu", "cpu"], [10**12, 10**12])) == 4_000_000_000 // both


@pytest.mark.parametrize("weights", [(1.0,), (2.0, 1.0)])
def test_a_cap_on_the_cpu_holds_for_the_engine_itself_too(weights: tuple[float, ...]) -> None:
    """A cache that took all the rest would exceed the cap by the memory of Python and torch, which weft plan counts."""
    cut = plan(weights, max_memory={"cpu": 3 * 10**9})
    ranks = reports(cut, ["cpu"] * len(weights), [10**11] * len(weights))
    left = 3 * 10**9 - len(weights) * (500 << 20)
    assert kv_blocks(cut, ranks) == left // sum(rank.block_bytes for rank in ranks)
    with refuses(PlanError, "no-room-for-kv-cache", "--max-memory", "0"):
        kv_blocks(plan(max_memory={"cpu": 400 << 20}), ranks[:1])


def test_the_user_s_figure_is_each_rank_s() -> None:
    cut = plan((2, 1), kv_cache_bytes=plan((2, 1)).block_bytes(0) * 5)
    assert kv_blocks(cut, reports(cut, ["cpu", "cpu"], [1, 1])) == 5
    assert kv_blocks(cut, reports(cut, ["cuda:0", "cuda:1"], [1, 1])) == 5


@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
    free=st.integers(4_000_000, 10**11),
    homes=st.lists(st.sampled_from(["cpu", "cuda:0", "cuda:1"]), min_size=6, max_size=6),
)
def test_no_device_is_overdrawn_and_one_is_full(weights: list[float], free: int, homes: list[str]) -> None:
    cut = plan(tuple(weights))
    given_reports = reports(cut, homes[: len(weights)], [free] * len(weights))
    blocks = kv_blocks(cut, given_reports)

    def budget(device: str) -> int:
        return min(4_000_000_000, free // 4) if device == "cpu" else free

    def cost(device: str) -> int:
        return sum(r.block_bytes for r in given_reports if r.device == device)

    devices = {r.device for r in given_reports}
    assert all(blocks * cost(d) <= budget(d) for d in devices)
    assert any((blocks + 1) * cost(d) > budget(d) for d in devices)


@pytest.mark.parametrize(
    ("device", "limits", "words"),
    [
        ("cuda:1", {}, ["cuda:1", "--gpu-memory-utilization", "--tensor-parallel-size", "--max-num-batched-tokens"]),
        ("cpu", {}, ["cpu", "--kv-cache-memory-bytes", "--tensor-parallel-size", "a quarter of the free memory"]),
        ("cpu", {"kv_cache_bytes": 5}, ["raise --kv-cache-memory-bytes", "gives 5;"]),
    ],
)
@pytest.mark.parametrize("free", [-(10**9), 0, 1000])
def test_no_room_for_one_block(device: str, limits: dict[str, int], words: list[str], free: int) -> None:
    cut = plan(**limits)
    with refuses(PlanError, "no-room-for-kv-cache") as caught:
        kv_blocks(cut, reports(cut, [device], [free]))
    for word in [*words, f"{cut.block_bytes(0):,} bytes"]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@given(blocks=st.integers(1, 2000), length=st.integers(1, 8192), given=st.booleans(), block_size=st.integers(1, 64))
def test_a_length_is_fitted_down_unless_asked_for(blocks: int, length: int, given: bool, block_size: int) -> None:
    cut = plan(max_model_len=length, max_model_len_given=given, block_size=block_size)
    held = blocks * block_size
    if length <= held:
        assert fit_length(cut, blocks) == length
    elif not given:
        assert fit_length(cut, blocks) == held
        assert any(f"{held:,}" in line and f"{length:,}" in line for line in capacity_lines(cut, blocks)[2:])
    else:
        with refuses(PlanError, "context-exceeds-kv-cache") as caught:
            fit_length(cut, blocks)
        message = str(caught.value)
        for way in (f"--max-model-len {held} ", "--kv-cache-memory-bytes", "more ranks"):
            assert way in message
        # On a CPU it would change nothing.
        assert "--gpu-memory-utilization" not in message
        # The advice works: with that many bytes per rank, the length fits.
        advised = int(re.search(r"--kv-cache-memory-bytes (\d+)", message)[1])  # type: ignore[index]
        better = plan(max_model_len=length, max_model_len_given=True, block_size=block_size, kv_cache_bytes=advised)
        assert fit_length(better, kv_blocks(better, reports(better, ["cpu"], [0]))) == length


def test_capacity_lines_are_vllm_s() -> None:
    assert capacity_lines(plan(max_model_len=1000), 1000) == [
        "CPU KV cache size: 16,000 tokens",
        "Maximum concurrency for 1,000 tokens per request: 15.87x",
    ]
    fitted = capacity_lines(plan(), 10)
    assert fitted[1] == "Maximum concurrency for 160 tokens per request: 1.00x"
    assert "160" in fitted[2] and "8,192" in fitted[2]
