"""Quantised checkpoints with a part that is missing, cut, of another form or no number: each is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu import fp8_checkpoints, integer_checkpoints, published
from tests.cpu.layouts import plan_for
from tests.cpu.test_published import CONFIG
from tests.pure.gguf_files import write_model
from weft.checkpoint.checkpoint import resolve
from weft.errors import ModelError
from weft.ranks.weights.load import allocate_parameters, load_weights

CPU = torch.device("cpu")
Change = Callable[[torch.Tensor], torch.Tensor | None]  # None: the tensor is removed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


def _written(folder: Path, module: ModuleType, name: str) -> Path:
    """A checkpoint of a recipe, made once."""
    path = folder / f"{module.__name__}-{name}"
    if not path.exists():
        path.mkdir()
        (path / "config.json").write_text(json.dumps(CONFIG))
        shape = resolve(str(path), load_format="dummy").shape
        module.write(path, shape, module.RECIPES[name], CONFIG)
    return path


def _load(path: Path) -> None:
    plan = plan_for(path, "whole")
    for place in plan.places:
        load_weights(plan, place, allocate_parameters(plan, place, CPU))


def _code_of(path: Path, target: Path, suffix: str, change: Change) -> str:
    """Code of the refusal of a checkpoint in which all tensors with a suffix are changed."""
    tensors = load_file(path / "model.safetensors")
    changed = [name for name in tensors if name.endswith(suffix)]
    assert changed
    for name in changed:
        made = change(tensors.pop(name))
        if made is not None:
            tensors[name] = made.contiguous().clone()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(ModelError) as refused:
        _load(target)
    assert "\n" not in str(refused.value)
    return refused.value.code


def _removed(_: torch.Tensor) -> None:
    return None


def _first(value: float) -> Change:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.float() if tensor.dtype == torch.float8_e8m0fnu else tensor.clone()
        changed.view(-1)[0] = value
        return changed.to(tensor.dtype)

    return change


def _first_column(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :1]


def _first_row(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1]


def _one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)[:1].view([1] * tensor.dim())


def _half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, : max(1, tensor.shape[1] // 2)]


NAN, INFINITY = _first(float("nan")), _first(float("inf"))
OTHER = "packed-part-of-other-dims"
CASES: list[tuple[ModuleType, str, str, Change, str]] = [
    (published, "compressed-zeros", "weight_zero_point", _removed, "matrix-without-zero-points"),
    (published, "compressed-zeros", "weight_shape", _removed, OTHER),
    (published, "compressed-zeros", "weight_shape", _first(0), OTHER),
    (published, "compressed-zeros", "weight_shape", _first(-1), OTHER),
    (published, "compressed-zeros", "weight_shape", _first(2**40), OTHER),
    (published, "compressed-zeros", "weight_shape", lambda it: it[:0], OTHER),
    (published, "compressed-zeros", "weight_shape", lambda it: it.double(), OTHER),
    (published, "compressed", "weight_scale", _first_column, "scales-do-not-divide-rows"),
    (published, "compressed-zeros", "weight_scale", NAN, "scale-not-finite"),
    (published, "compressed", "weight_scale", INFINITY, "scale-not-finite"),
    (published, "compressed-ordered", "weight_g_idx", _removed, "matrix-without-column-groups"),
    (published, "compressed-ordered", "weight_g_idx", lambda it: torch.full_like(it, -1), "column-groups-unset"),
    (published, "gptq-ordered", "g_idx", _removed, "matrix-without-column-groups"),
    (published, "gptq-ordered", "g_idx", torch.zeros_like, "column-groups-unset"),
    (published, "gptq-zeros", "scales", NAN, "scale-not-finite"),
    (published, "gptq-zeros", "qzeros", _removed, "matrix-without-zero-points"),
    (published, "gptq-zeros", "scales", _first_row, OTHER),
    (published, "awq", "scales", INFINITY, "scale-not-finite"),
    (published, "awq", "qzeros", _removed, "matrix-without-zero-points"),
    (fp8_checkpoints, "blocks", "_scale_inv", _one, OTHER),
    (fp8_checkpoints, "blocks", "_scale_inv", lambda it: it.view(-1)[0], OTHER),
    (fp8_checkpoints, "blocks", "_scale_inv", _half, OTHER),
    (fp8_checkpoints, "blocks", "_scale_inv", NAN, "scale-not-finite"),
    (fp8_checkpoints, "blocks-powers", "_scale_inv", NAN, "scale-not-finite"),
    (fp8_checkpoints, "fbgemm", "_scale", _one, OTHER),
    (fp8_checkpoints, "fbgemm", "_scale", INFINITY, "scale-not-finite"),
    (fp8_checkpoints, "tensor", "weight_scale", NAN, "scale-not-finite"),
    (integer_checkpoints, "nf4", ".absmax", NAN, "scale-not-finite"),
    (integer_checkpoints, "nf4-nested", ".nested_quant_map", _first(float("nan")), "scale-not-finite"),
    (integer_checkpoints, "nf4-nested", ".nested_absmax", INFINITY, "scale-not-finite"),
    (integer_checkpoints, "nf4", ".quant_map", NAN, "other-table"),
    (integer_checkpoints, "llm-int8", "SCB", NAN, "scale-not-finite"),
    (integer_checkpoints, "llm-int8", "SCB", lambda it: it[:1], OTHER),
    (integer_checkpoints, "w8a8", "weight_scale", _first_row, OTHER),
    (integer_checkpoints, "w8a8", "weight_scale", INFINITY, "scale-not-finite"),
    (published, "compressed", "layernorm.weight", NAN, "scale-not-finite"),
]


@pytest.mark.parametrize(
    ("module", "name", "suffix", "change", "code"),
    CASES,
    ids=[f"{number}-{case[1]}-{case[2]}" for number, case in enumerate(CASES)],
)
def test_a_damaged_part_is_refused(
    module: ModuleType,
    name: str,
    suffix: str,
    change: Change,
    code: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    path = _written(folder, module, name)
    assert _code_of(path, tmp_path, suffix, change) == code


def test_a_config_whose_layers_differ_is_read_by_its_tensors(folder: Path, tmp_path: Path) -> None:
    """GPTQ's "dynamic" may give some layers groups of their own."""
    path = _written(folder, published, "gptq-zeros")  # groups of 32
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 64
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    for dynamic, is_read in (({}, False), ({"+:.*": {"group_size": 32}}, True)):
        config["quantization_config"]["dynamic"] = dynamic
        (tmp_path / "config.json").write_text(json.dumps(config))
        if is_read:
            _load(tmp_path)
            continue
        with pytest.raises(ModelError) as refused:
            _load(tmp_path)
        assert refused.value.code == "scales-do-not-divide-rows"


def test_zero_points_that_no_format_reads_must_be_zero(folder: Path, tmp_path: Path) -> None:
    path = _written(folder, integer_checkpoints, "w8a8")
    tensors = load_file(path / "model.safetensors")
    zeros = {
        name + "_zero_point": torch.zeros(len(value), 1).char()
        for name, value in tensors.items()
        if value.dtype == torch.int8
    }
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    save_file(tensors | zeros, tmp_path / "model.safetensors")
    _load(tmp_path)
    next(iter(zeros.values()))[3] = 1
    save_file(tensors | zeros, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as refused:
        _load(tmp_path)
    assert refused.value.code == "uneven-zero-points"


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4"])
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_a_scale_of_a_gguf_block_that_is_no_number(type: str, quantization: str, folder: Path, tmp_path: Path) -> None:
    plain = folder / "plain"
    plain.mkdir(exist_ok=True)
    (plain / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 256, "attention_bias": False}))
    shape = resolve(str(plain), load_format="dummy").shape
    path = tmp_path / "a.gguf"
    write_model(path, shape, type, others={"embed_tokens": "F32", "lm_head": "F32"}, std=0.05)
    info = resolve(str(path)).tensors()["model.layers.0.mlp.down_proj.weight"]
    data = bytearray(path.read_bytes())
    at = {"Q6_K": info.offset + 208}.get(type, info.offset)
    data[at : at + 2] = b"\xff" * (1 if type == "MXFP4" else 2) + data[at + 1 : at + 2] * (type == "MXFP4")
    path.write_bytes(data)
    plan = plan_for(path, "whole", quantization=quantization)
    with pytest.raises(ModelError) as refused:
        for place in plan.places:
            load_weights(plan, place, allocate_parameters(plan, place, CPU))
    assert refused.value.code == "scale-not-finite"
    assert "model.layers.0.mlp.down_proj.weight" in str(refused.value)
