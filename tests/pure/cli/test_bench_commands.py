"""weft bench serve, sweep and compare as commands, against a server of the tests."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pure.commands import parsed, refused_line, weft
from tests.pure.servers import Exchange, good, serving
from tests.refusals import refuses
from weft.cli.bench import compare, serve
from weft.cli.bench.view import aligned, number
from weft.cli.plot import Curve, Panel, ReferenceLine, line_colors, text_plot, write_image
from weft.errors import ConfigError
from weft.study.bench.compare import FigureChange, figure_changes, read_result


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with the models `m` and `n`, of which `n` is refused."""

    async def answering(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.refuse("200 OK", b'{"data": [{"id": "m"}, {"id": "n"}]}')
        elif exchange.json["model"] == "n":
            exchange.refuse("400 Bad Request", b'{"error": {"message": "not n"}}')
        else:
            await good(exchange)

    started, done = threading.Event(), threading.Event()
    found: list[str] = []

    async def run() -> None:
        async with serving(answering) as server:
            found.append(server.url)
            started.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(30)
    yield found[0]
    done.set()
    thread.join()


def said(*words: str) -> tuple[int, str, str]:
    return weft("bench", *words)


def test_serve(url: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = ["serve", "--base-url", f"{url}/v1", "--num-prompts", "5", "--output-len", "3", "--request-rate", "1000"]
    status, out, _ = said(*words, "--goodput", "ttft:60000", "--save-result", str(path))
    assert status == 0
    assert re.search(r"\bm\b.* /v1/completions: 5 .*\b1000 ", out)
    assert re.search(r"\b5 of 5\b", out) and re.search(r"\b100 % .*\bttft 60000 ms", out)
    result = json.loads(path.read_text())
    assert (result["completed"], result["total_output_tokens"], result["request_rate"]) == (5, 15, 1000)
    assert result["p99_ttft_ms"] >= result["median_ttft_ms"] > 0
    port = url.rpartition(":")[2]
    words[1:3] = ["--port", port, "--endpoint", "/v1/completions", "--metric-percentiles", "50,99.9"]
    status, out, _ = said(*words, "--random-input-len", "7", "--random-output-len", "2", "--json")
    result = json.loads(out)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (35, 10)
    assert result["percentiles"] == [50, 95, 99, 99.9] and result["p50_ttft_ms"] == result["median_ttft_ms"]
    assert result["p99.9_ttft_ms"] >= result["p99_ttft_ms"]
    assert result["task"] == "serve"


# The words after weft bench, with the address of a server for URL; the status, the code and the values of the error.
WRONG_LINES = [
    ("serve --base-url URL --served-model-name n", 1, "server-not-answering", "URL 400 not n"),
    ("serve", 2, "server-missing", "MODEL --base-url"),
    ("serve --base-url URL --goodput itl:3", 1, "bad-goodput-limit", "--goodput 'itl:3'"),
    ("serve --base-url URL --request-rate -1", 2, "invalid-flag-value", "--request-rate '-1' 0"),
    ("serve --base-url URL --burstiness inf", 2, "invalid-flag-value", "--burstiness 'inf'"),
    ("serve --base-url URL --random-range-ratio 1", 2, "invalid-flag-value", "--random-range-ratio '1'"),
    ("serve --base-url URL --header nonsense", 2, "invalid-flag-value", "--header 'nonsense'"),
    ("serve --base-url URL --save-result /nowhere/at/all", 2, "folder-missing", "--save-result /nowhere/at"),
    ("serve --base-url http://127.0.0.1:1", 1, "server-unreachable", "http://127.0.0.1:1"),
    ("serve --base-url URL --port 9", 2, "server-address-twice", "--base-url --port"),
    ("serve --base-url URL --dataset-name sharegpt", 2, "dataset-path-missing", "sharegpt --dataset-path"),
    ("serve --base-url URL --dataset-name random --dataset-path x", 2, "dataset-path-unused", "--dataset-path"),
    ("serve --base-url URL --metric-percentiles 101", 2, "invalid-flag-value", "'101' 0 100"),
    ("serve /no/such/model", 1, "no-such-model", "/no/such/model"),
    ("sweep --base-url URL", 2, "load-missing", "--request-rate --max-concurrency"),
    (
        "sweep --base-url URL --request-rate 1,2 --max-concurrency 1,2",
        2,
        "two-varied-loads",
        "--request-rate --max-concurrency",
    ),
]


def test_wrong_flags_are_refused_before_the_load(url: str, golden: Callable[[str, str], None]) -> None:
    entries = [
        refused_line(f"bench {words.replace('URL', url)}", status, code, values.replace("URL", url))
        for words, status, code, values in WRONG_LINES
    ]
    golden("errors/bench_serve.txt", "".join(entries).replace(url, "URL"))


def test_nobody_was_answered(url: str) -> None:
    words = ["serve", "--base-url", url, "--served-model-name", "n", "--num-warmups", "0", "--num-prompts", "3"]
    status, out, _ = said(*words)
    assert status == 1
    assert "3 x HTTP 400: not n" in out and re.search(r"\b3 of 3\b", out)


def test_a_server_of_our_own_gets_the_engine_s_flags() -> None:
    typed = "bench serve m -tp 2 --tensor-split 2,1 --max-model-len auto --no-enable-prefix-caching --seed 3"
    words = serve.engine_flags(parsed(f"{typed} --distributed-executor-backend mp").engine)
    got = parsed(["serve", "m", *words]).engine.values()
    assert (got["tensor_parallel_size"], got["tensor_split"], got["max_model_len"]) == (2, (2.0, 1.0), None)
    assert (got["enable_prefix_caching"], got["executor"], got["seed"]) == (False, "mp", 3)


def test_sweep(url: str, tmp_path: Path) -> None:
    words = ["sweep", "--base-url", url, "--num-prompts", "4", "--output-len", "3", "--save-result"]
    status, out, err = said(*words, str(tmp_path / "a.json"), "--max-concurrency", "4,1,2")
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith("m: 4 ") and [line.split()[0] for line in lines[3:6]] == ["1", "2", "4"]
    assert "o median TTFT   + p95 TTFT   x p95 TPOT" in out
    assert len(err.splitlines()) == 3
    status, out, _ = said(*words, str(tmp_path / "b.json"), "--request-rate", "500,inf", "--json")
    result = json.loads(out)
    assert [point["request_rate"] for point in result["points"]] == [500, "inf"]
    assert json.loads((tmp_path / "b.json").read_text()) == result
    with refuses(ConfigError, "no-result-in-file"):
        read_result(str(Path(__file__)))
    old, new = read_result(str(tmp_path / "a.json")), read_result(str(tmp_path / "a.json"))
    found = figure_changes(old, new)
    assert {change.ratio for change in found} == {1.0} and len({change.name for change in found}) == len(found)
    assert "at once 1: median_ttft_ms" in {change.name for change in found}


def test_a_plot_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    curves = [Curve("a", [(1, 1), (2, 100)]), Curve("b", [(1, 3)])]
    lines = [ReferenceLine(1.5, "upright", upright=True), ReferenceLine(50, "level", upright=False)]
    panels = [Panel(curves, x="x", y="y", lines=lines), Panel([], x="x", y="y")]
    write_image(str(path), panels, title="t")
    assert path.read_bytes().startswith(b"\x89PNG")
    with refuses(ConfigError, "cannot-write-output"):
        write_image(str(tmp_path / "none" / "plot.png"), panels, title="t")
    with refuses(ConfigError, "cannot-write-output"):
        write_image(str(tmp_path / "plot.nonsense"), panels, title="t")


def test_a_line_has_one_colour_in_all_panels() -> None:
    saturation, limit = ReferenceLine(4, "saturation", upright=True), ReferenceLine(50, "limit", upright=False)
    curve = Curve("p50", [(1, 1)])
    panels = [Panel([curve], x="x", y="y", lines=[limit, saturation]), Panel([curve], x="x", y="y", lines=[saturation])]
    assert line_colors(panels) == {"limit": "C1", "saturation": "C2"}


def test_a_plot_in_a_terminal() -> None:
    lines = text_plot([Curve("up", [(0, 0), (4, 8)]), Curve("flat", [(2, 2)])], x="load", y="ms", width=9, height=5)
    assert lines == [
        "ms",
        "8 |       .o",
        "  |     ..",
        "4 |    .",
        "  |  ..+",
        "0 |o.",
        "  +---------",
        "   0   2   4  load",
        "o up   + flat",
    ]
    assert text_plot([Curve("none", [])], x="x", y="y") == []
    assert any("*" in line for line in text_plot([Curve(str(n), [(1, 5)]) for n in range(4)], x="x", y="y"))
    powers = text_plot([Curve("a", [(1, 1), (100, 1000)])], x="x", y="y", width=11, height=3)
    assert [line.split("|")[0].strip() for line in powers[1:4]] == ["1e+03", "31.6", "1"]


def test_compare(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    def write(name: str, **figures: Any) -> str:
        (tmp_path / name).write_text("a line before\n" + json.dumps({"task": "latency", **figures}) + "\n")
        return str(tmp_path / name)

    old = write("old", model="m", decode_tok_s=100.0, ttft_s=0.5, runs=3, failed=0)
    same = write("same", model="m", decode_tok_s=96.0, ttft_s=0.52, runs=9, failed=0)
    worse = write("worse", model="o", decode_tok_s=120.0, ttft_s=0.6, failed=2)
    assert said("compare", old, same)[0] == 0
    status, out, _ = said("compare", old, worse)
    assert status == 1
    assert re.search(r"\bmodel .*\bm\b.*\bo\b", out) and re.search(r"\b2 of 3 .*\b5 %", out)
    assert [line.split()[-1] for line in out.splitlines() if line.startswith(("decode", "ttft", "failed"))] == [
        "1.200",
        "worse",
        "worse",
    ]
    assert said("compare", old, same, "--tolerance", "0.03")[0] == 1
    status, out, _ = said("compare", old, worse, "--json")
    got = json.loads(out)
    assert {it["name"]: it["ratio"] for it in got["figures"]}["decode_tok_s"] == 1.2
    empty = write("empty", runs=3)
    entries = [
        refused_line(["bench", "compare", old], 2, "needs-two-results"),
        refused_line(["bench", "compare", old, f"{tmp_path}/none"], 1, "cannot-read-result", f"{tmp_path}/none"),
        refused_line(["bench", "compare", old, empty], 1, "no-common-figure", f"{old} {empty}"),
    ]
    golden("errors/bench_compare.txt", "".join(entries).replace(str(tmp_path), "FOLDER"))


def test_a_change_has_a_direction() -> None:
    faster = FigureChange(name="tok_s", old=2, new=4, higher_is_better=True)
    slower = FigureChange(name="ttft_s", old=2, new=4, higher_is_better=False)
    assert (faster.ratio, slower.ratio) == (2.0, 0.5)
    assert not faster.worse(0.05) and slower.worse(0.05) and not slower.worse(0.6)
    assert FigureChange(name="failed", old=3, new=0, higher_is_better=False).ratio is None
    assert FigureChange(name="failed", old=0, new=0, higher_is_better=False).ratio == 1.0
    assert FigureChange(name="failed", old=0, new=1, higher_is_better=False).worse(0.99)
    assert compare.table_row(slower, True) == ["ttft_s", "2", "4", "0.500", "worse"]


def test_figures_and_tables_in_text() -> None:
    assert [number(it) for it in (None, 0, 0.1234, 5.6789, 1234.5)] == ["-", "0", "0.123", "5.679", "1,234"]
    assert aligned(["a", "b"], [["long", "1"], ["x", "10"]]) == ["a      b", "long   1", "x     10"]
