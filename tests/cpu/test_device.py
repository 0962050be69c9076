"""A rank's device is the plan's GPU."""

from __future__ import annotations

import os
import re

import pytest
from fake_worker import HERE, make_plan

from tests.refusals import refuses
from weft.engine.executors.inline import InlineExecutor
from weft.errors import ConfigError
from weft.ranks.worker.device import check_gpu_number

PLAIN = ["8f1c5d6e-0011", "00112233-4455"]


def test_the_number_is_that_of_the_same_gpu() -> None:
    check_gpu_number(1, "GPU-00112233-4455", PLAIN)
    # A driver that has other names for them says nothing of their order.
    check_gpu_number(1, "GPU-virtual", PLAIN)
    with refuses(ConfigError, "wrong-device-order") as refused:
        check_gpu_number(0, "GPU-00112233-4455", PLAIN)
    assert re.search(r"\bGPU 0 .*\bcuda:1 .*\bCUDA_DEVICE_ORDER=PCI_BUS_ID\b", str(refused.value))


def test_threads_count_along_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch looks at the GPUs of this process."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    executor = InlineExecutor(worker=HERE)
    executor.start(make_plan())
    executor.close()
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
