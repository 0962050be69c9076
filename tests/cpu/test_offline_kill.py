"""`weft batch` as a process of its own that is killed, and goes on."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from tests.cpu import tiny
from tests.pure.commands import HERE

ROWS = 60
WAIT_S = 60
PROMPTS = ("hello", "a", "the sky", "what")


def test_a_killed_batch_goes_on(tmp_path: Path) -> None:
    """No row is lost or there twice, and those before the kill are not answered again."""
    model = str(tiny.write(tmp_path / "tiny"))
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"number": number, "prompt": PROMPTS[number % len(PROMPTS)]} for number in range(ROWS)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"batch {source} {out} --model {model} --load-format dummy --dtype float32 --kv-cache-memory-bytes 16M"
    command = [
        sys.executable,
        "-m",
        "weft",
        *words.split(),
        *["--max-num-seqs", "4", "--max-tokens", "100", "--ignore-eos"],
    ]
    command += ["--temperature", "0"]
    alone = {**HERE, "OMP_NUM_THREADS": "1"}  # two threads that wait for each other are slow beside other tests
    killed = subprocess.Popen(command, env=alone, stderr=subprocess.PIPE)
    with killed:
        log = Path(f"{out}.progress-wal")
        deadline = time.monotonic() + WAIT_S
        while not log.exists() or log.stat().st_size < 100_000:
            assert killed.poll() is None and time.monotonic() < deadline, killed.stderr and killed.stderr.read()
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    assert not out.exists()
    with sqlite3.connect(f"{out}.progress") as journal:
        before = dict(journal.execute("SELECT line, row FROM results"))
    journal.close()
    assert 0 < len(before) < ROWS
    done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}: {ROWS} of {ROWS} ") and done.stdout.count("\n") == 1
    assert "%" not in done.stderr, "no bar"
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["number"] for row in written] == list(range(ROWS))
    for line, kept in before.items():
        assert written[line - 1].items() >= json.loads(kept).items()
    # The same prompt has the same answer, before the kill and after it.
    assert len({(row["prompt"], row["generated_text"]) for row in written}) == len(PROMPTS)
    assert not list(tmp_path.glob("out.jsonl.*"))
