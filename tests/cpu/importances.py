"""The importance of columns that an engine finds when it starts: for tests on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cpu.checkpoints import Recipe
from weft.engine.executors.inline import InlineExecutor
from weft.plan.plan import Plan
from weft.ranks.worker import importance, runner

WIDE = Recipe("Llama", {"hidden_size": 192, "intermediate_size": 320, "head_dim": 32, "mlp_bias": True})
INT4 = {"quantization": "int4", "dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 1 << 24}


def importance_by_rank(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, torch.Tensor]]:
    """Importance [cols] of every rounded parameter, by rank and by the parameter's name, of an engine that starts."""
    by_rank = dict[int, dict[str, torch.Tensor]]()

    def spy(plan: Plan, rank: int, *rest: Any) -> dict[str, torch.Tensor]:
        by_rank[rank] = importance.measure_importance(plan, rank, *rest)
        return by_rank[rank]

    monkeypatch.setattr(runner, "measure_importance", spy)
    executor = InlineExecutor()
    try:
        executor.start(plan)
    finally:
        executor.close()
    return by_rank
