"""The imports of the GPU tests: a machine lent for an hour has torch, Triton, Transformers and little else."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
OWN = {"tests": ROOT, "weft": ROOT / "src"}
# What `scripts/gpu_check` asks for, and what Transformers brings.
GIVEN = {"torch", "triton", "transformers", "safetensors", "pytest", "_pytest", "numpy", "msgspec", "httptools"}
GIVEN |= {"jinja2", "tokenizers", "yaml", "pynvml", "huggingface_hub"}


def test_gpu_tests_import_only_what_such_a_machine_has() -> None:
    """One module that is missing ends the collection of all tests that were asked for with it."""
    left = sorted((ROOT / "tests/gpu").glob("test_*.py"))
    assert len(left) > 8
    seen, strange = set(left), set[str]()
    while left:
        path = left.pop()
        for name in imported_modules(path):
            top = name.partition(".")[0]
            if top in OWN:
                new = {*module_files(name)} - seen
                seen |= new
                left += new
            elif top not in GIVEN and top not in sys.stdlib_module_names:
                strange.add(f"{path.relative_to(ROOT)} imports {name}")
    assert strange == set()


def imported_modules(path: Path) -> Iterator[str]:
    """Names of what a file imports when it is imported itself, and of what may be a module within."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_files(name: str) -> Iterator[Path]:
    """The files of one of our modules and of the packages that it lies in."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = OWN[parts[0]].joinpath(*parts[:count])
        yield from (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists())
