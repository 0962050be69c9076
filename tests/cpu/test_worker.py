"""Worker: what a rank holds once it has its KV blocks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.cpu import tiny
from tests.cpu.attention import shaped
from weft.checkpoint.architectures.shape import Rope
from weft.checkpoint.checkpoint import resolve
from weft.config import EngineConfig
from weft.machine.hardware import host
from weft.plan import memory
from weft.plan.layout import build_plan
from weft.plan.memory import LOGITS_BYTES
from weft.plan.plan import Plan, Speculation
from weft.ranks.comm import Links
from weft.ranks.kernels import create_kernels
from weft.ranks.kernels.matrices import Matrices, Product
from weft.ranks.layers import rope
from weft.ranks.models.decoder import DecoderModel
from weft.ranks.worker import prompt_logprobs, rehearsal
from weft.ranks.worker.sampler import SampleBatch, Sampler
from weft.ranks.worker.worker import Worker


@contextmanager
def alone(plan: Plan) -> Iterator[Worker]:
    """A worker with nobody beside it, not loaded yet; this process keeps its threads."""
    threads = torch.get_num_threads()
    worker = Worker(plan, 0, Links())
    try:
        yield worker
    finally:
        worker.close()
        torch.set_num_threads(threads)


def tiny_plan(folder: Path, **flags: Any) -> Plan:
    path = str(tiny.write(folder / "tiny"))
    return build_plan(
        EngineConfig(model=path, load_format="dummy", **flags), resolve(path, load_format="dummy"), host.probe_host()
    )


def test_the_rotary_table_is_no_longer_than_a_text_can_be(tmp_path: Path) -> None:
    """A model of a million positions would take half a gigabyte per rank for a cache of some thousand tokens."""
    plan = tiny_plan(tmp_path)
    with alone(plan) as worker:
        worker.load()
        worker.allocate(3)
        assert worker.runner.model.layers[0].mixer.rope.angles.shape == (
            3 * plan.block_size,
            plan.shape.mixers[0].head_dim,
        )
        worker.allocate(1000)
        assert worker.runner.model.layers[0].mixer.rope.angles.shape == (
            plan.max_model_len,
            plan.shape.mixers[0].head_dim,
        )


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs torch with oneDNN")
def test_packed_weights_are_not_held_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a bf16 matrix is packed for its product: the original goes with its layer, not with the last one."""
    plan = tiny_plan(tmp_path, dtype="bfloat16")
    originals: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def spy(matrices: Matrices, weight: torch.Tensor, bias: torch.Tensor | None = None, name: str = "") -> Product:
        alive.append(sum(original() is not None for original in originals))
        originals.append(weakref.ref(weight))
        return product(matrices, weight, bias, name)

    kind = type(create_kernels("auto", torch.device("cpu"), shaped(torch.bfloat16)).matrices)
    product = kind.matrix
    monkeypatch.setattr(kind, "matrix", spy)
    with alone(plan) as worker:
        worker.load()
    # Four to a layer, the embedding table and the head.
    assert len(alive) == 4 * len(plan.shape.layers) + 2 and not any(alive)


def test_the_memory_of_the_kernels_is_given_back_too(tmp_path: Path) -> None:
    """FlashInfer's workspace is 200 MB."""
    plan = tiny_plan(tmp_path)
    with alone(plan) as worker:
        worker.load()
        kernels = weakref.ref(worker.runner.kernels)
    assert kernels() is None


def test_the_measured_step_samples_after_every_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a step in which everybody guesses are the largest that it has: without them a full batch that
    begins to guess would find no memory."""
    monkeypatch.setattr(memory, "SCORED_POSITIONS", 1)
    plan = tiny_plan(tmp_path, max_num_seqs=3)
    guessing = replace(plan, speculation=Speculation(tokens=4, lookup_min=2, lookup_max=4))
    prepared: list[list[int]] = []

    def spy(sampler: Sampler, picks: list[int], slots: list[int], *others: Any) -> SampleBatch:
        prepared.append(slots)
        return prepare_batch(sampler, picks, slots, *others)

    prepare_batch = Sampler.prepare_batch
    monkeypatch.setattr(Sampler, "prepare_batch", spy)
    found = []
    for each_plan in (plan, guessing):
        with alone(each_plan) as worker:
            found.append(worker.load().activation_bytes)
            worker.allocate(3)
    assert found[1] - found[0] == LOGITS_BYTES * 3 * 4 * plan.shape.vocab
    assert prepared == [[0], [0], [0] * 5, [0]]


def test_the_measured_step_holds_the_logits_of_a_scored_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few requests fewer rows are sampled than a prompt has tokens: the engine would find no memory for them."""
    plan = tiny_plan(tmp_path, max_num_seqs=1)
    held: list[int] = []
    logits = DecoderModel.logits

    def spy(model: DecoderModel, hidden: torch.Tensor) -> torch.Tensor | None:
        held.append(len(hidden))
        return logits(model, hidden)

    with alone(plan) as worker:
        reported = worker.load().activation_bytes
        worker.allocate(4)
        monkeypatch.setattr(DecoderModel, "logits", spy)
        monkeypatch.setattr(prompt_logprobs, "SCORED_POSITIONS", 5)
        worker._rehearse([13], rehearsal.SCORING)
    assert held == [5, 5, 2, 1]  # twelve of the prompt, and the one that is sampled
    assert reported > LOGITS_BYTES * min(memory.SCORED_POSITIONS, plan.max_num_batched_tokens) * plan.shape.vocab


def test_fewer_rows_of_the_table_are_the_same_rows() -> None:
    """Also where its base depends on the longest text, as in dynamic scaling."""
    yarn = Rope(kind="yarn", factor=4.0, original_max_positions=64)
    for kind in (Rope(), Rope(kind="dynamic", factor=4.0), yarn, Rope(rotated=0.75)):
        whole = rope.rope_table(kind, 16, 64, 256, 256)
        assert torch.equal(rope.rope_table(kind, 16, 64, 256, 40), whole[:40])
        assert whole.shape == (256, 16)


@pytest.mark.parametrize("length", [32, 33])
@pytest.mark.parametrize("told", [None, 1.25])
def test_longrope_has_divisors_for_short_and_for_long_texts(length: int, told: float | None) -> None:
    """By Transformers' formula, whose magnitude follows from the lengths if the config does not tell it."""
    factors = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 4.0, 16.0]}
    words = {**factors, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    if told is not None:
        words["attention_factor"] = told
    config = transformers.Phi3Config(
        hidden_size=48,
        num_attention_heads=6,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters={"rope_type": "longrope", **words},
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=length)
    ours = Rope(
        kind="longrope",
        original_max_positions=32,
        attention_factor=told,
        short_factors=tuple(factors["short_factor"]),
        long_factors=tuple(factors["long_factor"]),
        rotated=0.75,
    )
    table = rope.rope_table(ours, 8, 128, length, length)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    torch.testing.assert_close(table[:, :3], angles.cos() * magnitude)
    torch.testing.assert_close(table[:, 4:7], angles.sin() * magnitude)
    assert table[:, 3].eq(1).all() and table[:, 7].eq(0).all(), "the others are not rotated"
