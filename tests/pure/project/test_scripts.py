"""Commands of `scripts/`: each starts the program of its name, and `scripts/bench` lists and starts the benchmarks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "scripts/programs"
BENCHMARKS = sorted(path.parent.name for path in PROGRAMS.glob("bench/*/__main__.py"))
COMMANDS = sorted(path.name for path in PROGRAMS.iterdir() if (path / "__main__.py").exists())


def copy_scripts(tree: Path) -> Path:
    """Make a checkout of the scripts alone, without an environment."""
    shutil.copytree(ROOT / "scripts", tree / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def run_script(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tree / "scripts" / words[0], *words[1:]], capture_output=True, text=True)


def test_the_list_of_benchmarks_needs_no_environment(tmp_path: Path) -> None:
    tree = copy_scripts(tmp_path)
    done = run_script(tree, "bench", "--help")
    assert done.returncode == 0, done.stderr
    listed = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [name.replace("-", "_") for name, _ in listed] == BENCHMARKS
    assert {path.name for path in tree.iterdir()} == {"scripts"}, "nothing was installed"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with a Python in its environment that prints what it is to run."""
    tree = copy_scripts(tmp_path_factory.mktemp("installed"))
    (tree / "scripts/environment").write_text((tree / "scripts/environment").read_text() + "\nenvironment() { :; }\n")
    python = tree / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    return tree


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "gpu_check"])  # which needs no .venv
def test_a_command_starts_the_program_of_its_name(installed: Path, command: str) -> None:
    done = run_script(installed, command, "--flag", "two words")
    assert done.stdout == f"-m scripts.programs.{command} --flag two words\n", done.stderr


@pytest.mark.parametrize(
    ("words", "program"),
    [
        *((("bench", name), f"bench.{name}") for name in BENCHMARKS),
        (("bench", "front-ends"), "bench.front_ends"),
        *(((name,), f"bench.{name}") for name in ("loading", "peers", "planner_accuracy", "latent_context")),
        (("connection_cost",), "bench.connection_cost"),
        (("conformance", "files"), "conformance.files"),
        (("conformance", "agents"), "conformance.agents"),
        (("soak", "faults"), "soak.faults"),
    ],
    ids=" ".join,
)
def test_a_part_of_a_command_is_a_program_too(installed: Path, words: tuple[str, ...], program: str) -> None:
    assert run_script(installed, *words, "--rounds", "2").stdout == f"-m scripts.programs.{program} --rounds 2\n"


def test_a_name_that_is_no_benchmark_is_refused() -> None:
    command = [sys.executable, "-m", "scripts.programs.bench", "speed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "scripts/bench: error: 'speed' is no benchmark; scripts/bench --help lists them\n"
