"""weft run, chat, bench and serve as a user starts them: processes with words, status and output."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cpu import tiny
from tests.pure.commands import HERE, refused_line
from tests.refusals import has_values
from weft.cli import main

ENGINE = ["--load-format", "dummy", "--dtype", "float32", "--kv-cache-memory-bytes", "1M", "--device", "cpu"]
TWO = ["--tensor-split", "1,1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("models") / "tiny"))


def weft(*words: str, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "weft", *words], capture_output=True, text=True, env=HERE, timeout=120, **options
    )
    assert done.returncode == status, done.stderr
    return done


def here(capfd: pytest.CaptureFixture[str], *words: str, status: int = 0) -> pytest.CaptureResult[str]:
    """Output of a command that runs in this process, which has imported torch already."""
    capfd.readouterr()
    assert main.main(list(words)) == status
    return capfd.readouterr()


def test_the_layout_as_a_table(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--prompt", "hello", "--max-tokens", "2", "--show-layout", "--json"]
    split = [*TWO, "--distributed-executor-backend", "uni"]
    told = here(capfd, "run", model, *asked, *ENGINE, *split)
    rows = [line.split() for line in told.err.splitlines() if re.match(r"\s+\d on ", line)]
    layout = json.loads(told.out)["layout"]
    assert [[row[0], row[2], row[3]] for row in rows] == [[str(one["rank"]), one["node"], "cpu"] for one in layout]
    for row, one in zip(rows, layout, strict=True):
        heads = f"{one['first_q_head']}-{one['first_q_head'] + one['q_heads'] - 1}"
        assert heads in row and f"({one['layers']})" in row and "experts" not in told.err


@pytest.mark.parametrize("layout", [[], TWO, [*TWO, "--distributed-executor-backend", "uni"]], ids=" ".join)
def test_run_json(model: str, layout: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    words = ["run", model, "--prompt", "hello", "--json", "--max-tokens", "6", "--temperature", "0", "--ignore-eos"]
    # With two ranks as a user starts it.
    out = weft(*words, *ENGINE, *layout).stdout if layout == TWO else here(capfd, *words, *ENGINE, *layout).out
    (line,) = out.splitlines()
    got = json.loads(line)
    assert set(got) == {"text", "token_ids", "finish_reason", "usage", "timing", "layout", "predicted"}
    assert len(got["token_ids"]) == got["usage"]["completion_tokens"] == 6
    assert got["finish_reason"] == "length"
    assert got["usage"]["total_tokens"] == got["usage"]["prompt_tokens"] + 6
    assert set(got["timing"]) == {"load_s", "ttft_s", "decode_tok_s"} and got["timing"]["ttft_s"] > 0
    ranks = 2 if layout else 1
    assert [row["rank"] for row in got["layout"]] == list(range(ranks))
    assert sum(row["q_heads"] for row in got["layout"]) == 4
    assert sum(row["kv_heads"] for row in got["layout"]) == 2
    assert all(0 < row["kv_bytes"] <= 2**20 and row["weight_bytes"] > 0 for row in got["layout"])
    predicted = got["predicted"]
    assert predicted["weight_bytes"] == sum(row["weight_bytes"] for row in got["layout"])
    assert predicted["ttft_s"] > 0 and predicted["decode_tok_s"] > 0
    token = 2 * 16 * 4 * 2  # of one KV head: keys and values, head_dim, float32, layers
    assert all(row["kv_bytes"] == predicted["kv_tokens"] * row["kv_heads"] * token for row in got["layout"])


@pytest.mark.parametrize("words", [["-tp", "2"], ["--tensor-split", "3,1"], ["-pp", "2"]], ids=" ".join)
def test_run_carries_out_a_plan(
    model: str, tmp_path: Path, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    planned = json.loads(here(capfd, "plan", model, "--precision", "fp32", *words, "--json").out)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(planned))
    asked = ["--prompt", "hello", "--max-tokens", "12", "--temperature", "0", "--ignore-eos", "--json", "--verbose"]
    done = here(capfd, "run", "--plan", str(file), *asked, *ENGINE)
    layout = json.loads(done.out)["layout"]
    for name in ("rank", "layers", "q_heads", "kv_heads", "weight_bytes"):
        assert [row[name] for row in layout] == [row[name] for row in planned["best"]["ranks"]], name
    memory, speed = done.err.splitlines()[-2:]
    assert memory.startswith("memory: ") and memory.count(", ratio 1.00)") >= 2
    has_values(speed, "12 tokens", "tokens/s", "predicted", "ratio")
    words = ["run", "--plan", str(file), *asked, *ENGINE, "--tensor-split", "1,1,1"]
    refused_line(words, 1, "flag-contradicts-plan", "1,1,1")


def test_run_streams_and_raw_differs_from_the_template(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["run", model, "--prompt", "hello", "--max-tokens", "6", "--temperature", "0", "--ignore-eos", *ENGINE]

    def said(*extra: str) -> str:
        assert main.main([*words, *extra]) == 0
        return capfd.readouterr().out

    asked, raw = json.loads(said("--json")), json.loads(said("--json", "--raw"))
    assert said() == asked["text"] + "\n" and said("--raw") == raw["text"] + "\n"
    assert asked["usage"]["prompt_tokens"] > raw["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "/no/such/model", "--prompt", "x"], ["/no/such/model"]),
        (["run", "MODEL", "--prompt", "x", "-tp", "5"], ["5", "1 to 4"]),
        (["run", "MODEL", "--prompt", "x", "--pipeline-split", "1,2"], ["1,2", "the model's 2"]),
        (["run", "MODEL", "--prompt", "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["run", "MODEL", "--prompt", "x", "--top-p", "1.5"], ["top_p", "1.5"]),
        (["run", "MODEL", "--prompt", "x" * 600], ["512"]),
        (["run", "MODEL", "--prompt", "", "--raw", "--max-model-len", "9999"], ["9999", "512"]),
        (["run", "MODEL", "--prompt", "x", "--block-size", "0"], ["block_size", "0"]),
        (["run", "MODEL", "--prompt", "x", "--max-model-len", "512", "--kv-cache-memory-bytes", "70000"], ["512"]),
        (["run", "MODEL", "--prompt", "x", "--kv-cache-memory-bytes", "7"], ["gives 7;"]),
    ],
)
def test_mistakes_get_one_line(
    model: str, words: list[str], told: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    words = [model if word == "MODEL" else word for word in words]
    assert main.main([*words[:2], *ENGINE, *words[2:]]) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("weft: error: ") and "Traceback" not in captured.err
    for part in told:
        assert part in last


def test_a_server_that_cannot_start(model: str) -> None:
    done = weft("serve", model, *ENGINE, "--kv-cache-memory-bytes", "7", "--port", "0", status=1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("weft: error: ") and "--kv-cache-memory-bytes gives 7" in last
    assert "Traceback" not in done.stderr


def test_a_prompt_that_is_no_text(model: str) -> None:
    done = weft("run", model, *ENGINE, "--prompt", "a\udcff", status=1)
    assert done.stderr.startswith("weft: error: ") and done.stderr.count("\n") == 1


def test_chat(model: str) -> None:
    said = "hi\n/reset\nhi\n/exit\n"
    done = weft("chat", model, *ENGINE, "--temperature", "0", "--max-tokens", "5", "--ignore-eos", input=said)
    first, second = done.stdout.split("\n")[:2]
    assert first == second  # what was said before the reset is forgotten
    assert "forgotten" in done.stderr


def test_bench(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--num-iters", "1", "--num-iters-warmup", "0", "--output-len", "4"]
    assert main.main(["bench", "latency", model, *ENGINE, *small, "--input-len", "8"]) == 0
    got = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert got["output_tokens"] == 4 and got["ttft_s"] > 0 and got["decode_tok_s"] > 0
    words = ["bench", "throughput", model, *ENGINE, *small, "--num-prompts", "3", "--input-len-range", "2:9"]
    assert main.main(words) == 0
    got = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert got["output_tokens"] == 12 and got["output_tok_s"] > 0


def children(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | children(child)
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "phase", ["torch is imported", pytest.param("ranks are starting", marks=pytest.mark.long), "tokens are coming"]
)
def test_ctrl_c_leaves_nothing_behind(model: str, phase: str) -> None:
    words = ["run", model, "--prompt", "x", "--max-tokens", "auto", "--ignore-eos", *ENGINE, *TWO]
    with subprocess.Popen(
        [sys.executable, "-m", "weft", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=HERE
    ) as process:
        assert process.stdout is not None
        # The fork server, and then the two ranks.
        wait_for(lambda: len(children(process.pid)) == (1 if phase == "torch is imported" else 3))
        if phase == "tokens are coming":
            process.stdout.read(1)
        ranks = children(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == b""
    wait_for(lambda: all(map(gone, ranks)))
