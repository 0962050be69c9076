"""Reports of traces: by kernel, by layer, by kind of work, and several ranks on one time axis."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weft.api.observe.profiling import LastProfile
from weft.monitor import trace_reader
from weft.monitor.trace_reader import read_elsewhere
from weft.monitor.trace_report import (
    KINDS,
    events_within,
    kind_of,
    merge_traces,
    own_times,
    rank_times,
    read_trace,
    report_traces,
    union_s,
)


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    """An event in microseconds, on one thread of one process."""
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 5, "tid": 5, "args": args}


def own(name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return event(name, ts, dur, "weft", **({"rank": 0} | args))


# Two steps of 100 us with a pause of 50 between them.
STEPS = [
    *(own("step", at, 100.0) for at in (0.0, 150.0)),
    *(own("layers", at + 10, 60.0) for at in (0.0, 150.0)),
    *(own("sampling", at + 70, 20.0) for at in (0.0, 150.0)),
    *(
        own(name, at + begin, dur, layer=layer)
        for at in (0.0, 150.0)
        for layer, name, begin, dur in (
            (0, "products", 10, 10.0),
            (0, "attention", 20, 5.0),
            (0, "sums", 25, 5.0),
            (1, "feed-forward", 30, 20.0),
            (1, "norms", 50, 5.0),
        )
    ),
    own("exchanges", 250.0, 0.0, communication_s=4e-6, waiting_s=6e-6),
]


def test_kinds_of_a_rank_on_a_cpu() -> None:
    (rank,) = rank_times(STEPS)
    assert (rank.rank, rank.steps, rank.communication_s, rank.waiting_s) == (0, 2, 4e-6, 6e-6)
    assert rank.seconds == pytest.approx(250e-6)
    wanted = {"products": 60, "attention": 10, "communication": 10, "sampling": 40, "scheduling": 40, "idle": 50}
    for kind, microseconds in wanted.items():
        assert rank.shares[kind] == pytest.approx(microseconds / 250), kind
    assert sum(rank.shares.values()) == pytest.approx(1.0) and set(rank.shares) == set(KINDS)


def test_layers_and_kernels() -> None:
    report = report_traces([{"traceEvents": STEPS}, {"traceEvents": STEPS}])
    assert report.layers[0] == pytest.approx({"products": 40e-6, "attention": 20e-6, "sums": 20e-6})
    assert [row.name for row in report.kernels][:2] == ["C++: feed-forward", "C++: products"]
    assert report.kernels[0].calls == 4 and sum(row.share for row in report.kernels) == pytest.approx(1.0)


def test_layers_that_run_one_by_one() -> None:
    ranges = [event("layer 3", 12, 40.0, "user_annotation")]
    operations = [event("aten::linear", 12, 30.0), event("aten::addmm", 13, 25.0), event("aten::add", 45, 5.0)]
    steps = [one for one in STEPS if "layer" not in one["args"]]
    report = report_traces([{"traceEvents": [*steps, *ranges, *operations]}])
    assert report.layers == {3: {"whole": pytest.approx(40e-6)}}
    (rank,) = report.ranks
    assert rank.shares["products"] == pytest.approx(30 / 250)
    assert rank.shares["communication"] == pytest.approx(10 / 250), "by the rank's own count"


def test_own_times_of_nested_operations() -> None:
    nested = [event("outer", 0, 10.0), event("inner", 2, 3.0), event("inner", 6, 2.0), event("later", 10, 1.0)]
    assert sorted(own_times(nested)) == [
        ("inner", pytest.approx(2e-6)),
        ("inner", pytest.approx(3e-6)),
        ("later", pytest.approx(1e-6)),
        ("outer", pytest.approx(5e-6)),
    ]


def test_a_gpu() -> None:
    kernels = [
        event("_decode_1", 5, 20.0, "kernel"),
        event("nvjet_hsh", 20, 20.0, "kernel"),
        event("ncclAllReduce", 60, 10.0, "kernel"),
    ]
    assert union_s(kernels) == pytest.approx(45e-6)
    (rank,) = rank_times([*STEPS, *kernels])
    assert rank.shares["attention"] == pytest.approx(20 / 250) and rank.shares["idle"] == pytest.approx(205 / 250)
    assert rank.shares["communication"] == pytest.approx(10 / 250)
    assert report_traces([{"traceEvents": kernels}]).kernels[0].name in ("_decode_1", "nvjet_hsh")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ampere_bf16_s16816gemm", "products"),
        ("flash_fwd_kernel", "attention"),
        ("ncclDevKernel_AllReduce", "communication"),
        ("aten::copy_", "other"),
    ],
)
def test_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_one_time_axis() -> None:
    early = {"baseTimeNanoseconds": 1_000_000, "traceEvents": [event("a", 500.0, 1.0)]}
    late = {
        "baseTimeNanoseconds": 3_000_000,
        "traceEvents": [event("b", 500.0, 1.0), {"ph": "M", "name": "n", "pid": 5}],
    }
    merged = merge_traces([early, late])
    first, second, named = merged["traceEvents"]
    assert (first["ts"], second["ts"]) == (500.0, 2500.0), "2 ms later"
    assert first["pid"] != second["pid"] == named["pid"]
    assert early["traceEvents"][0]["pid"] == 5, "the traces are as they were"


def test_files(tmp_path: Path) -> None:
    for name, content in (("good", {"traceEvents": []}), ("bad", [1])):
        with gzip.open(tmp_path / name, "wt") as file:
            json.dump(content, file)
    assert read_trace(tmp_path / "good") == {"traceEvents": []}
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "bad"))):
        read_trace(tmp_path / "bad")


def test_events_within_spans_as_one_by_one() -> None:
    spans = [own("layers", ts, dur) for ts, dur in ((50.0, 5.0), (10.0, 30.0), (20.0, 5.0), (90.0, 0.0))]
    spans.append(own("step", 0.0, 100.0))
    events = [event("aten::mm", ts / 2, 1.0) for ts in range(200)]
    wanted = [one for one in events if any(span["ts"] <= one["ts"] < span["ts"] + span["dur"] for span in spans[:-1])]
    assert events_within(events, spans, "layers") == wanted != []
    assert events_within(events, [], "layers") == []


def test_another_process_reads_traces_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [str(tmp_path / f"{number}.json.gz") for number in range(2)]
    for file in files:
        with gzip.open(file, "wt") as target:
            json.dump({"traceEvents": STEPS}, target)
    traces = [read_trace(file) for file in files]
    last = LastProfile()
    last.begin(files)
    report = last._report(files)
    assert report == json.loads(msgspec.json.encode(report_traces(traces)))
    assert json.loads(gzip.decompress(last.merged())) == merge_traces(traces)
    monkeypatch.setattr(trace_reader.subprocess, "run", lambda *arguments, **options: 1 / 0)
    assert last._report(files) == report
    monkeypatch.undo()
    Path(files[0]).write_text("no trace")
    content, said = read_elsewhere("report", files)
    assert files[0] in said and json.loads(content)["ranks"]
    with pytest.raises(OSError, match=re.escape(files[0])):
        read_elsewhere("report", files[:1])
