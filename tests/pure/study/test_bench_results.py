"""The file of weft bench serve's result: Weft's --save-result FILE, and vLLM's switch with a folder and a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pure.commands import parsed, refused_line
from weft.cli.bench.serve import result_path
from weft.cli.bench.view import times_table
from weft.cli.flags.bench_flags import TIMES
from weft.study.bench.summary import METRICS


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("", None),
        ("--save-result out.json", "out.json"),
        ("--save-result --result-dir runs --result-filename a.json", "runs/a.json"),
        ("--result-dir runs --save-result --percentile-metrics ttft,tpot", "runs/weft-4qps-m-*.json"),
        ("--result-dir runs --save-result out.json", "runs/out.json"),
        ("--save-result", "weft-4qps-m-*.json"),
    ],
)
def test_the_file(words: str, path: str | None) -> None:
    given = parsed(f"bench serve owner/m --request-rate 4 {words}")
    found = result_path(given)
    assert found is None if path is None else found is not None and found.match(path)


def test_a_folder_without_a_result_is_refused(tmp_path: Path) -> None:
    refused_line("bench serve demo --result-dir runs", 2, "result-not-saved", "--save-result")
    refused_line(f"bench serve demo --save-result --result-dir {tmp_path}/none", 2, "folder-missing", "none")
    refused_line("bench serve demo --percentile-metrics speed", 2, "invalid-flag-value", "ttft")


def test_only_the_named_times_are_shown() -> None:
    assert tuple(METRICS) == TIMES
    result = {f"{column}_{name}_ms": 1.0 for name in METRICS for column in ("mean", "median", "p95")}
    result |= {"percentiles": [95]}  # type: ignore[dict-item]
    assert len(times_table(result, ("ttft", "itl"))) == 1 + 2
    assert len(times_table(result)) == 1 + len(METRICS)
