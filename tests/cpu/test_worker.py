"""Worker: what a rank holds once it has its KV blocks."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.cpu import tiny
from weft.comm import Links, Solo
from weft.config import EngineConfig
from weft.facts import host
from weft.facts.checkpoint import resolve
from weft.facts.shape import Rope
from weft.layers import rope
from weft.planner.layout import layout
from weft.worker.worker import Worker


def test_the_rotary_table_is_no_longer_than_a_text_can_be(tmp_path: Path) -> None:
    """A model of a million positions would take half a gigabyte per rank for a cache of some thousand tokens."""
    path = str(tiny.write(tmp_path / "tiny"))
    plan = layout(EngineConfig(model=path, load_format="dummy"), resolve(path, load_format="dummy"), host.probe())
    threads = torch.get_num_threads()
    worker = Worker(plan, 0, Links(Solo(), Solo()))
    try:
        worker.load()
        worker.allocate(3)
        assert worker.rope.shape == (3 * plan.block_size, plan.shape.head_dim)
        worker.allocate(1000)
        assert worker.rope.shape == (plan.max_model_len, plan.shape.head_dim)
    finally:
        worker.close()
        torch.set_num_threads(threads)


def test_fewer_rows_of_the_table_are_the_same_rows() -> None:
    """Also where its base depends on the longest text, as in dynamic scaling."""
    for kind in (Rope(), Rope(kind="dynamic", factor=4.0), Rope(kind="yarn", factor=4.0, original_max_positions=64)):
        whole = rope.table(kind, 16, 64, 256, 256)
        assert torch.equal(rope.table(kind, 16, 64, 256, 40), whole[:40])
        assert whole.shape == (256, 16)
