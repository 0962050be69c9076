"""The layouts that every architecture is tested in, and the logits of one, straight from the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from weft.config import EngineConfig
from weft.core.params import SamplingParams
from weft.core.step import Admission, StepPlan
from weft.core.token_ids import TokenIds
from weft.executors.inline import InlineExecutor
from weft.formats.checkpoint import resolve
from weft.hardware import host
from weft.plan.layout import build_plan
from weft.plan.plan import Plan
from weft.worker.sample_arrays import SampleArrays
from weft.worker.sampler import SampleBatch
from weft.worker.worker import Result, Worker

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp3": {"tensor_parallel_size": 3},
    "tp 2:1": {"tensor_split": (2, 1)},
    "pp2": {"pipeline_parallel_size": 2},
    "pp 1,3,1": {"pipeline_split": (1, 3, 1)},
    "tp2 x pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


def plan_for(path: Path, name: str, **config: Any) -> Plan:
    config = {"model": str(path), **LAYOUTS[name], **config}
    return build_plan(EngineConfig(**config), resolve(str(path)), host.probe_host())


class LogitsWorker(Worker):
    """Keeps the logits of every position of the last step."""

    logits: torch.Tensor

    def _finish(
        self,
        step: StepPlan,
        hidden: torch.Tensor,
        samples: SampleBatch | None,
        tensors: SampleArrays[torch.Tensor] | None,
    ) -> Result:
        logits = self.runner.logits(hidden)
        if logits is not None:
            LogitsWorker.logits = logits.float()
        return super()._finish(step, hidden, samples, tensors)


def logits_of(plan: Plan, prompt: list[int]) -> torch.Tensor:
    """[len(prompt), vocab] float32, from one prefill."""
    executor = InlineExecutor(worker=f"{__name__}:LogitsWorker")
    try:
        executor.start(plan)
        blocks = -(-len(prompt) // plan.block_size)
        step = StepPlan(
            id=0,
            released=[],
            admitted=[Admission(0, 0, SamplingParams(), TokenIds.pack(prompt), [])],
            slots=[0],
            starts=[0],
            counts=[len(prompt)],
            tokens=prompt,
            blocks=[list(range(blocks))],
            samples=[False],
            draft_counts=[0],
        )
        executor.submit(step).result(timeout=60)
        return LogitsWorker.logits
    finally:
        executor.close()
