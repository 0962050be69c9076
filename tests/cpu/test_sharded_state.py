"""Sharded state: what the ranks of a layout hold, written by weft shard and read by --load-format sharded_state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.cpu import checkpoints, published
from tests.cpu.describing import ask_here
from tests.cpu.test_published import written
from tests.pure.commands import refused_line
from tests.pure.gguf_files import write_model
from tests.pure.shapes import dense_shape
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.checkpoint.architectures.place import Place
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.config import library
from weft.checkpoint.files import sharded
from weft.checkpoint.lookup import look_up
from weft.cli.dispatch import dispatch
from weft.cli.run import shard
from weft.config import EngineConfig
from weft.engine.client.control import swap_command
from weft.engine.executors.inline import InlineExecutor
from weft.errors import ConfigError, ModelError, PlanError, RequestError
from weft.machine.hardware.host import probe_host
from weft.plan.plan import Plan
from weft.plan.speculation import fetch_draft
from weft.planner.execution.execution import plan_to_run
from weft.ranks.weights.load import load_weights
from weft.ranks.worker.sharding import write_shards

SIZES: dict[str, Any] = {"hidden": 256, "q_heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 512, "vocab": 96}
LLAMA = dense_shape(architecture="LlamaForCausalLM", layers=2, max_positions=64, **SIZES)


def make(name: str) -> Callable[[Path], Path]:
    return lambda folder: checkpoints.make(name, folder)


def gguf_model(folder: Path) -> Path:
    write_model(folder / "model.gguf", LLAMA, "Q4_K", others={"lm_head.weight": "Q6_K"}, std=0.1)
    return folder / "model.gguf"


def packed_model(folder: Path) -> Path:
    written(folder / "packed", published.RECIPES["gptq-zeros"])
    return folder / "packed"


# Norms with an offset, types of GGUF, packed matrices, weights that are rounded while they are read, experts.
CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "offsets": (make("gemma3"), {"tensor_parallel_size": 2, "dtype": "float32"}),
    "gguf": (gguf_model, {"tensor_split": (2.0, 1.0)}),
    "packed": (packed_model, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "rounded to 8 bits": (make("llama-biased"), {"pipeline_parallel_size": 2, "quantization": "int8"}),
    "rounded to 4 bits": (gguf_model, {"tensor_parallel_size": 2, "quantization": "q4_0"}),
    "dealt experts": (make("qwen3-moe"), {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
}


def plan_of(path: Path, **options: Any) -> Plan:
    config = EngineConfig(model=str(path), device="cpu", **options)
    return plan_to_run(config, resolve(str(path), load_format=config.load_format), probe_host())


def cut(path: Path, folder: Path, **options: Any) -> Path:
    """The directory with a model's sharded state."""
    plan, state = shard.plan_shards(EngineConfig(model=str(path), device="cpu", **options), folder)
    folder.mkdir()
    write_shards(plan, state, folder, lambda *_: None)
    shard.copy_texts(path, folder)
    return folder


def held(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], torch.Tensor]:
    """All that the ranks hold after they have loaded."""
    from weft.ranks.weights import sharded as files
    from weft.ranks.worker import runner

    kept: dict[tuple[int, str], torch.Tensor] = {}

    def load(plan: Plan, place: Any, targets: Any, *rest: Any) -> None:
        load_weights(plan, place, targets, *rest)
        kept.update({(place.rank, name): part.clone() for name, part in files.tensor_parts(targets)})

    monkeypatch.setattr(runner, "load_weights", load)
    executor = InlineExecutor()
    try:
        executor.start(msgspec.structs.replace(plan, kv_cache_bytes=4 << 20))
    finally:
        executor.close()
    return kept


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_the_same_as_from_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    make_model, options = CASES[case]
    path = make_model(tmp_path)
    folder = cut(path, tmp_path / "cut", **options)
    plan, ours = plan_of(path, **options), plan_of(folder, load_format="sharded_state")
    assert ours.load_format == "sharded_state"
    assert (ours.places, ours.dtype, ours.schemes) == (plan.places, plan.dtype, plan.schemes)
    wanted, read = held(plan, monkeypatch), held(ours, monkeypatch)
    assert read.keys() == wanted.keys()
    assert all(torch.equal(part, wanted[name]) for name, part in read.items())
    sizes = sum(part.nbytes for (rank, _), part in wanted.items() if rank == 0)
    assert sizes <= (folder / sharded.file_name(0)).stat().st_size < sizes + 400_000
    assert not list(folder.glob("*.incomplete"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama-biased", tmp_path_factory.mktemp("sharded"))


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return cut(model, tmp_path / "cut", tensor_parallel_size=2)


def test_an_engine_answers_as_from_the_checkpoint(model: Path, folder: Path) -> None:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 20, "executor": "inline"}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    answers = []
    for path, more in ((model, {"tensor_parallel_size": 2}), (folder, {})):
        with LLM(str(path), device="cpu", **options, **more) as llm:
            answers.append(llm.generate([1, 5, 9], params)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_the_command_says_what_it_has_written(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "cut"
    assert dispatch(["shard", str(model), str(target), "-tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == [str(target / sharded.file_name(rank)) for rank in (0, 1)]
    assert "--load-format sharded_state --tensor-parallel-size 2" in lines[2]
    assert (target / "config.json").exists()
    refused_line(["shard", str(model)], 2, "shard-arguments")


def test_other_tools_read_the_files(folder: Path) -> None:
    with safe_open(folder / sharded.file_name(1), framework="pt") as file:
        state = json.loads(file.metadata()[sharded.KEY])
        names = set(file.keys())
    assert state["rank"] == 1 and state["cut"] == {"tensor_parallel_size": 2}
    assert "layers.0.attn.qkv.weight" in names or len(names) > 10


def test_a_planner_knows_the_model(model: Path, folder: Path) -> None:
    assert look_up(str(folder)).shape == look_up(str(model)).shape


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, ["rank 0 has another share"]),
        ({"tensor_parallel_size": 3}, ["3 ranks, not 2"]),
        ({"tensor_split": (1.0, 2.0)}, ["rank 0 has another share"]),
        ({"dtype": "float32"}, ["dtype is bfloat16, not float32"]),
        ({"quantization": "int8"}, ["held in bf16"]),
    ],
)
def test_another_layout_is_refused_with_the_one_that_it_is(
    folder: Path, options: dict[str, Any], words: list[str]
) -> None:
    with refuses(PlanError, "shards-of-other-layout", folder, "--tensor-parallel-size 2", *words):
        plan_of(folder, **options)


def test_files_that_are_not_as_they_were_written(folder: Path, tmp_path: Path) -> None:
    plan = plan_of(folder)
    first, second = folder / sharded.file_name(0), folder / sharded.file_name(1)

    def load(rank: int) -> None:
        from weft.ranks.weights.load import allocate_parameters

        load_weights(plan, plan.places[rank], allocate_parameters(plan, plan.places[rank], torch.device("cpu")))

    with safe_open(second, framework="pt") as file:
        about = file.metadata()
    tensors = load_file(second)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    save_file({**tensors, name: tensors[name].float()}, second, about)
    with refuses(ModelError, "tensor-of-other-dims", second, name, "F32", "BF16"):
        load(1)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, second, about)
    with refuses(ModelError, "missing-tensor", second, name):
        load(1)
    save_file(tensors, second)
    with refuses(ModelError, "shard-without-layout", second):
        load(1)
    save_file(tensors, second, {sharded.KEY: '{"format": 99}'})
    with refuses(ModelError, "damaged-shard-layout", second):
        load(1)
    os.replace(first, second)
    with refuses(ModelError, "other-load-format", folder, "sharded_state"):
        resolve(str(folder), load_format="sharded_state")
    os.link(second, first)
    with refuses(ModelError, "shard-of-other-rank", second, "rank 0"):
        load(1)
    second.unlink()
    with refuses(ModelError, "missing-weight-file", folder, sharded.file_name(1)):
        resolve(str(folder))


def test_a_place_that_cannot_take_the_files(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_to(target: Path, source: Path = model) -> None:
        shard.plan_shards(EngineConfig(model=str(source), device="cpu"), target)

    with refuses(ConfigError, "shards-in-the-way", folder):
        write_to(folder)
    with refuses(ConfigError, "shards-of-shards", folder, "--tensor-parallel-size 2"):
        write_to(tmp_path / "new", folder)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shard.shutil, "disk_usage", lambda path: usage)
    with refuses(ConfigError, "disk-full", tmp_path, "0 MB free"):
        write_to(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_failure_leaves_no_half_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.ranks.worker import sharding

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sharding, "load_weights", fail)
    with pytest.raises(OSError, match="No space left"):
        cut(model, tmp_path / "cut", tensor_parallel_size=2)
    assert not list((tmp_path / "cut").iterdir())


def test_what_is_interrupted_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.ranks.worker import sharding

    aborted, loads = Event(), list[int]()

    class Watched(sharding.Threads):
        def abort(self) -> None:
            super().abort()
            aborted.set()

    def load(plan: Plan, place: Place, *_: object, **__: object) -> None:
        loads.append(place.rank)
        assert aborted.wait(30), "nobody tells the ranks to end"

    def interrupt(*_: object, **__: object) -> None:
        while len(set(loads)) < 2:
            aborted.wait(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(sharding, "Threads", Watched)
    monkeypatch.setattr(sharding, "load_weights", load)
    monkeypatch.setattr(sharding, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dispatch(["shard", str(model), str(tmp_path / "new" / "cut"), "-tp", "2"])
    assert sorted(loads) == [0, 1]  # no rank goes on with another layer
    assert not (tmp_path / "new").exists()


def test_an_error_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(shard, "copy_texts", fail)
    for name in ("empty", "new"):
        assert dispatch(["shard", str(model), str(tmp_path / name)]) != 0
        assert "No space left" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["empty"] and not list((tmp_path / "empty").iterdir())


def test_the_classes_that_a_model_runs_through(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_ask_child", ask_here)
    through = cut(model, tmp_path / "through", model_impl="transformers", pipeline_parallel_size=2)
    state = sharded.read_state(through)
    assert state.shape.library is not None
    with refuses(ModelError, "shards-of-other-impl", through, "--model-impl transformers", "weft"):
        resolve(str(through), model_impl="weft")
    with refuses(ModelError, "shards-of-other-impl", folder, "--model-impl weft", "transformers"):
        resolve(str(folder), model_impl="transformers")
    options: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 20, "executor": "inline"}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    answers = []
    for path, impl in ((folder, "auto"), (through, "transformers")):
        with LLM(str(path), device="cpu", model_impl=impl, **options) as llm:
            [output] = llm.generate([{"prompt_token_ids": [1, 5, 9, 3]}], params, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_what_a_running_engine_takes(model: Path, folder: Path) -> None:
    config = EngineConfig(model=str(model), device="cpu", tensor_parallel_size=2)
    assert swap_command(folder, config, plan_of(model, tensor_parallel_size=2)).load_format == "sharded_state"
    with refuses(RequestError, "swap-of-other-shapes", folder, "1 ranks, not 2"):
        swap_command(folder, config, plan_of(model))
    with refuses(ConfigError, "sharded-draft", folder):
        fetch_draft(str(folder), "safetensors")
