"""Swaps of weights that do not come about: all ranks keep those that they have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu import checkpoints
from tests.cpu.test_commands import ENGINE, PROMPTS, answers, with_other_weights
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.errors import ModelError, RequestError
from weft.machine.hardware import host
from weft.plan.plan import Plan
from weft.ranks.worker import swap

INDEX = "model.safetensors.index.json"
LAST_NORM = "model.norm.weight"  # which the last stage alone reads
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {"executor": "inline"},
    "tp2": {"executor": "inline", "tensor_parallel_size": 2},
    "tp2, int4": {"executor": "inline", "tensor_parallel_size": 2, "quantization": "int4"},
    "pp2, processes": {"executor": "processes", "pipeline_parallel_size": 2},
    "pp2, processes, int4": {"executor": "processes", "pipeline_parallel_size": 2, "quantization": "int4"},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("qwen3-biased", tmp_path_factory.mktemp("swaps"))


@pytest.fixture
def other(path: Path, tmp_path: Path) -> Path:
    """The same model with other weights, in two files."""
    whole, target = with_other_weights(path, tmp_path / "whole"), tmp_path / "other"
    shutil.copytree(whole, target, ignore=shutil.ignore_patterns("*.safetensors"))
    (file,) = whole.glob("*.safetensors")
    tensors = load_file(file)
    second = {name for name in tensors if ".layers." not in name or ".layers.1." in name}
    write_shards(target, tensors, second)
    return target


def write_shards(target: Path, tensors: dict[str, torch.Tensor], second: set[str]) -> None:
    """Write tensors in two files, those named `second` in the second one, with an index of both."""
    files = {name: f"model-0000{1 + (name in second)}-of-00002.safetensors" for name in tensors}
    for file in {*files.values()}:
        save_file({name: tensors[name] for name in tensors if files[name] == file}, target / file)
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def second_shard(folder: Path) -> Path:
    return folder / "model-00002-of-00002.safetensors"


def cut_off(folder: Path) -> None:
    octets = second_shard(folder).read_bytes()
    second_shard(folder).write_bytes(octets[: len(octets) // 2])


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(second_shard(folder))
    del tensors[LAST_NORM]
    save_file(tensors, second_shard(folder))
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][LAST_NORM]
    (folder / INDEX).write_text(json.dumps(index))


def with_a_norm_that_is_no_number(folder: Path) -> None:
    tensors = load_file(second_shard(folder))
    tensors[LAST_NORM][3] = torch.nan
    save_file(tensors, second_shard(folder))


@pytest.mark.parametrize("damage", [cut_off, without_a_tensor])
def test_files_that_are_not_whole_never_reach_the_ranks(
    path: Path, other: Path, damage: Callable[[Path], None]
) -> None:
    damage(other)
    with LLM(str(path), **ENGINE, **LAYOUTS["tp2"]) as llm:
        want = answers(llm)
        with pytest.raises(ModelError):
            llm.swap_weights(other)
        assert answers(llm) == want


@pytest.mark.parametrize(
    ("layout", "asleep"),
    [
        *((name, 0) for name in LAYOUTS),
        *((name, level) for name in ("tp2", "pp2, processes, int4") for level in (1, 2)),
    ],
)
def test_a_rank_that_finds_damage_leaves_all_ranks_the_old_weights(
    path: Path, other: Path, layout: str, asleep: int
) -> None:
    with LLM(str(other), **ENGINE, **LAYOUTS[layout]) as llm:
        swapped = answers(llm)
    damaged = other.parent / "damaged"
    shutil.copytree(other, damaged)
    with_a_norm_that_is_no_number(damaged)
    with LLM(str(path), **ENGINE, **LAYOUTS[layout]) as llm:
        want = answers(llm)
        if asleep:
            llm.sleep(asleep)
        with refuses(RequestError, "scale-not-finite", "the engine keeps its weights", LAST_NORM):
            llm.swap_weights(damaged)
        if asleep:
            llm.wake_up()
        assert answers(llm) == want != swapped
        if not asleep:
            hits = llm.stats().prefix_hits
            answers(llm)
            assert llm.stats().prefix_hits > hits, "what was computed with them is still right"
        llm.swap_weights(other)
        assert answers(llm) == swapped


@pytest.mark.parametrize("layout", ["tp2", "tp2, int4"])
@pytest.mark.parametrize("stage", [False, True], ids=["checked", "staged"])
def test_one_rank_of_two_that_fails_leaves_both_the_old_weights(
    path: Path, other: Path, layout: str, stage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 runs out of memory in its last group of parameters, when rank 0 has all of its own."""
    reads, load = [0], swap.load_weights
    last = 8 if "int4" in layout else 4  # all groups are read twice if importance is measured in between

    def load_weights(plan: Plan, place: Any, *rest: Any) -> None:
        if place.rank == 1:
            reads[0] += 1
            if reads[0] == last:
                raise MemoryError
        load(plan, place, *rest)

    def check_room(self: swap.WeightSwap) -> None:
        if self._rank == 1 and not stage:
            raise ModelError("no room", code="no-memory-to-swap")

    with LLM(str(path), **ENGINE, **LAYOUTS[layout]) as llm:
        want = answers(llm)
        monkeypatch.setattr(swap.WeightSwap, "_check_room", check_room)
        monkeypatch.setattr(swap, "load_weights", load_weights)
        with refuses(RequestError, "weights-not-read" if stage else "no-memory-to-swap", "rank 1"):
            llm.swap_weights(other)
        assert (reads[0] == last) == stage
        assert answers(llm) == want
        monkeypatch.undo()
        llm.swap_weights(other)
        assert answers(llm) != want


def test_weights_that_the_host_has_no_room_for(path: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: ranks of a host share its memory. An engine that sleeps reads a layer at a time."""
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    with LLM(str(path), **ENGINE, **LAYOUTS["tp2"]) as llm:
        want = answers(llm)
        free = int(0.9 * weights) + swap.SPARE_BYTES
        monkeypatch.setattr(host, "memory_bytes", lambda root=None: (2 * free, free))
        with refuses(RequestError, "no-memory-to-swap", "sleep"):
            llm.swap_weights(other)
        assert answers(llm) == want
        llm.sleep(2)
        llm.swap_weights(other)
        llm.wake_up()
        assert answers(llm) != want


def test_requests_that_run_go_on_with_the_old_weights(path: Path, other: Path) -> None:
    with_a_norm_that_is_no_number(other)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(str(path), **ENGINE, **LAYOUTS["whole"]) as llm:
        want = [list(answer.outputs[0].token_ids) for answer in llm.generate(PROMPTS, params, use_tqdm=False)]
        stream = llm.stream(PROMPTS[0], params)
        next(stream)
        with refuses(RequestError, "scale-not-finite"):
            llm.swap_weights(other)
        *_, last = stream
        assert list(last.outputs[0].token_ids) == want[0] and not llm.stats().preemptions
