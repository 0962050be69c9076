"""The planner's forecast for a plan that runs here, and the service's report of it beside the measured figures."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.pure.machines import FOUR, NOTHING, SIX, THREE, checkpoint, expected, rig
from tests.pure.worlds import World
from tests.refusals import has_values
from weft.api.observe.predicted import MANY, PredictionCheck
from weft.config import EngineConfig
from weft.engine.core.token_ids import TokenIds
from weft.engine.frontend.outputs import CompletionOutput, Metrics, RequestOutput
from weft.machine.hardware.host import Host
from weft.plan.layout import build_plan
from weft.plan.memory import Capacity
from weft.plan.plan import Plan
from weft.planner.execution import config_search
from weft.planner.execution.execution import plan_to_run
from weft.planner.execution.forecast import (
    HINT,
    Forecast,
    far_off,
    forecast_plan,
    load_report,
    predicted_json,
    request_report,
    split_gpus,
    start_report,
)
from weft.planner.search.search import search
from weft.probes.machine import host_cluster


def on_gpus(model: str, where: Host, **flags: Any) -> tuple[Plan, Forecast]:
    there = checkpoint(model)
    plan = plan_to_run(EngineConfig(model=there.model, **flags), there, where)
    return plan, forecast_plan(plan, where, NOTHING)


# --- what is expected ---


@pytest.mark.parametrize(
    ("model", "names"), [("Llama-3.1-8B", [FOUR]), ("Qwen3-14B", [FOUR, THREE]), ("Qwen3-32B", [SIX, FOUR])]
)
def test_the_forecast_is_weft_plan_s_for_the_same_layout(model: str, names: list[str]) -> None:
    where, there = rig(*names), checkpoint(model)
    question = config_search.plan_question(
        EngineConfig(model="m"), there, where, host_cluster(where, NOTHING), range(len(names))
    )
    best = search(question).best
    assert best is not None
    _, found = on_gpus(model, where)
    assert found.weight_bytes == sum(rank.weights.total for rank in best.memory.ranks)
    work = question.workload
    alone = found.speed(work.input_len, work.output_len)
    assert (alone.single_tok_s, alone.ttft_s) == (best.predicted.single_tok_s, best.predicted.ttft_s)
    if max(rank.usable_bytes / rank.memory_bytes for rank in best.memory.ranks) <= 0.9:
        assert found.kv_tokens == best.memory.kv_tokens


def test_limits_are_the_user_s() -> None:
    where = rig(FOUR)
    _, usual = on_gpus("Llama-3.1-8B", where)
    _, few = on_gpus("Llama-3.1-8B", where, max_num_seqs=2)
    assert few.speed(100, 100, 50).concurrency == 2 < usual.speed(100, 100, 50).concurrency
    _, wide = on_gpus("Llama-3.1-8B", where, max_num_batched_tokens=16384)
    assert max(wide.step_bytes) > max(usual.step_bytes) and wide.kv_tokens < usual.kv_tokens
    _, given = on_gpus("Llama-3.1-8B", where, kv_cache_memory_bytes=1 << 30)
    assert given.kv_tokens == (1 << 30) // 131072
    _, small = on_gpus("Llama-3.1-8B", where, gpu_memory_utilization=(0.8,))
    assert small.kv_tokens < usual.kv_tokens
    _, limited = on_gpus("Llama-3.1-8B", where, max_memory={0: "20GB"})
    assert limited.memory.ranks[0].usable_bytes == pytest.approx(20e9, abs=1e6)
    two = {"tensor_parallel_size": 2, "gpu_memory_utilization": (0.9, 0.7)}
    _, uneven = on_gpus("Llama-3.1-8B", rig(FOUR, FOUR), **two)
    taken = [rank.usable_bytes / rank.memory_bytes for rank in uneven.memory.ranks]
    assert taken == pytest.approx([0.9, 0.7], abs=1e-6)


def test_ranks_that_share_a_device_have_a_part_of_it_each() -> None:
    one, two = expected(), expected(tensor_parallel_size=2)
    assert [gpu.bandwidth_Bps for gpu in two.cluster.gpus] == [20e9, 20e9]
    # Each has a torch of its own.
    assert 0.9 * one.kv_tokens < two.kv_tokens < one.kv_tokens
    assert two.speed(8, 100).single_tok_s < one.speed(8, 100).single_tok_s
    there, where = checkpoint("Llama-3.2-1B"), rig(FOUR, THREE)
    config = EngineConfig(model="m", tensor_parallel_size=3, device_ids=(0, 1, 0))
    gpus = forecast_plan(build_plan(config, there, where), where, NOTHING).cluster.gpus
    assert [gpu.name for gpu in gpus] == ["1/2 of RTX 4090", "RTX 3090", "1/2 of RTX 4090"]
    whole = host_cluster(where, NOTHING).gpus
    assert gpus[1] == whole[1] and gpus[0].memory_bytes == whole[0].memory_bytes // 2
    assert split_gpus(host_cluster(where, NOTHING), [1, 0]).gpus == whole[::-1]


def test_numbers_have_the_bytes_that_they_are_computed_in() -> None:
    assert expected(dtype="float32").weight_bytes == 2 * expected().weight_bytes


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "q4_0", "q8_0"])
def test_quantised_weights_are_expected_as_they_are_held(quantization: str) -> None:
    found = expected(quantization=quantization)
    held = sum(found.plan.weight_bytes(place.rank) for place in found.plan.places)
    assert found.weight_bytes == pytest.approx(held, rel=0.01)


# --- beside what came out ---


def capacity(rank: int, **figures: int) -> Capacity:
    usual: dict[str, Any] = {"weight_bytes": 269 * 10**6, "activation_bytes": 10**8, "free_bytes": 0, "block_bytes": 1}
    return Capacity(rank=rank, host="h", device="cpu", load_s=0.25, **{**usual, **figures})


def test_memory_is_told_with_its_ratio() -> None:
    found = expected()
    exact = [capacity(0, weight_bytes=found.weight_bytes, activation_bytes=max(found.step_bytes))]
    line = start_report(found, exact, found.kv_tokens // 16)
    assert line.count(", ratio 1.00)") == 3 and line.endswith(" 0.2 s")
    assert f"{found.kv_tokens:,} tokens" in line and HINT not in line
    assert start_report(found, exact, found.kv_tokens // 64).endswith(HINT)


def test_a_request_is_told_with_its_ratio() -> None:
    found = expected()
    speed = found.speed(100, 50)
    line = request_report(found, input_len=100, output_len=50, ttft_s=speed.ttft_s, tok_s=1.2 * speed.single_tok_s)
    has_values(line, "100 + 50 tokens", "ratio 1.00)", "ratio 1.20)")
    assert HINT not in line
    slow = request_report(found, input_len=100, output_len=50, ttft_s=speed.ttft_s, tok_s=speed.single_tok_s / 5)
    assert slow.endswith(HINT)
    many = found.speed(100, 50, 20)
    rate = many.concurrency / many.tpot_s
    line = load_report(found, requests=64, input_len=100.2, output_len=50, concurrency=20.4, tok_s=rate)
    assert re.match(r"64 .*\b20 .*\b100 \+ 50 ", line) and ", ratio 1.00)" in line


def test_far_off_is_outside_of_the_error_band() -> None:
    found = expected()
    band = found.profile.error.value
    assert not far_off(found, 1 + band, 1.0) and not far_off(found, 1 - band, 1.0)
    assert far_off(found, 1.01 + band, 1.0) and far_off(found, 0.99 - band, 1.0)


def test_the_json_has_the_figures_of_the_report() -> None:
    found = expected()
    got = predicted_json(found, 30, 100)
    assert got["weight_bytes"] == found.weight_bytes and got["kv_tokens"] == found.kv_tokens
    assert got["decode_tok_s"] == round(found.speed(30, 100).single_tok_s, 2)
    assert got["ttft_s"] == round(found.speed(30, 100).ttft_s, 4) and got["error_band"] == 0.5


# --- after the first requests ---


def output(
    prompt: int = 20, tokens: int = 50, *, begin: float = 0.0, took: float = 1.0, cached: int = 0, finished: bool = True
) -> RequestOutput:
    times = Metrics(arrival_s=begin, scheduled_s=begin, first_token_s=begin + 0.1, finished_s=begin + took)
    choice = CompletionOutput(0, "", list(range(tokens)))
    return RequestOutput(
        "0", None, TokenIds.pack([0] * prompt), [choice], times, num_cached_tokens=cached, finished=finished
    )


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    """The lines so far."""
    caplog.set_level(logging.INFO, "weft.serving")
    return lambda: [record.getMessage() for record in caplog.records]


def serve(watch: PredictionCheck, outputs: Sequence[RequestOutput]) -> None:
    """All of them open at once, then all closed."""
    for number in range(len(outputs)):
        watch.on_open(number + 1)
    for number, one in enumerate(outputs):
        watch.on_close([one], len(outputs) - 1 - number)


def test_the_first_request_alone_is_told_of_once(told: Any) -> None:
    watch = PredictionCheck(expected())
    serve(watch, [output()])
    serve(watch, [output()])
    (line,) = told()
    has_values(line, "20 + 50 tokens", "100 ms", "54.4 tokens/s")
    assert not watch.done


@pytest.mark.parametrize("one", [output(tokens=8), output(cached=16), output(finished=False)])
def test_requests_without_information_are_passed_over(told: Any, one: RequestOutput) -> None:
    watch = PredictionCheck(expected())
    serve(watch, [one])
    assert told() == []
    serve(watch, [output()])
    assert len(told()) == 1


def test_a_request_beside_another_is_not_alone(told: Any) -> None:
    watch = PredictionCheck(expected())
    serve(watch, [output(), output()])
    assert told() == []


def test_a_crowd_is_told_of_once_and_then_nothing_is_watched(told: Any) -> None:
    watch = PredictionCheck(expected())
    serve(watch, [output(begin=number / 10, took=1.5) for number in range(16)])
    (line,) = told()
    # 16 requests of 1.5 s each within 3 s; 800 tokens.
    has_values(line, "16 requests, 8 at once", "20 + 50 tokens", "267 tokens/s")
    serve(watch, [output(begin=number / 10, took=1.5) for number in range(16)])
    assert len(told()) == 1 and not watch.done
    serve(watch, [output()])
    assert len(told()) == 2 and watch.done


def test_one_after_the_other_is_no_crowd(told: Any) -> None:
    watch = PredictionCheck(expected())
    serve(watch, [output(begin=number, took=1.0) for number in range(16)])
    assert told() == []


def test_a_crowd_that_never_ends_is_told_of(told: Any) -> None:
    watch = PredictionCheck(expected())
    watch.on_open(8)
    for number in range(MANY):
        watch.on_close([output(begin=number / 8, took=1.0)], 7)
    assert len(told()) == 1 and re.match(rf"{MANY} requests\b.*\b8 ", told()[0])


async def test_the_service_tells_and_forgets(told: Any) -> None:
    seen: list[tuple[int, int]] = []

    class Watch:
        done = False

        def on_open(self, count: int) -> None:
            seen.append((count, -1))

        def on_close(self, outputs: Sequence[RequestOutput], still_open: int) -> None:
            assert all(one.finished for one in outputs)
            seen.append((len(outputs), still_open))
            self.done = True

    world = World()
    world.service.prediction_check = Watch()  # type: ignore[assignment]
    await world.complete(max_tokens=3)
    assert seen == [(1, -1), (1, 0)] and world.service.prediction_check is None
    await world.complete(max_tokens=3)
    assert len(seen) == 2


def test_lengths_are_a_token_at_least() -> None:
    assert expected().speed(0.2, 0.4, 0.1) == expected().speed(1, 1, 1)


def test_ranks_on_nodes_of_their_own_wait_for_the_network() -> None:
    """By what was measured of it: two sums per layer wait for the latency, a pipeline for one message per stage."""
    slow = (125e6, 1e-3)  # bytes per second, seconds
    work = {"input_len": 16, "output_len": 32, "concurrency": 8}
    lost = {}
    for layout in ("tensor_parallel_size", "pipeline_parallel_size"):
        here = expected(**{layout: 2})
        there = here.over_network(*slow)
        assert there.plan is here.plan and len(there.cluster.nodes) == 2
        lost[layout] = there.speed(**work).tpot_s - here.speed(**work).tpot_s
    sums = 2 * len(expected().plan.shape.layers)
    assert lost["tensor_parallel_size"] > sums * slow[1] > 10 * lost["pipeline_parallel_size"] > 0
    # The hidden states to the next stage, and the tokens back to the head.
    assert lost["pipeline_parallel_size"] > 2 * slow[1]


def test_numbers_of_32_bits_cross_the_network_as_such() -> None:
    lost = []
    for dtype in ("bfloat16", "float32"):
        here = expected(tensor_parallel_size=2, dtype=dtype)
        there = here.over_network(1e6, 1e-6)
        lost.append(there.speed(16, 32, 8).step.links - here.speed(16, 32, 8).step.links)
    assert lost[1] == pytest.approx(2 * lost[0], rel=0.05)
