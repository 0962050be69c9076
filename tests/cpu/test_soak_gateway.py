"""scripts/soak_gateway: a short form of it with real servers of a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.programs.soak_gateway.requests import BROKEN, COMPLETE, WRONG, Asked, Load, Verdict
from tests.cpu import tiny

ROOT = Path(__file__).parents[2]
SERVED = "--load-format dummy --dtype float32 --max-model-len 512 --kv-cache-memory-bytes 16M --shutdown-timeout 2"


def soak(tmp_path: Path, *words: str) -> dict[str, object]:
    model = str(tiny.write(tmp_path / "tiny"))
    command = [sys.executable, "-m", "scripts.programs.soak_gateway", "--model", model, *words, "--", *SERVED.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-3000:]
    report: dict[str, object] = json.loads(done.stdout)
    assert done.returncode == bool(report["missed"])
    return report


@pytest.fixture
def one_core() -> Iterator[None]:
    """Processes that start have one core: of two replicas on cores of their own the one beside other work is slower,
    and rightly gets fewer requests."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.usefixtures("one_core")
def test_the_short_form(tmp_path: Path) -> None:
    words = "--requests 80 --undisturbed 40 --pause 0.05 --longest 1 --tokens 8 --budget 0.01"
    report = soak(tmp_path, *words.split())
    assert not report["missed"], report
    assert report["disturbances"] and report["requests"] == 120


@pytest.mark.long
def test_5000_requests(tmp_path: Path) -> None:
    report = soak(tmp_path, *["--budget", "0.1", "--pause", "1.5"])
    assert not report["missed"], report


def event(text: str) -> bytes:
    return b'data: {"choices": [{"delta": {"content": "%b"}}]}\n\n' % text.encode()


END, ERROR = b"data: [DONE]\n\n", b'data: {"error": {"message": "upstream x: it broke"}}\n\n'
VENDORS_ERROR = b'data: {"error": {"message": "upstream http://vendor: it broke"}}\n\n'


@pytest.mark.parametrize(
    ("received", "outcome"),
    [
        (event("one ") + event("two") + END, COMPLETE),
        (event("vendor: ") + event("3") + END, COMPLETE),
        (event("vendor: ") + event("4") + END, COMPLETE),
        (event("one ") + END, WRONG),
        (event("one ") + event("two"), WRONG),
        (event("one ") + event("two") + END + END, WRONG),
        (event("one ") + event("two") + END + ERROR, WRONG),
        (event("vendor: ") + ERROR, BROKEN),
        (event("one ") + ERROR, WRONG),
        (ERROR, WRONG),
        (VENDORS_ERROR, BROKEN),
        (event("one ") + VENDORS_ERROR, WRONG),
    ],
)
def test_verdicts(received: bytes, outcome: str) -> None:
    asked = Asked("p", 2, 0.0)
    load = Load("", {asked: {"weft": ["one two"], "vendor": ["vendor: 3", "vendor: 4"]}}, 0, ["http://vendor"])
    verdict: Verdict = load._judge_stream(asked, received)
    assert verdict.outcome == outcome and bool(verdict.why) == (outcome != COMPLETE)
