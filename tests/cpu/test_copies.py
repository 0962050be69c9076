"""The judgement of copies between GPUs, without a GPU; and the answer of a machine without one."""

from __future__ import annotations

import pytest
import torch

from tests.refusals import refuses
from weft.errors import ConfigError
from weft.machine.hardware.host import Host
from weft.machine.hardware.topology import Gpu
from weft.ranks.probes.copies import COPIES, wrong_bytes
from weft.study.measure import links

CPU = torch.device("cpu")
SENT = torch.randint(0, 256, (1000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("copy", COPIES)
def test_a_good_copy_differs_in_nothing(copy: str) -> None:
    assert wrong_bytes(SENT, CPU, COPIES[copy]) == 0


@pytest.mark.parametrize("copy", COPIES)
def test_each_byte_that_arrives_wrong_is_counted(copy: str) -> None:
    def spoilt(sent: torch.Tensor, target: torch.device) -> torch.Tensor:
        arrived = COPIES[copy](sent, target)
        arrived[10:17] += 1
        return arrived

    assert wrong_bytes(SENT, CPU, spoilt) == 7


def test_a_copy_that_never_happened_is_seen() -> None:
    """A link may drop all bytes, so that the destination keeps its old content."""
    wrong = wrong_bytes(SENT, CPU, lambda sent, target: torch.zeros_like(sent))
    assert wrong == int((SENT != 0).sum()) > 900


def test_a_strided_copy_that_writes_beside_its_place_is_seen() -> None:
    def stray(sent: torch.Tensor, target: torch.device) -> torch.Tensor:
        wide = torch.zeros(2 * sent.numel(), dtype=sent.dtype)
        wide[: sent.numel()] = sent  # as one run after all
        return wide[::2] + wide[1::2]

    assert wrong_bytes(SENT, CPU, stray) > 900


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA GPUs")
def test_a_driver_s_gpu_that_torch_does_not_see_is_told() -> None:
    card = Gpu(index=0, name="card", uuid="GPU-0", total_bytes=1, free_bytes=1, capability=(8, 0))
    here = Host(hostname="here", cores=(0,), memory_total_bytes=1, memory_free_bytes=1, gpus=(card,))
    with refuses(ConfigError, "cannot-measure-gpus", "here", "0 GPUs", "1"):
        links.measure_links(here)
