"""`.ci/run`, with stand-ins for the three scripts that it runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARTS = ("setup", "check", "test")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with `.ci/run`, whose scripts say their name and end well."""
    for folder in (".ci", "scripts"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    for name in PARTS:
        write_script(tmp_path, name, f"echo {name} runs")
    return tmp_path


def write_script(tree: Path, name: str, body: str) -> None:
    path = tree / "scripts" / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("failing", [None, *PARTS])
def test_it_fails_if_a_part_fails(tree: Path, failing: str | None) -> None:
    if failing:
        write_script(tree, failing, "exit 3")
    done = subprocess.run([tree / ".ci/run"], capture_output=True, text=True)
    assert (done.returncode != 0) == (failing is not None)
    for name in PARTS[:1] if failing == "setup" else PARTS:
        assert f"ci: scripts/{name} {'FAILED' if name == failing else 'passed'} in" in done.stdout
        assert (f"{name} runs" in done.stdout) == (name != failing)


@pytest.mark.parametrize("part", PARTS)
def test_what_it_started_ends_with_it(tree: Path, part: str) -> None:
    """Each script has a child of its own, as scripts/check has mypy."""
    reader, writer = os.pipe()
    for name in PARTS:
        write_script(tree, name, f"sleep 600 & echo {name} sleeps >&{writer}; wait" if name == part else "true")
    process = subprocess.Popen([tree / ".ci/run"], stdout=subprocess.DEVNULL, pass_fds=(writer,))
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.readline() == f"{part} sleeps\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
        assert pipe.read() == "", "the pipe is closed when the last of them has ended"
