"""The package `vllm` that a user may put on Python's path, and vLLM's names of modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import weft

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def python(*words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {
        **ENVIRONMENT,
        "PYTHONPATH": f"{path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}" if path else ENVIRONMENT["PYTHONPATH"],
    }
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def folder() -> str:
    """The folder for PYTHONPATH, as the page has it printed."""
    printed = python("-m", "weft.compat.vllm")
    assert printed.returncode == 0, printed.stderr
    return printed.stdout.strip()


def test_the_folder_has_the_package_alone(folder: str) -> None:
    found = {path.name for path in Path(folder).iterdir() if path.suffix != ".pyc" and path.name != "__pycache__"}
    assert found == {"__init__.py", "vllm"}


def test_programs_import_it(folder: str) -> None:
    lines = (
        "from vllm import LLM, SamplingParams, AsyncLLM, RequestOutput",
        "from vllm.sampling_params import SamplingParams as Same",
        "from vllm.entrypoints.llm import LLM as SameLLM",
        "from vllm.outputs import RequestOutput as SameOutput",
        "import vllm, weft",
        "assert SamplingParams is Same is weft.SamplingParams and LLM is SameLLM is weft.LLM",
        "assert RequestOutput is SameOutput",
        "assert tuple(map(int, vllm.__version__.split('.'))) >= (0, 2, 2)",  # the Qwen guide's wrapper asks
    )
    ran = python("-c", "; ".join(lines), path=folder)
    assert ran.returncode == 0, ran.stderr
    ran = python("-c", "from vllm import PoolingParams", path=folder)
    assert ran.returncode != 0 and "PoolingParams" in ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [("vllm", "serve"), ("vllm.entrypoints.openai.api_server",)], ids=" ".join)
def test_servers_start_by_its_names(folder: str, words: tuple[str, ...]) -> None:
    ran = python("-m", *words, "--model", "/no/such/model", "--port", "0", path=folder)
    assert ran.returncode == 1 and ran.stderr.startswith("weft: error: ") and "/no/such/model" in ran.stderr


def test_nothing_puts_it_on_the_path() -> None:
    ran = python("-c", "import weft, vllm")
    assert ran.returncode != 0 and "weft" not in ran.stderr.splitlines()[-1]


def test_only_the_name_changes_in_imports() -> None:
    from weft.sampling_params import SamplingParams

    assert SamplingParams is weft.SamplingParams
