"""The layouts that every architecture is tested in, and the logits of one, straight from the workers."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.checkpoint import resolve
from weft.config import EngineConfig
from weft.engine.core.params import SamplingParams
from weft.engine.core.step import Admission, StepPlan
from weft.engine.core.token_ids import TokenIds
from weft.engine.executors.inline import InlineExecutor
from weft.machine.hardware import host
from weft.plan.layout import build_plan
from weft.plan.plan import Plan
from weft.ranks.worker.sample_arrays import SampleArrays
from weft.ranks.worker.sampler import SampleBatch
from weft.ranks.worker.worker import Result, Worker

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
    run_prompt(plan, [prompt], f"{__name__}:LogitsWorker")
    return LogitsWorker.logits


def run_prompt(plan: Plan, chunks: list[list[int]], worker: str) -> None:
    """Prefill a prompt with workers of the class "module:Class", a step for each chunk."""
    prompt = list(chain(*chunks))
    blocks, groups = -(-len(prompt) // plan.block_size), len(plan.kv_layout.groups)
    tables = [list(range(group * blocks, (group + 1) * blocks)) for group in range(groups)]
    executor = InlineExecutor(worker=worker)
    try:
        executor.start(plan)
        start = 0
        for id, chunk in enumerate(chunks):
            step = StepPlan(
                id=id,
                released=[],
                admitted=[] if id else [Admission(0, 0, SamplingParams(), TokenIds.pack(prompt), [])],
                slots=[0],
                starts=[start],
                counts=[len(chunk)],
                tokens=chunk,
                blocks=[[[] if id else table] for table in tables],
                samples=[False],
                draft_counts=[0],
            )
            executor.submit(step).result(timeout=60)
            start += len(chunk)
    finally:
        executor.close()
