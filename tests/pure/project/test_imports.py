"""The packages above the ranks run without torch: not by accident, not through a library."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
FREE = next(c["source_modules"] for c in CONTRACTS if c["name"] == "Torch stays with the ranks")

IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "accelerate"):
            raise ModuleNotFoundError(f"{name} is made unimportable", name=name)
sys.meta_path.insert(0, Absent())
"""
# A library that imports torch where it finds it passes without torch, and still drags it in.
UNTOUCHED = """
loaded = {"torch", "transformers", "accelerate"} & sys.modules.keys()
assert not loaded, f"imported on the way: {loaded}"
"""


def torch_free_modules() -> list[str]:
    """Every module of the torch-free packages, by its dotted name."""
    modules = []
    for path in sorted((ROOT / "src/weft").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        on_gpu = name.startswith("weft.ranks.probes.")  # processes of their own, which the contract leaves out too
        if not on_gpu and any(name == package or name.startswith(package + ".") for package in FREE):
            modules.append(name)
    return modules


def run(script: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", script, *torch_free_modules()],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr


def test_with_torch_made_unimportable() -> None:
    run(ABSENT + IMPORT)


def test_without_touching_the_torch_that_is_there() -> None:
    run(IMPORT + UNTOUCHED)
