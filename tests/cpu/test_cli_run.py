"""weft run, chat, bench and serve as a user starts them: processes with words, status and output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cpu import tiny
from weft.cli import main

HERE = {**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2])}
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


@pytest.mark.parametrize("layout", [[], TWO, [*TWO, "--distributed-executor-backend", "uni"]], ids=" ".join)
def test_run_json(model: str, layout: list[str]) -> None:
    words = ["run", model, "--prompt", "hello", "--json", "--max-tokens", "6", "--temperature", "0", "--ignore-eos"]
    done = weft(*words, *ENGINE, *layout)
    (line,) = done.stdout.splitlines()
    got = json.loads(line)
    assert set(got) == {"text", "token_ids", "finish_reason", "usage", "timing", "layout"}
    assert len(got["token_ids"]) == got["usage"]["completion_tokens"] == 6
    assert got["finish_reason"] == "length"
    assert got["usage"]["total_tokens"] == got["usage"]["prompt_tokens"] + 6
    assert set(got["timing"]) == {"load_s", "ttft_s", "decode_tok_s"} and got["timing"]["ttft_s"] > 0
    ranks = 2 if layout else 1
    assert [row["rank"] for row in got["layout"]] == list(range(ranks))
    assert sum(row["q_heads"] for row in got["layout"]) == 4
    assert sum(row["kv_heads"] for row in got["layout"]) == 2
    assert all(0 < row["kv_bytes"] <= 2**20 and row["weight_bytes"] > 0 for row in got["layout"])


def test_run_streams_and_raw_differs_from_the_template(model: str) -> None:
    words = ["run", model, "--prompt", "hello", "--max-tokens", "6", "--temperature", "0", "--ignore-eos", *ENGINE]
    asked = weft(*words)
    raw = weft(*words, "--raw")
    assert asked.stdout.endswith("\n") and raw.stdout.endswith("\n")
    told = [json.loads(weft(*words, "--json", *extra).stdout) for extra in ([], ["--raw"])]
    assert [asked.stdout, raw.stdout] == [answer["text"] + "\n" for answer in told]
    assert told[0]["usage"]["prompt_tokens"] > told[1]["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "/no/such/model", "--prompt", "x"], ["/no/such/model"]),
        (["run", "MODEL", "--prompt", "x", "-tp", "5"], ["5", "1 to 4"]),
        (["run", "MODEL", "--prompt", "x", "--pipeline-split", "1,2"], ["1,2", "2 layers"]),
        (["run", "MODEL", "--prompt", "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["run", "MODEL", "--prompt", "x", "--top-p", "1.5"], ["top_p", "1.5"]),
        (["run", "MODEL", "--prompt", "x" * 600], ["512"]),
        (["run", "MODEL", "--prompt", "", "--raw", "--max-model-len", "9999"], ["9999", "512"]),
        (["run", "MODEL", "--prompt", "x", "--block-size", "0"], ["block_size", "0"]),
        (["run", "MODEL", "--prompt", "x", "--max-model-len", "512", "--kv-cache-memory-bytes", "70000"], ["512"]),
        (["run", "MODEL", "--prompt", "x", "--kv-cache-memory-bytes", "7"], ["7 bytes"]),
        (["serve", "MODEL", "--kv-cache-memory-bytes", "7", "--port", "0"], ["7 bytes"]),
    ],
)
def test_mistakes_get_one_line(model: str, words: list[str], told: list[str]) -> None:
    words = [model if word == "MODEL" else word for word in words]
    kept = [flag for flag in ENGINE if flag not in ("--kv-cache-memory-bytes", "1M") or flag not in words]
    done = weft(*words[:2], *kept, *words[2:], status=1)
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("weft: error: "), done.stderr
    assert "Traceback" not in done.stderr
    for part in told:
        assert part in last


def test_a_prompt_that_is_no_text(model: str) -> None:
    done = weft("run", model, *ENGINE, "--prompt", "a\udcff", status=1)
    assert done.stderr.startswith("weft: error: ") and done.stderr.count("\n") == 1


def test_chat(model: str) -> None:
    said = "hi\n/reset\nhi\n/exit\n"
    done = weft("chat", model, *ENGINE, "--temperature", "0", "--max-tokens", "5", "--ignore-eos", input=said)
    first, second = done.stdout.split("\n")[:2]
    assert first == second  # what was said before the reset is forgotten
    assert "forgotten" in done.stderr


def test_bench(model: str) -> None:
    small = ["--num-iters", "1", "--num-iters-warmup", "0", "--output-len", "4"]
    done = weft("bench", "latency", model, *ENGINE, *small, "--input-len", "8")
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["output_tokens"] == 4 and got["ttft_s"] > 0 and got["decode_tok_s"] > 0
    done = weft("bench", "throughput", model, *ENGINE, *small, "--num-prompts", "3", "--input-len-range", "2:9")
    got = json.loads(done.stdout.splitlines()[-1])
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


@pytest.mark.parametrize("after_s", [0.3, 1.5, 4.0])
def test_ctrl_c_leaves_nothing_behind(model: str, after_s: float) -> None:
    words = ["run", model, "--prompt", "x", "--max-tokens", "auto", "--ignore-eos", *ENGINE, "--max-model-len", "256"]
    words += ["--tensor-parallel-size", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "weft", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=HERE
    ) as process:
        time.sleep(after_s)
        started = children(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert process.returncode in (0, 130), err.decode()
        if process.returncode == 130:
            assert b"Traceback" not in err
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not all(map(gone, started)):
        time.sleep(0.05)
    assert [pid for pid in started if not gone(pid)] == []
