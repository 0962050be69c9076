"""Simulation: nothing is lost, what is known of queues comes out, and short cuts change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.costs import cut, speed
from tests.pure.simulations import Counted, load, run, spec, steps, told
from weft.checkpoint.names.catalogue import find
from weft.fleet.upstreams.policy import POLICIES, LeastConnections, RoundRobin
from weft.machine.hardware.cluster import parse_gpus
from weft.planner.deployment import Workload
from weft.planner.memory.footprint import footprint
from weft.planner.profiles import Constant, load_profile
from weft.planner.speed.cost import predict
from weft.planner.work.replica import build_replicas
from weft.study.simulate.lengths import FixedLength, Lengths, LogNormalLength, UniformLength
from weft.study.simulate.replica import Stretch
from weft.study.simulate.report import Report
from weft.study.simulate.simulated_request import SimulatedRequest
from weft.study.simulate.simulation import simulate
from weft.study.simulate.trace import TraceRow

# Nothing is lost


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1000),
    rate=st.sampled_from([0.5, 5.0, 25.0]),
    count=st.integers(1, 3),
    limits=st.fixed_dictionaries(
        {
            "num_blocks": st.sampled_from([40, 100, 20_000]),
            "max_num_seqs": st.integers(1, 24),
            "max_num_batched_tokens": st.sampled_from([64, 2048]),
            "max_num_queued": st.sampled_from([0, 8, 1000]),
            "stages": st.integers(1, 3),
            "lookahead": st.booleans(),
        }
    ),
    shared=st.booleans(),
    stretches=st.booleans(),
)
def test_each_request_ends_exactly_once(
    seed: int, rate: float, count: int, limits: dict[str, Any], shared: bool, stretches: bool
) -> None:
    limits["lookahead"] = limits["lookahead"] and limits["stages"] == 1
    prefix = {"prefixes": 2, "prefix_len": 100} if shared else {}
    asked = load(UniformLength(1, 700), UniformLength(1, 40), rate=rate, seed=seed, **prefix)
    sources: list[Counted] = []

    def counted(source: Any) -> Counted:
        sources.append(Counted(source, 1.0, 4.0))
        return sources[0]

    found = run([spec(**limits)] * count, asked, warmup_s=1.0, end_s=4.0, wrap=counted, stretches=stretches)
    tally = found.tally
    assert len(tally.ttft) + len(tally.refused) + tally.too_long == sources[0].count
    assert all(
        0 <= waited < first <= whole for waited, first, whole in zip(tally.queued, tally.ttft, tally.e2e, strict=True)
    )


@settings(deadline=None, max_examples=30)
@given(
    rows=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 500), st.integers(1, 60)), min_size=1, max_size=40),
    blocks=st.sampled_from([40, 90, 20_000]),
    stages=st.integers(1, 3),
    stretches=st.booleans(),
)
def test_every_token_is_written_once(
    rows: list[tuple[float, int, int]], blocks: int, stages: int, stretches: bool
) -> None:
    """Also where requests are preempted and computed again."""
    trace = tuple(
        TraceRow(at, SimulatedRequest(*lengths, own=number)) for number, (at, *lengths) in enumerate(sorted(rows))
    )
    limits = {"num_blocks": blocks, "max_num_seqs": 8, "stages": stages}
    found = run([spec(**limits)], load(trace=trace), warmup_s=0.0, end_s=10_000.0, stretches=stretches)
    assert found.tally.output_tokens == pytest.approx(sum(row.request.output_len for row in trace))
    assert sorted(found.tally.output_len) == sorted(row.request.output_len for row in trace)
    assert found.tally.input_tokens == sum(row.request.input_len for row in trace)
    gaps = sum(row.request.output_len - 1 for row in trace)
    assert found.tally.gap_count == gaps


def test_requests_that_no_replica_or_no_queue_can_hold_are_counted() -> None:
    trace = tuple(TraceRow(0.0, SimulatedRequest(length, 8)) for length in (9000, 500, 500, 500))
    found = run([spec(max_num_seqs=1, max_num_queued=1)], load(trace=trace), warmup_s=0.0, end_s=60.0)
    assert (len(found.tally.ttft), len(found.tally.refused), found.tally.too_long) == (2, 1, 1)


# What is known of queues


@pytest.mark.parametrize("busy", [pytest.param(0.3, marks=pytest.mark.long), 0.6])
def test_one_at_a_time_waits_as_in_a_queue_with_equal_services(busy: float) -> None:
    """M/D/1: services of D seconds one after the other, Poisson arrivals; the mean wait is busy D / (2 (1 - busy))."""
    alone = spec(max_num_seqs=1, max_num_queued=100_000)
    service_s = run([alone], load(FixedLength(64), FixedLength(8), rate=0.01), warmup_s=0.0, end_s=500.0).tally.e2e[0]
    requests = 5_000
    found = told(
        [alone],
        load(FixedLength(64), FixedLength(8), rate=busy / service_s),
        warmup_s=service_s,
        end_s=requests * service_s / busy,
    )
    assert found.queue_s is not None
    assert found.queue_s.mean == pytest.approx(busy * service_s / (2 * (1 - busy)), rel=0.1)
    assert found.busy == pytest.approx(busy, rel=0.03)


def test_requests_at_once_are_rate_times_time() -> None:
    """Little's law, and the tokens that are written are those that are asked for."""
    asked = load(rate=6.0)
    found = told([spec()] * 2, asked, warmup_s=20.0, end_s=400.0)
    assert found.e2e_s is not None
    assert 2 * found.running == pytest.approx(found.request_rate * found.e2e_s.mean, rel=0.03)
    assert found.output_tok_s == pytest.approx(found.request_rate * asked.mean[1], rel=0.03)
    assert found.request_rate == pytest.approx(6.0, rel=0.05)


def test_more_replicas_are_never_worse() -> None:
    asked = load(FixedLength(1024), FixedLength(128), rate=30.0)
    found = [told([spec()] * count, asked, end_s=25.0) for count in (2, 3, 4)]
    for metric in ("ttft_s", "tpot_s", "e2e_s"):
        times = [getattr(it, metric).p95 for it in found]
        assert all(later <= 1.03 * sooner for sooner, later in pairwise(times)), metric
    assert found[0].ttft_s is not None and found[-1].ttft_s is not None
    assert found[0].ttft_s.p95 > 1.5 * found[-1].ttft_s.p95


def test_bursts_wait_longer_than_what_comes_evenly() -> None:
    found = [
        told([spec()], load(FixedLength(1024), FixedLength(64), rate=8.0, burstiness=shape))
        for shape in (0.1, 1.0, 100.0)
    ]
    waits = [it.ttft_s.p95 for it in found if it.ttft_s]
    assert waits[0] > 1.2 * waits[1] > 1.2 * waits[2]


def test_prefixes_that_are_shared_are_read_once() -> None:
    whole, shared = (
        told([spec()], load(FixedLength(2048), rate=4.0, prefix_len=length, prefixes=3)) for length in (0, 2000)
    )
    assert whole.prefix_hit_share is None
    # Whole blocks of 16 are found: 2000 of 2048 tokens.
    assert shared.prefix_hit_share == pytest.approx(2000 / 2048, abs=0.01)
    assert whole.ttft_s is not None and shared.ttft_s is not None
    assert shared.ttft_s.p50 < whole.ttft_s.p50 / 2


def test_sessions_find_what_they_have_said_before() -> None:
    turns = [
        SimulatedRequest(200, 56, own=7),
        SimulatedRequest(400, 56, own=7),
        SimulatedRequest(640, 56, own=7),
        SimulatedRequest(640, 56, own=8),
    ]
    trace = tuple(TraceRow(10.0 * number, turn) for number, turn in enumerate(turns))
    found = run([spec()], load(trace=trace), warmup_s=0.0, end_s=60.0)
    # The last token of an answer has no KV: 255 and 455 tokens, of which whole blocks are found.
    assert found.prefix_hits == 240 + 448


def test_users_who_wait_are_never_more_than_they_are() -> None:
    found = told([spec()], load(users=20, think_s=2.0), end_s=200.0)
    assert found.e2e_s is not None
    assert found.running < 20
    assert found.request_rate == pytest.approx(20 / (2.0 + found.e2e_s.mean), rel=0.05)


# As the planner predicts


@dataclass
class Case:
    model: str
    gpus: str
    users: int
    tensor: int = 1
    stages: int = 1
    input_len: int = 1024
    output_len: int = 512
    within: float = 0.02


@pytest.mark.parametrize(
    "case",
    [
        Case("Llama-3.1-8B", "1xH100", 8),
        Case("Llama-3.1-8B", "1xH100", 64),
        Case("Llama-3.1-70B", "4xH100", 64, tensor=4),
        Case("Llama-3.1-8B", "1xL40S", 8, input_len=1900, output_len=64, within=0.03),
        Case("gemma-3-27b-it", "1xH200", 16),
        Case("Qwen3-30B-A3B", "2xH100", 32, tensor=2),
        Case("Llama-3.1-70B", "4xH100", 32, stages=4, input_len=128),
        Case("Llama-3.1-70B", "4xH100", 32, tensor=2, stages=2, input_len=128),
    ],
    ids=str,
)
def test_equal_requests_without_end_take_what_is_predicted(case: Case) -> None:
    shape, ranks = find(case.model).shape, case.tensor * case.stages
    layout = cut(shape, range(ranks), tensor=case.tensor, stages=case.stages)
    expected = speed(
        shape, layout, case.gpus, input_len=case.input_len, output_len=case.output_len, concurrency=case.users
    )
    costs = steps(case.model, case.gpus, case.stages)
    asked = load(FixedLength(case.input_len), FixedLength(case.output_len), users=case.users)
    answer_s = case.output_len * expected.tpot_s
    found = told([spec(costs, stages=case.stages)], asked, warmup_s=3 * answer_s, end_s=12 * answer_s)
    assert found.tpot_s is not None
    assert found.tpot_s.mean == pytest.approx(expected.tpot_s, rel=case.within)
    assert found.output_tok_s == pytest.approx(expected.output_tok_s, rel=case.within)


@pytest.mark.parametrize(
    ("stages", "input_len", "users", "batched_tokens"),
    [
        (2, 512, 96, 2048),
        pytest.param(2, 4096, 16, 2048, marks=pytest.mark.long),
        (4, 1024, 32, 512),
        pytest.param(4, 2048, 32, 8192, marks=pytest.mark.long),
        pytest.param(8, 1024, 64, 2048, marks=pytest.mark.long),
    ],
)
def test_stages_wait_for_prompts_as_long_as_is_predicted(
    stages: int, input_len: int, users: int, batched_tokens: int
) -> None:
    shape, gpus = find("Llama-3.1-70B").shape, f"{stages}xH100"
    run = build_replicas(shape, cut(shape, range(stages), stages=stages), parse_gpus(gpus), load_profile("weft"))[0]
    expected = run.tpot_s(users, Workload(input_len=input_len, output_len=256), batched_tokens)
    costs = steps("Llama-3.1-70B", gpus, stages, "weft")
    asked = load(UniformLength(input_len // 2, input_len * 3 // 2), UniformLength(128, 384), users=users)
    limits = {"stages": stages, "max_num_batched_tokens": batched_tokens}
    found = told([spec(costs, **limits)], asked, warmup_s=400 * expected, end_s=3000 * expected)
    assert found.tpot_s is not None
    assert found.tpot_s.mean == pytest.approx(expected, rel=0.05)
    # Without what stages wait for each other it would be far less.
    alone = run.round_s(users, Workload(input_len=input_len, output_len=256)).total
    assert expected - alone > 1.3 * run.prefill_s(Workload(input_len=input_len)) * users / 256


@pytest.mark.parametrize(
    ("stages", "most"),
    [(1, 64), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 16), (1, 300), (2, 64)))],
)
def test_short_steps_answer_as_few_as_is_predicted(stages: int, most: int) -> None:
    """Each streams the weights, and has room for few prompts beside the answers: most requests wait."""
    shape, gpus = find("Llama-3.1-8B").shape, f"{stages}xH100"
    said = msgspec.structs.replace(
        load_profile("weft"), max_num_batched_tokens=Constant(most, "this test"), hold_up_ms=Constant(0, "this test")
    )
    work = Workload(input_len=1024, output_len=256, concurrency=96)
    expected = predict(shape, cut(shape, range(stages), stages=stages), parse_gpus(gpus), work, said)
    assert expected.limit == "max_num_batched_tokens" and expected.concurrency < 96
    costs, limits = steps("Llama-3.1-8B", gpus, stages, "weft"), {"stages": stages, "max_num_batched_tokens": most}
    end_s = 10 * 96 * 256 / expected.saturated_tok_s
    found = told(
        [spec(costs, **limits)], load(FixedLength(1024), FixedLength(256), users=96), warmup_s=end_s / 2, end_s=end_s
    )
    assert found.tpot_s is not None
    assert found.output_tok_s == pytest.approx(expected.saturated_tok_s, rel=0.06)
    assert found.tpot_s.mean == pytest.approx(expected.tpot_s, rel=0.12)


def test_saturated_it_writes_what_is_predicted() -> None:
    shape, cluster = find("Llama-3.1-8B").shape, parse_gpus("1xH100")
    layout = cut(shape, [0])
    few = msgspec.structs.replace(load_profile("weft"), max_num_seqs=Constant(40, "this test"))
    expected = predict(shape, layout, cluster, Workload(input_len=1024, output_len=512), few)
    assert (expected.limit, expected.saturated_concurrency) == ("max_num_seqs", 40)
    asked = load(FixedLength(1024), FixedLength(512), users=55)
    found = told([spec(steps(engine="weft"), max_num_seqs=40)], asked, warmup_s=30.0, end_s=120.0)
    assert found.output_tok_s == pytest.approx(expected.saturated_tok_s, rel=0.02)


@pytest.mark.parametrize(
    "answer",
    [
        UniformLength(256, 768),
        pytest.param(LogNormalLength(512, 358), marks=pytest.mark.long),
        LogNormalLength(512, 512),
    ],
    ids=str,
)
def test_a_full_cache_holds_as_few_as_is_predicted_however_answers_differ(answer: Lengths) -> None:
    """A long answer is in the cache for longer: the more they differ, the fewer have room, up to half of them."""
    shape, cluster = find("Llama-3.1-8B").shape, parse_gpus("1xRTX4090")
    asked = load(FixedLength(256), answer, users=100)
    work = Workload(input_len=256, output_len=512, output_spread=asked.output_spread)
    weft = load_profile("weft")
    memory = footprint(shape, cut(shape, [0]), cluster, weft, Workload(max_model_len=8192))
    expected = predict(shape, cut(shape, [0]), cluster, work, weft, memory)
    assert expected.limit == "kv_cache"
    limits = {"num_blocks": memory.kv_tokens // 16, "max_num_batched_tokens": memory.replicas[0].batched_tokens}
    costs = steps(gpus="1xRTX4090", engine="weft")
    found = told([spec(costs, **limits)], asked, warmup_s=200.0, end_s=800.0)
    assert found.output_tok_s == pytest.approx(expected.saturated_tok_s, rel=0.1)
    # The prediction keeps a tenth back for those that are preempted, the scheduler 64 tokens for each that runs.
    assert 0.95 < found.running / expected.saturated_concurrency < 1.15


@pytest.mark.parametrize(("prompt", "answer"), [(32, 8), (128, 32), pytest.param(256, 256, marks=pytest.mark.long)])
def test_short_prompts_are_read_together(prompt: int, answer: int) -> None:
    """Each alone would stream the weights for a few tokens; those that come to one step share that."""
    shape, gpus = find("Llama-3.1-8B").shape, "1xH100"
    work = Workload(input_len=prompt, output_len=answer)
    expected = predict(shape, cut(shape, [0]), parse_gpus(gpus), work, load_profile("weft"))
    memory = footprint(shape, cut(shape, [0]), parse_gpus(gpus), load_profile("weft"), work).replicas[0]
    costs = steps("Llama-3.1-8B", gpus, 1, "weft")
    end_s = 12 * 256 * answer / expected.saturated_tok_s
    found = told(
        [spec(costs, max_num_batched_tokens=memory.batched_tokens)],
        load(FixedLength(prompt), UniformLength(max(1, answer // 2), answer * 3 // 2), users=400),
        warmup_s=end_s / 3,
        end_s=end_s,
    )
    assert found.output_tok_s == pytest.approx(expected.saturated_tok_s, rel=0.06)


@pytest.mark.parametrize(("blocks", "asked"), [(128, 1024), (128, 512), (256, 512)])
def test_a_small_cache_holds_whole_requests(blocks: int, asked: int) -> None:
    """If two requests both need all of the cache, one waits, however little of it they have on average."""
    shape, cluster, weft = find("Llama-3.1-8B").shape, parse_gpus("1xH100"), load_profile("weft")
    layout, work = cut(shape, [0]), Workload(input_len=asked, output_len=asked)
    memory = footprint(shape, layout, cluster, weft, work)
    small = msgspec.structs.replace(memory.replicas[0], kv_tokens=16 * blocks)
    few = msgspec.structs.replace(memory, replicas=(small,))
    expected = predict(shape, layout, cluster, work, weft, few)
    costs = steps(engine="weft")
    found = told(
        [spec(costs, num_blocks=blocks)],
        load(FixedLength(asked), FixedLength(asked), users=12),
        warmup_s=100.0,
        end_s=500,
    )
    assert found.output_tok_s == pytest.approx(expected.saturated_tok_s, rel=0.1)
    assert found.running == pytest.approx(expected.saturated_concurrency, rel=0.1)


# Short cuts


SPREAD = ("mean", "p50", "p90", "p95", "p99")


def close(one: Report, other: Report, within: float, within_s: float = 1e-4, names: tuple[str, ...] = SPREAD) -> None:
    """All times and rates are as near as that, relative or in seconds."""
    for metric in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s"):
        for name in names:
            left, right = (getattr(getattr(it, metric), name) for it in (one, other))
            assert left == pytest.approx(right, rel=within, abs=within_s), (metric, name)
    for rate in ("request_rate", "output_tok_s", "input_tok_s", "kv_utilisation", "running", "busy"):
        assert getattr(one, rate) == pytest.approx(getattr(other, rate), rel=within), rate


@pytest.mark.parametrize(
    ("limits", "asked"),
    [
        ({}, load(rate=4.0)),
        ({}, load(FixedLength(900), FixedLength(300), rate=12.0)),
        ({"max_num_seqs": 16}, load(users=24)),
        # So few blocks that requests are preempted.
        ({"num_blocks": 100}, load(UniformLength(10, 300), UniformLength(100, 300), rate=8.0)),
        ({}, load(rate=4.0, prefix_len=300, prefixes=5)),
        ({"lookahead": True}, load(rate=4.0)),
        pytest.param({"lookahead": True, "max_num_seqs": 16}, load(users=24), marks=pytest.mark.long),
        ({"stages": 2}, load(rate=4.0)),
        pytest.param({"stages": 4, "max_num_seqs": 10}, load(users=14), marks=pytest.mark.long),
    ],
    ids=["light", "heavy", "full", "preempting", "prefixes", "ahead", "ahead, full", "pipeline", "full pipeline"],
)
def test_stretches_are_as_step_by_step(limits: dict[str, Any], asked: Any) -> None:
    costs = steps("Llama-3.1-8B", f"{limits.get('stages', 1)}xH100", limits.get("stages", 1))
    piped = limits.get("stages", 1) > 1
    end_s = 200.0 if piped else 60.0
    short, long = (told([spec(costs, **limits)] * 2, asked, end_s=end_s, stretches=it) for it in (True, False))
    if piped:
        # When within a round a request comes is chance: waits of some milliseconds are alike on the whole.
        close(short, long, 0.02, 5e-4, SPREAD[:3])
    else:
        close(short, long, 0.02)
        assert (short.requests, short.preemptions) == (long.requests, long.preemptions)
        assert (short.preemptions > 0) == ("num_blocks" in limits)


def test_blocks_that_are_counted_are_as_blocks_that_are_known() -> None:
    """Nothing is shared, so a prefix cache changes nothing, but for those that are preempted and find their own."""
    asked = load(UniformLength(10, 300), UniformLength(100, 300), rate=6.0)
    counted, known = (told([spec(num_blocks=400)], asked, end_s=40.0, prefix_caching=it) for it in (False, True))
    assert counted == msgspec.structs.replace(known, prefix_hit_share=None)
    few, kept = (told([spec(num_blocks=150)], asked, end_s=40.0, prefix_caching=it) for it in (False, True))
    assert few.preemptions > 0 and few.output_tok_s <= kept.output_tok_s <= 1.03 * few.output_tok_s


def test_stretches_with_windows_are_as_step_by_step() -> None:
    """KV that a window bounds grows up to the window only."""
    costs = steps("gemma-3-27b-it", "1xH200")
    asked = load(UniformLength(10, 1500), UniformLength(100, 800), rate=1.0)
    close(*(told([spec(costs)], asked, end_s=80.0, stretches=it) for it in (True, False)), 0.02)


def test_stretches_are_what_makes_it_fast() -> None:
    fast, slow = (run([spec()], load(rate=2.0), stretches=it) for it in (True, False))
    assert fast.steps == slow.steps
    assert fast.events < slow.events / 5


@pytest.mark.parametrize(
    ("asked", "simulated"),
    [
        (load(FixedLength(600), FixedLength(100), rate=48 * 5.0), 12),
        pytest.param(
            load(UniformLength(200, 1000), UniformLength(50, 150), rate=48 * 6.0, burstiness=0.2),
            16,
            marks=pytest.mark.long,
        ),
        pytest.param(load(FixedLength(600), UniformLength(20, 100), users=48 * 3), 12, marks=pytest.mark.long),
    ],
    ids=["equal", "bursts", "users"],
)
def test_sampled_replicas_are_as_all_of_them(asked: Any, simulated: int) -> None:
    """Equal requests that end together are followed by others that begin together: in a large deployment at once, in a
    small one not. A sample that is only a smaller deployment waits 3 % less.
    """
    whole = told([spec()] * 48, asked, warmup_s=5.0, end_s=30.0)
    sampled = told(
        [spec()] * simulated, asked, unsimulated=48 - simulated, warmup_s=5.0, end_s=5.0 + 25.0 * 48 / simulated
    )
    for metric in ("ttft_s", "tpot_s", "e2e_s"):
        for name in ("mean", "p50", "p95"):
            left, right = (getattr(getattr(it, metric), name) for it in (whole, sampled))
            assert left == pytest.approx(right, rel=0.02), (metric, name)
    # Of 6,000 requests about 80 more or less come by chance.
    assert sampled.output_tok_s == pytest.approx(whole.output_tok_s, rel=0.04)
    assert sampled.running == pytest.approx(whole.running, rel=0.04)


def test_the_same_words_give_the_same_figures() -> None:
    asked = load(LogNormalLength(500, 300), LogNormalLength(100, 80), rate=8.0, burstiness=0.5, prefix_len=100, seed=3)
    assert told([spec()] * 3, asked) == told([spec()] * 3, asked)
    other = load(LogNormalLength(500, 300), LogNormalLength(100, 80), rate=8.0, burstiness=0.5, prefix_len=100, seed=4)
    assert told([spec()] * 3, asked) != told([spec()] * 3, other)


@settings(deadline=None)
@given(
    rounds=st.integers(1, 3000),
    first=st.floats(1e-4, 1.0),
    growth=st.floats(0.0, 1e-4),
    at=st.floats(0.0, 1.0, exclude_max=True),
)
def test_a_stretch_knows_which_rounds_are_over(rounds: int, first: float, growth: float, at: float) -> None:
    stretch = Stretch(5.0, rounds, first, first + growth * (rounds - 1))
    now = stretch.start_s + at * (stretch.end_s - stretch.start_s)
    over = stretch.rounds_done(now)
    assert 0 <= over <= rounds
    assert stretch.length_s(over) <= now - 5.0
    assert over == rounds or stretch.length_s(over + 1) > now - 5.0
    assert stretch.length_s(rounds) == pytest.approx(sum(first + stretch.growth_s * at for at in range(rounds)))


# Policies


def test_a_policy_that_balances_waits_less() -> None:
    asked = load(FixedLength(1024), LogNormalLength(300, 600), rate=40.0)
    found = []
    for policy in (LeastConnections(), RoundRobin()):
        simulated = simulate(
            [spec(max_num_seqs=16)] * 6, asked.source(), policy, warmup_s=10.0, end_s=30.0, prefix_caching=False
        )
        found.append(sorted(simulated.tally.ttft)[int(0.95 * len(simulated.tally.ttft))])
    assert found[0] < found[1]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_routes_every_request(name: str) -> None:
    asked = load(FixedLength(1024), FixedLength(16), rate=10.0, prefixes=4, prefix_len=768)
    simulated = simulate(
        [spec(max_num_seqs=16)] * 3, asked.source(), POLICIES[name](), warmup_s=0.0, end_s=10.0, prefix_caching=True
    )
    assert len(simulated.tally.ttft) > 50


def test_routing_by_prefix_computes_less_than_by_connections() -> None:
    asked = load(FixedLength(1024), FixedLength(16), rate=10.0, prefixes=8, prefix_len=960)
    hits = []
    for name in ("least_conn", "prefix"):
        simulated = simulate(
            [spec(num_blocks=400)] * 4, asked.source(), POLICIES[name](), warmup_s=5.0, end_s=25.0, prefix_caching=True
        )
        hits.append(simulated.prefix_hits / simulated.prefix_queries)
    assert hits[1] > 1.2 * hits[0]
