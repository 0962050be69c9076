"""Measurements of real GPUs and of the links between them, and the facts from their driver."""

from __future__ import annotations

import pytest
import torch

from weft.machine.hardware.host import probe_host
from weft.probes.machine import host_cluster
from weft.probes.stored_speeds import Speeds, is_plausible
from weft.study.measure import links

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")


def test_the_driver_and_torch_tell_of_the_same_gpus() -> None:
    here = probe_host()
    assert here.driver and len(here.gpus) == torch.cuda.device_count()
    assert len(here.pairs) == len(here.gpus) * (len(here.gpus) - 1) // 2
    for gpu in here.gpus:
        seen = torch.cuda.get_device_properties(gpu.index)
        assert (seen.major, seen.minor) == gpu.capability
        assert seen.name == gpu.name or gpu.slice
        # CUDA keeps some of the board's memory to itself.
        assert 0.9 * gpu.total_bytes <= seen.total_memory <= gpu.total_bytes
        assert str(seen.uuid) in gpu.uuid or gpu.slice
        if gpu.clocks and not gpu.slice:
            assert gpu.pcie and gpu.pcie.Bps > 1e9


def test_every_gpu_and_pair_is_measured() -> None:
    here = probe_host()
    gpus, pairs = links.measure_links(here)
    found = Speeds(machine="", gpus=gpus, pairs=pairs)
    assert [speed.gpu for speed in gpus] == [gpu.uuid for gpu in here.gpus]
    assert is_plausible(found) and all(speed.copy_Bps > speed.from_host_Bps for speed in gpus)
    assert {pair.verdict for pair in pairs} <= {"works"}, pairs
    (node,) = host_cluster(here, found).nodes
    for spec, speed in zip(node.gpus, gpus, strict=True):
        # None copies faster than its data sheet says.
        assert spec.bandwidth_Bps >= speed.copy_Bps


def test_peer_to_peer_is_what_torch_says() -> None:
    here = probe_host()
    for pair in here.pairs:
        if pair.peer is not None:
            assert torch.cuda.can_device_access_peer(pair.first, pair.second) == pair.peer
