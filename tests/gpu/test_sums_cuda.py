"""Sums between GPUs that read each other's memory, and what each way of them takes (with -s)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


@pytest.mark.parametrize("scenario", [0, 1, 2, 3, 4], ids=["bits", "graphs", "speed", "operations", "exchange"])
def test_sums(scenario: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__).parent
    monkeypatch.syspath_prepend(str(here.parent / "cpu"))
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parent / 'cpu'}")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    from fake_worker import make_plan, make_step

    from weft.engine.executors.processes import ProcessExecutor
    from weft.plan.plan import named_devices

    size = min(4, torch.cuda.device_count())  # the fake model has as many heads
    devices = named_devices(*(f"cuda:{index}" for index in range(size)))
    plan = msgspec.structs.replace(make_plan(tensor=size), dtype="bfloat16", devices=devices)
    executor = ProcessExecutor(worker="sums_worker:SumsWorker")
    try:
        executor.start(plan)
        executor.submit(make_step(0, [scenario])).result(300)
    finally:
        executor.close()
