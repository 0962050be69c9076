"""The threads of the compiled CPU kernels: their team, and that it makes no difference how many it has."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cpu.test_kernels import native
from weft.compiled import SOURCES


def test_a_late_thread_is_not_waited_for_and_nothing_is_done_twice(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "team"
    source = Path(__file__).with_name("team.cpp")
    command = [compiler, "-std=c++17", "-O1", "-pthread", "-Wall", "-I", SOURCES, source, "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_any_number_of_threads_gives_the_same_bits(tokens: int) -> None:
    kernels = native(torch.bfloat16)
    torch.manual_seed(tokens)
    weight, x = torch.randn(1000, 576).bfloat16(), torch.randn(tokens, 576).bfloat16()
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        product = kernels.matrix(weight)(x)
        results.append((product, kernels.silu_mul(product), kernels.norm(x, weight[0], 1e-5)))
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))
