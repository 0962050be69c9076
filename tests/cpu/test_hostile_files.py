"""The fuzzer of model files: damaged and hostile ones end in success or in one clear line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "words",
    [["--cases", "450", "--seconds", "60"], pytest.param(["--long", "--seed", "1"], marks=pytest.mark.long)],
    ids=["short", "long"],
)
def test_no_model_file_does_harm(words: list[str]) -> None:
    # A process of its own: it forks for each model, which none with threads may do.
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.programs.conformance.files", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    outcomes = json.loads(ran.stdout)["outcomes"]
    # As they are, all models are read. How many more there is time for depends on the machine.
    assert outcomes["read"] >= 18
    assert outcomes["refused"] > 0
