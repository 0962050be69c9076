"""Questions to a simulation and its answers: lengths, traces, arrivals, objectives, percentiles, searches."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf, sqrt
from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.simulations import load, spec, told
from tests.refusals import refusals, refuses
from weft.errors import ConfigError
from weft.study.simulate.capacity_search import find_rate, find_replicas
from weft.study.simulate.lengths import FixedLength, Lengths, LogNormalLength, UniformLength, parse_lengths
from weft.study.simulate.load import RequestDistribution, SimulatedLoad
from weft.study.simulate.objective import LatencyObjective, LatencyTarget, format_duration, parse_objective, percentile
from weft.study.simulate.report import summarize_times
from weft.study.simulate.simulated_request import SimulatedRequest
from weft.study.simulate.tally import Tally
from weft.study.simulate.trace import TraceRow, read_trace

# Lengths


def test_lengths_are_read() -> None:
    assert parse_lengths("1024", "--input-len") == FixedLength(1024)
    assert parse_lengths("100:1024", "--input-len") == UniformLength(100, 1024)
    assert parse_lengths("lognormal:500:300.5", "--input-len") == LogNormalLength(500.0, 300.5)


BAD_LENGTHS = {
    "": "bad-length",
    "many": "bad-length",
    "0": "length-out-of-range",
    "-3": "length-out-of-range",
    "5:2": "length-out-of-range",
    "1:2:3": "bad-length",
    "lognormal:5": "bad-length",
    "lognormal:0:3": "lognormal-out-of-range",
    "lognormal:x:1": "bad-length",
    "1.5": "bad-length",
}


@pytest.mark.parametrize(("text", "code"), BAD_LENGTHS.items())
def test_lengths_that_are_none_are_refused(text: str, code: str) -> None:
    with refuses(ConfigError, code, f"--output-len {text!r}"):
        parse_lengths(text, "--output-len")


@pytest.mark.parametrize("lengths", [FixedLength(40), UniformLength(10, 90), LogNormalLength(500.0, 300.0)])
def test_lengths_have_the_mean_that_they_say(lengths: Any) -> None:
    random = Random(1)
    drawn = [lengths.draw(random) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(lengths.mean, rel=0.02)
    assert min(drawn) >= 1
    if isinstance(lengths, LogNormalLength):
        assert pstdev(drawn) == pytest.approx(lengths.deviation, rel=0.05)


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        (FixedLength(40), 100),
        (UniformLength(10, 90), 100),
        (LogNormalLength(500, 300), 10**6),
        (LogNormalLength(500, 900), 700),
    ],
    ids=str,
)
def test_moments_are_those_of_what_is_drawn(lengths: Lengths, most: int) -> None:
    random = Random(1)
    drawn = [min(lengths.draw(random), most) for _ in range(50_000)]
    want = fmean(drawn), fmean(it * it for it in drawn)
    assert lengths.moments(most) == pytest.approx(want, rel=0.02)


def test_the_spread_of_answers_is_known_for_a_trace_too() -> None:
    drawn = RequestDistribution(input_len=FixedLength(10), output_len=UniformLength(1, 3), most=100)
    assert drawn.output_spread == pytest.approx(sqrt(2 / 3) / 2)
    rows = tuple(TraceRow(at, SimulatedRequest(5, answer)) for at, answer in enumerate((1, 2, 3)))
    for each_load in (SimulatedLoad(distribution=drawn, trace=rows), msgspec.structs.replace(drawn, rows=rows)):
        assert each_load.output_spread == pytest.approx(sqrt(2 / 3) / 2) and each_load.mean == (5, 2)


# Traces


def written(folder: Path, text: str, name: str = "trace.csv") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def lengths_of(rows: tuple[TraceRow, ...]) -> list[tuple[float, int, int]]:
    return [(round(row.at, 6), row.request.input_len, row.request.output_len) for row in rows]


@pytest.mark.parametrize(
    "text",
    [
        "time,input_len,output_len\n12,100,20\n13.5,7,1\n",
        "Output_Len, Time, Input_Len, who\n20, 12, 100, me\n1, 13.5, 7, you\n\n",
        '{"time": 12, "input_len": 100, "output_len": 20}\n\n{"time": 13.5, "input_len": 7, "output_len": 1}\n',
        # Out of order.
        "time,input_len,output_len\n13.5,7,1\n12,100,20\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,100,20\n2023-11-16 18:15:48.1805900,7,1\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00+00:00,100,20\n2024-05-10 00:00:01.500000+00:00,7,1\n",
        '{"timestamp": 12000, "input_length": 100, "output_length": 20, "hash_ids": [1]}\n'
        '{"timestamp": 13500, "input_length": 7, "output_length": 1, "hash_ids": [2]}',
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "12,ChatGPT,100,20,120,Conversation log\n13.5,GPT-4,7,1,8,API log\n",
    ],
)
def test_traces_are_read(tmp_path: Path, text: str) -> None:
    assert lengths_of(read_trace(written(tmp_path, text))) == [(0.0, 100, 20), (1.5, 7, 1)]


def test_prompts_are_alike_as_far_as_the_trace_says(tmp_path: Path) -> None:
    text = "time,input_len,output_len,prefix_id,prefix_len\n0,10,1,a,6\n1,12,1,a,6\n2,10,1,b,6\n3,4,1,a,6\n4,10,1,,\n"
    prompts = [row.request.prompt() for row in read_trace(written(tmp_path, text))]
    assert [len(prompt) for prompt in prompts] == [10, 12, 10, 4, 10]
    assert prompts[0][:6] == prompts[1][:6] and prompts[0][6] != prompts[1][6]
    assert prompts[3] == prompts[0][:4]
    assert len({prompts[number][0] for number in (0, 2, 4)}) == 3


def test_hashes_stand_for_512_tokens_each(tmp_path: Path) -> None:
    lines = ['{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [5, 9]}'] * 2
    lines.append('{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [5, 7]}')
    first, second, third = (row.request.prompt() for row in read_trace(written(tmp_path, "\n".join(lines))))
    assert first == second and len(first) == 1000
    assert first[:512] == third[:512] and first[512] != third[512]


def test_sessions_go_on_where_they_were(tmp_path: Path) -> None:
    text = "time,input_len,output_len,session_id\n0,10,5,s\n1,20,5,s\n2,20,5,t\n"
    first, second, other = (row.request for row in read_trace(written(tmp_path, text)))
    assert second.prompt()[:15] == first.prompt() + [first.own] * 5
    assert other.prompt()[0] != second.prompt()[0]


# A trace, the code of what is wrong with it, and values of the message.
BAD_TRACES: list[tuple[str, str, tuple[str, ...]]] = [
    ("", "empty-trace", ()),
    ("time,input_len,output_len\n", "empty-trace", ()),
    ("time,input_len,output_len\n1,2\n", "trace-line-of-other-length", ("line 2", "2", "3")),
    ("time,input_len\n0,100\n", "unknown-trace-columns", ("line 2", "'time, input_len'")),
    ("time,input_len,output_len\n0,1,1\n1.5,abc,20\n", "bad-trace-tokens", ("line 3", "input_len", "'abc'")),
    ("time,input_len,output_len\n0,1,0\n", "bad-trace-tokens", ("line 2", "output_len", "'0'")),
    ("time,input_len,output_len\n0,1.5,1\n", "bad-trace-tokens", ("line 2", "input_len", "'1.5'")),
    ("time,input_len,output_len\nsoon,1,1\n", "bad-trace-time", ("line 2", "'soon'")),
    ("time,input_len,output_len\nnan,1,1\n", "bad-trace-time", ("line 2", "'nan'")),
    ("time,input_len,output_len,prefix_id,prefix_len\n0,1,1,a,\n", "bad-trace-tokens", ("line 2", "prefix_len", "''")),
    ('{"time": 0, "input_len": 1, "output_len": 1}\n{"time": 1,\n', "trace-line-not-json", ("line 2",)),
    ('{"time": 0, "input_len": 1, "output_len": 1}\n[1]\n', "trace-line-not-object", ("line 2", "'[1]'")),
    ('{"time": true, "input_len": 1, "output_len": 1}\n', "bad-trace-time", ("line 1", "'true'")),
    (
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 3}\n',
        "trace-hashes-not-list",
        ("line 1", "hash_ids", "'3'"),
    ),
    ('{"time": 0, "input_len": 1}\n', "unknown-trace-columns", ("line 1", "'time, input_len'")),
]


@pytest.mark.parametrize(("text", "code", "values"), BAD_TRACES)
def test_a_bad_line_is_named(tmp_path: Path, text: str, code: str, values: tuple[str, ...]) -> None:
    with refuses(ConfigError, code, *values):
        read_trace(written(tmp_path, text))


COLUMNS = ("time", "input_len", "output_len")
HUGE, LARGE = "1" + "0" * 400, "1" + "0" * 20  # the first is beyond every float


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ((HUGE, "1", "1"), "bad-trace-time"),
        ((LARGE, "1", "1"), "trace-time-too-large"),
        (("0", HUGE, "1"), "bad-trace-tokens"),
        (("0", LARGE, "1"), "too-many-trace-tokens"),
        (("0", "1", HUGE), "bad-trace-tokens"),
    ],
)
def test_numbers_beyond_all_measure_are_refused(tmp_path: Path, values: tuple[str, ...], code: str) -> None:
    """Integers of JSON may be larger than any float."""
    line = "{" + ", ".join(f'"{name}": {value}' for name, value in zip(COLUMNS, values, strict=True)) + "}\n"
    with refuses(ConfigError, code):
        read_trace(written(tmp_path, line))
    if values[0] != HUGE:  # the text of a number that is infinite as a float
        with refuses(ConfigError, code):
            read_trace(written(tmp_path, f"{','.join(COLUMNS)}\n{','.join(values)}\n"))


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000])
def test_values_outside_of_json_are_refused(tmp_path: Path, value: str) -> None:
    with refuses(ConfigError, "trace-line-not-json"):
        read_trace(written(tmp_path, f'{{"time": {value}, "input_len": 1, "output_len": 1}}\n'))


def test_the_wording_of_bad_lines(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    golden(
        "trace.txt",
        refusals(lambda text: read_trace(written(tmp_path, text)), [text for text, *_ in BAD_TRACES], tmp_path),
    )


def test_a_trace_that_is_no_file_or_no_text_is_refused(tmp_path: Path) -> None:
    with refuses(ConfigError, "cannot-read-trace"):
        read_trace(str(tmp_path / "none.csv"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    with refuses(ConfigError, "cannot-read-trace"):
        read_trace(str(tmp_path / "binary"))


# Arrivals


def gaps(asked: Any, count: int = 20_000) -> list[float]:
    source, times = asked.source(), [0.0]
    for _ in range(count):
        times.append(source.next_s)
        source.take_request()
    return list(np.diff(times))


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gaps_are_as_the_rate_and_the_burstiness_say(shape: float) -> None:
    found = gaps(load(rate=8.0, burstiness=shape))
    assert fmean(found) == pytest.approx(1 / 8, rel=0.04)
    assert (pstdev(found) / fmean(found)) ** 2 == pytest.approx(1 / shape, rel=0.1)


def test_a_rate_only_stretches_the_same_requests() -> None:
    slow, fast = gaps(load(rate=2.0), 50), gaps(load(rate=8.0), 50)
    assert slow == pytest.approx([4 * gap for gap in fast])


def test_a_trace_keeps_its_times_or_takes_a_rate() -> None:
    rows = tuple(TraceRow(float(at), SimulatedRequest(5, 5)) for at in (0, 1, 4, 10))
    assert [round(gap, 9) for gap in gaps(load(trace=rows), 4)] == [0, 1, 3, 6]
    # Three gaps in 10 s are 0.3 a second.
    assert [round(gap, 9) for gap in gaps(load(trace=rows, rate=0.6), 4)] == [0, 0.5, 1.5, 3]
    assert load(trace=rows).offered == pytest.approx(0.3)


def test_users_ask_again_after_they_have_thought() -> None:
    source = load(users=2, think_s=3.0).source()
    source.take_request()
    source.take_request()
    assert source.next_s == inf
    source.request_ended(10.0)
    assert source.next_s == 13.0
    source.request_ended(11.0, refused=True)
    assert source.next_s == 12.0


def test_drawn_requests_fit_the_model() -> None:
    source = load(LogNormalLength(6000, 6000), FixedLength(5000), rate=1.0).source()
    for _ in range(500):
        ask = source.take_request()
        assert ask.input_len >= 1 and ask.output_len >= 1 and ask.input_len + ask.output_len <= 8192


def test_lengths_can_be_those_of_a_trace() -> None:
    rows = tuple(TraceRow(0.0, SimulatedRequest(length, 2 * length)) for length in (3, 5, 9))
    source = load(rate=1.0, rows=rows).source()
    found = {(ask.input_len, ask.output_len) for ask in (source.take_request() for _ in range(100))}
    assert found == {(3, 6), (5, 10), (9, 18)}


# Objectives and percentiles


def test_objectives_are_read() -> None:
    found = parse_objective(" ttft_p95=1s, tpot_p99.9 = 50ms,e2e_mean<=2m")
    assert found == LatencyObjective(
        (LatencyTarget("ttft", 95, 1.0), LatencyTarget("tpot", 99.9, 0.05), LatencyTarget("e2e", None, 120.0))
    )
    assert str(found) == "ttft_p95 1 s, tpot_p99.9 50 ms, e2e_mean 2 min"
    assert found.limit_s("itl") == inf


# An objective, the code of what is wrong with it, and values of the message.
BAD_OBJECTIVES: list[tuple[str, str, tuple[str, ...]]] = [
    ("", "empty-slo", ()),
    ("ttft", "bad-slo-target", ("'ttft'",)),
    ("ttft=1s", "bad-slo-target", ("'ttft=1s'", "METRIC_STATISTIC")),
    ("speed_p95=1s", "unknown-slo-metric", ("'speed'", "ttft, tpot, itl, e2e, queue")),
    ("ttft_p0=1s", "bad-slo-percentile", ("0", "100")),
    ("ttft_p100=1s", "bad-slo-percentile", ("0", "100")),
    ("ttft_p95=1", "bad-duration", ("'1'",)),
    ("ttft_p95=0ms", "bad-duration", ("'0ms'",)),
    ("ttft_p95=-1s", "bad-duration", ("'-1s'",)),
    ("ttft_p95=1d", "bad-duration", ("'1d'",)),
    ("ttft_p95=1s,,tpot_p95", "bad-slo-target", ("'tpot_p95'",)),
]


@pytest.mark.parametrize(("text", "code", "values"), BAD_OBJECTIVES)
def test_objectives_that_are_none_are_refused(text: str, code: str, values: tuple[str, ...]) -> None:
    with refuses(ConfigError, code, *values):
        parse_objective(text)


def test_the_wording_of_objectives_and_lengths_that_are_none(golden: Callable[[str, str], None]) -> None:
    lengths = refusals(lambda text: parse_lengths(text, "--output-len"), BAD_LENGTHS)
    golden("simulate.txt", refusals(parse_objective, [text for text, *_ in BAD_OBJECTIVES]) + lengths)


def test_durations_read_well() -> None:
    assert [format_duration(it) for it in (0.0123, 0.9, 1.5, 90, 600, 3600 * 3, inf)] == [
        "12.3 ms",
        "900 ms",
        "1.5 s",
        "90 s",
        "10 min",
        "3 h",
        "for ever",
    ]


@settings(deadline=None)
@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=60), percent=st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), rel=1e-12, abs=1e-9)
    found = summarize_times(values)
    assert found is not None
    assert found.mean == pytest.approx(np.mean(values))
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx(np.percentile(values, [50, 90, 95, 99]))


def test_a_token_that_never_came_takes_for_ever() -> None:
    values = [1.0, 2.0, 3.0, inf]
    assert percentile(values, 50) == 2.5
    assert percentile(values, 90) == inf


@settings(deadline=None)
@given(values=st.lists(st.tuples(st.floats(1e-4, 10), st.integers(1, 50)), min_size=1, max_size=40))
def test_gaps_between_tokens_are_known_to_half_a_percent(values: list[tuple[float, int]]) -> None:
    tally = Tally(0.0, inf)
    for seconds, count in values:
        tally.count_gaps(1.0, [seconds] * count)
    every = [seconds for seconds, count in values for _ in range(count)]
    for percent in (50, 90, 99):
        expected = np.percentile(every, percent, method="inverted_cdf")
        assert tally.gap_percentile(percent) == pytest.approx(expected, rel=0.005)
    assert tally.gap_sum / tally.gap_count == pytest.approx(np.mean(every))


def test_gaps_of_a_stretch_are_those_of_its_rounds() -> None:
    whole, each = Tally(0.0, inf), Tally(0.0, inf)
    whole.count_stretch(1.0, 500, 7, 0.010, 0.00002)
    for at in range(500):
        each.count_gaps(1.0, [0.010 + 0.00002 * at] * 7)
    assert whole.gap_count == each.gap_count and whole.gap_sum == pytest.approx(each.gap_sum)
    for percent in (10, 50, 90, 99):
        assert whole.gap_percentile(percent) == pytest.approx(each.gap_percentile(percent), rel=0.006)


def test_goodput_is_what_keeps_the_promise() -> None:
    asked = load(FixedLength(1024), UniformLength(20, 200), rate=10.0)
    plain = told([spec()], asked)
    assert plain.ttft_s is not None and plain.goodput_rate is None and plain.met is None
    middle = plain.ttft_s.p50
    half = told([spec()], asked, LatencyObjective((LatencyTarget("ttft", 95, middle),)))
    assert half.goodput_share == pytest.approx(0.5, abs=0.01)
    assert half.goodput_rate == pytest.approx(half.requests * 0.5 / half.window_s, rel=0.02)
    assert half.met is False and half.objective[0].value_s == pytest.approx(plain.ttft_s.p95)
    kept = told([spec()], asked, LatencyObjective((LatencyTarget("ttft", 50, middle), LatencyTarget("itl", 50, 1.0))))
    assert kept.met is True


def test_a_refused_request_waits_for_ever() -> None:
    asked = load(FixedLength(1024), FixedLength(100), rate=30.0)
    found = told(
        [spec(max_num_seqs=2, max_num_queued=0)], asked, LatencyObjective((LatencyTarget("ttft", 95, 1.0),)), end_s=30.0
    )
    assert found.refused > found.requests / 20
    assert found.met is False and found.objective[0].value_s == inf
    assert found.goodput_share == pytest.approx(1 - found.refused / found.requests, abs=0.01)


# Searches


def judged(met: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """A run that says of a number whether it is enough."""
    base = told([spec()], load(rate=1.0), LatencyObjective((LatencyTarget("ttft", 95, 1e-6),)), end_s=12.0)

    def run(number: Any) -> Any:
        return msgspec.structs.replace(base, met=met(number), replicas=number, rate=number)

    return run


@settings(deadline=None, max_examples=30)
@given(least=st.integers(1, 3000), guess=st.floats(50, 4000))
def test_the_fewest_replicas_are_found(least: int, guess: float) -> None:
    found = find_replicas(judged(lambda count: count >= least), guess)
    assert found.value is not None
    assert least <= found.value <= max(least + 1, least * 1.011)
    assert found.report is not None and found.report.replicas == found.value
    assert len(found.runs) < 40


@settings(deadline=None, max_examples=30)
@given(most=st.floats(0.5, 500), guess=st.floats(1.0, 300))
def test_the_highest_rate_is_found(most: float, guess: float) -> None:
    found = find_rate(judged(lambda rate: rate <= most), guess)
    if most < guess / 50:
        return
    assert found.value is not None
    assert 0.97 * min(most, 32 * guess) <= found.value <= most
    assert found.report is not None and found.report.rate == found.value


def test_a_promise_that_no_number_keeps_is_told() -> None:
    found = find_replicas(judged(lambda count: False), 3)
    assert found.value is None and re.match(r"192 replicas .*\bttft_p95\b", found.reason)
    rate = find_rate(judged(lambda rate: False), 10.0)
    assert rate.value is None and "requests/s" in rate.reason and "ttft_p95" in rate.reason
