"""Names that programs, images and log settings of users have: each stays where it is, wherever its code goes."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import weft
from tests.pure.commands import HERE

SOURCES = Path(weft.__file__).parent
NAMES = (
    "weft:LLM",
    "weft:AsyncLLM",
    "weft:SamplingParams",
    "weft:StructuredOutputsParams",
    "weft:RequestOutput",
    "weft:CompletionOutput",
    "weft:EmbeddingOutput",
    "weft:__version__",
    "weft.sampling_params:SamplingParams",
    "weft.sampling_params:StructuredOutputsParams",
    "weft.cli.main:main",
    "weft.ray.serve:build",
    "weft.native.prebuilt:main",
    "weft.worker.process:main",
    "weft.entrypoints.openai.api_server:main",
    "weft.compat.vllm:LLM",
    "weft.errors:WeftError",
)
PROGRAMS = ("weft.worker.process", "weft.native.prebuilt", "weft.entrypoints.openai.api_server", "weft")
LOGGERS = {
    "weft",
    "weft.cli",
    "weft.cluster",
    "weft.gateway",
    "weft.hosting",
    "weft.monitor",
    "weft.serving",
    "weft.text.folder",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_importable(name: str) -> None:
    module, _, attribute = name.partition(":")
    assert getattr(import_module(module), attribute) is not None


@pytest.mark.parametrize("module", PROGRAMS)
def test_a_program_is_found_by_its_name(module: str) -> None:
    """`python -m MODULE` finds it: the module is there, and what it calls can be imported."""
    code = f"import runpy; runpy.run_module({module!r}, run_name='looked at')"
    subprocess.run([sys.executable, "-P", "-c", code], env=HERE, check=True, timeout=60)


def test_loggers_keep_their_names() -> None:
    found = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger") and node.args:
                assert isinstance(node.args[0], ast.Constant), f"{path}: a logger is named by a literal"
                found.add(str(node.args[0].value))
    assert {name for name in found if name.startswith("weft")} == LOGGERS
