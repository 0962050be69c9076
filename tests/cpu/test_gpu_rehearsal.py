"""Every part of scripts/gpu_check from end to end, on a stand-in for a card, with the packages of a lent machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.programs.gpu_check.parts import PARTS
from scripts.programs.gpu_check.results import load_results
from scripts.programs.gpu_check.wheels import NEEDED

pytest.importorskip("triton", reason="needs triton")

ROOT = Path(__file__).parents[2]
GIVEN = ("torch", "triton", "transformers", "safetensors", "pytest")  # of a machine that is lent for an hour
PYTHON = '#!/bin/sh\nexec {interpreter} -S "$@"\n'


def link_packages(folder: Path) -> None:
    """Links to GIVEN, to what those require, and to what `scripts/gpu_check wheels` brings; no other package."""
    folder.mkdir()
    left, seen = [*GIVEN, *NEEDED], set[str]()
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            package = distribution(name)
        except PackageNotFoundError:  # for another Python
            continue
        if name not in NEEDED:  # whose own needs are in the list
            wanted = map(Requirement, package.requires or [])
            left += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
        tops = {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}
        for top in tops:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(package.locate_file(top))))


SELECTED = """
from scripts.programs.gpu_check.parts import PARTS
from scripts.programs.gpu_check.results import load_results
from scripts.programs.gpu_check.rehearsal import Collection, run_pytest
from scripts.programs.gpu_check.tasks import GpuTests

collection = Collection()
run_pytest(["tests/gpu", "--collect-only", "-q"], [collection])
left = {item.nodeid for item in collection.session.items}
assert len(left) > 1000
for task in (task for part in PARTS.values() for task in part.tasks if isinstance(task, GpuTests)):
    left -= {item.nodeid for item in collection.selected(task.files, task.selection)}
print("left:", *sorted(left))
"""


def test_every_gpu_test_is_selected_by_a_part() -> None:
    """A selection by a word of a test's name selects nothing once the test has another name."""
    done = subprocess.run([sys.executable, "-c", SELECTED], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["left:"], done.stdout[-2000:] + done.stderr[-2000:]


def test_experts_are_measured_over_weights_that_no_cache_holds() -> None:
    """A token reads its experts alone: other layers, not the same one again, fill what a cache has room for."""
    from scripts.programs.gpu_check.work.experts import COLD_BYTES, SPECS, further_layers

    for spec, hidden in SPECS.values():
        for tokens in (1, 16, 256):
            nbytes = spec.count * 3 * spec.width * hidden * 5 // 8
            chosen = min(tokens * spec.top_k, spec.count)
            assert (1 + further_layers(nbytes, spec, tokens)) * nbytes * chosen / spec.count >= COLD_BYTES


@pytest.mark.skipif(not hasattr(os, "fork") or not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    "parts", [["quarter"], pytest.param(list(PARTS), marks=pytest.mark.long)], ids=["quarter", "all"]
)
def test_parts_are_rehearsed(tmp_path: Path, parts: list[str]) -> None:
    """With only such packages as a lent machine has: an import of another one fails."""
    repository, programs, results = (tmp_path / name for name in ("repository", "bin", "results"))
    for folder in (repository, programs, tmp_path / "vllm/vllm"):
        folder.mkdir(parents=True)
    (tmp_path / "vllm/vllm/__init__.py").touch()
    for name in ("src", "scripts", "tests", "docs", "pyproject.toml"):  # without its .venv
        (repository / name).symlink_to(ROOT / name)
    base = getattr(sys, "_base_executable", sys.executable)
    (programs / "python3").write_text(PYTHON.format(interpreter=base))
    (programs / "python3").chmod(0o755)
    link_packages(tmp_path / "packages")
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path / "packages"),
        "RESULTS": str(results),
        "HOME": str(tmp_path),
    }
    command = [repository / "scripts/gpu_check", *parts, "--rehearse", "--vllm", tmp_path / "vllm"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in parts:
        kept = load_results(results / f"{name}.jsonl")
        assert kept is not None and kept.about["rehearsed"]
        assert kept.rows and kept.done == [task.name for task in PARTS[name].tasks]
    told = subprocess.run([command[0], "report"], env=environment, capture_output=True, text=True)
    assert told.returncode == 2 and told.stderr.count("was rehearsed") == len(parts), "no figure of a rehearsal"
