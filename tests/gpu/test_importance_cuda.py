"""Importance of columns by their activations, found on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cpu import checkpoints
from tests.cpu.importances import INT4, WIDE, importance_by_rank
from tests.cpu.layouts import plan_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")


def test_a_card_finds_what_a_cpu_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkpoints.RECIPES, "wide", WIDE)
    path = checkpoints.make("wide", tmp_path)
    here, there = (
        importance_by_rank(plan_for(path, "whole", **INT4, device=device), monkeypatch)[0] for device in ("cuda", "cpu")
    )
    assert here.keys() == there.keys()
    for name, found in here.items():
        torch.testing.assert_close(found.cpu(), there[name], rtol=1e-2, atol=1e-2)
