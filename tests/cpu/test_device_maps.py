"""Device maps against Transformers and accelerate: the same modules, the same maps covered, the same layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import check_device_map, compute_module_sizes, get_balanced_memory, infer_auto_device_map
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.cpu.test_architectures import CASES, SMALL
from tests.refusals import refuses
from weft.checkpoint.architectures.modules import holds_weights, pipeline_units
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.config import config_json
from weft.errors import ConfigError
from weft.plan.device_map import AvailableDevices, Stages, map_to_stages
from weft.planner.search.balance import ModelBytes, balance_layers, model_bytes

FEW = settings(max_examples=60, deadline=None)
# Layers are larger than embedding and head: then the room that accelerate keeps for the largest is theirs.
LLAMA = SMALL | {"vocab_size": 64, "num_hidden_layers": 9, "tie_word_embeddings": False}
TIED = LLAMA | {"tie_word_embeddings": True}
PLENTY = 10**12


def meta(architecture: str, config: dict[str, Any], folder: Path) -> tuple[Any, ModelShape]:
    """A model of Transformers without weights, and its shape as Weft reads it."""
    kind = getattr(transformers, architecture).config_class
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": [architecture], "model_type": kind.model_type})
    )
    with torch.device("meta"):
        model = getattr(transformers, architecture)(kind.from_pretrained(folder))
    return model.to(torch.bfloat16), config_json.read_shape(folder, run=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelShape]:
    return meta("LlamaForCausalLM", LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelShape]:
    return meta("LlamaForCausalLM", TIED, tmp_path_factory.mktemp("tied"))


def stages(shape: ModelShape, device_map: dict[str, Any], gpus: int = 4) -> Stages:
    return map_to_stages(shape, device_map, AvailableDevices(gpus=range(gpus), nbytes=lambda unit: 1))


# --- modules ---


@pytest.mark.parametrize(
    ("architecture", "config"),
    [*CASES, *((f"{name}ForCausalLM", SMALL) for name in ("Llama", "Mistral", "Qwen2"))],
    ids=str,
)
def test_every_module_is_known(tmp_path: Path, architecture: str, config: dict[str, Any]) -> None:
    model, shape = meta(architecture, config, tmp_path)
    for name, module in model.named_modules():
        if name:
            weights = any(True for _ in module.parameters())
            assert holds_weights(shape, name) is weights, name
            assert holds_weights(shape, name + "s") is None or name.endswith(".act"), name
    # A map that names each block, and what is around them.
    blocks = {type(module).__name__ for module in model.modules()} & set(model._no_split_modules)
    named = {name: 0 for name, module in model.named_modules() if type(module).__name__ in blocks}
    around = {name: 0 for name, module in model.named_modules() if not list(module.children()) and name}
    inside = tuple(f"{name}." for name in named)
    whole = named | {name: 0 for name in around if not name.startswith(inside)}
    check_device_map(model, whole)
    assert stages(shape, whole) == Stages((0,), (len(shape.layers),))
    assert sorted(named) == sorted(unit.name for unit in pipeline_units(shape) if unit.kind == "layer")


@pytest.mark.parametrize("name", ["Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"])
def test_models_that_also_see(tmp_path: Path, name: str) -> None:
    kind = getattr(transformers, name)
    config = kind.config_class()
    config.text_config.num_hidden_layers = config.vision_config.num_hidden_layers = 2
    if getattr(config.text_config, "layer_types", None):
        config.text_config.layer_types = config.text_config.layer_types[:2]
    with torch.device("meta"):
        model = kind(config)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    shape = config_json.read_shape(tmp_path, run=False)
    for module, _ in model.named_modules():
        assert not module or holds_weights(shape, module) is not None, module
    there = {"model.vision_tower": 1, "model.multi_modal_projector": 1, "model.language_model": 0, "lm_head": 0}
    assert stages(shape, there) == Stages((0,), (2,))


@FEW
@given(data=st.data())
def test_maps_cover_what_accelerate_says_they_do(llama: tuple[Any, ModelShape], data: st.DataObject) -> None:
    model, shape = llama
    names = [name for name, _ in model.named_modules()]
    blocks = [name for name in names if name.startswith("model.layers.") and name.count(".") == 2]
    tops = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    inner = [name for name in names if name.startswith("model.layers.3.")]
    chosen = data.draw(st.sets(st.sampled_from([*blocks, *tops]), min_size=len(blocks) + len(tops) - 2))
    more = data.draw(st.sets(st.sampled_from([*inner, "model.layers", "model", ""]), max_size=3))
    device_map = dict.fromkeys(sorted(chosen | more), 0)
    try:
        check_device_map(model, device_map)
    except ValueError:
        with refuses(ConfigError, "map-leaves-modules-out"):
            stages(shape, device_map)
    else:
        assert stages(shape, device_map) == Stages((0,), (len(shape.layers),))


# --- words for a map ---


def load(shape: ModelShape) -> ModelBytes:
    return model_bytes(shape, "bf16", "bf16", 0, window_cache=False)


def layers_of(device_map: dict[str, Any], shape: ModelShape, gpus: int) -> tuple[int, ...]:
    """Layers on each GPU as accelerate has them."""
    on = [
        device_map.get(f"model.layers.{n}", device_map.get("model", device_map.get("")))
        for n in range(len(shape.layers))
    ]
    return tuple(on.count(gpu) for gpu in range(gpus))


def test_bytes_are_accelerate_s(llama: tuple[Any, ModelShape], tied: tuple[Any, ModelShape]) -> None:
    for model, shape in (llama, tied):
        theirs, ours = compute_module_sizes(model), load(shape)
        assert [theirs[f"model.layers.{n}"] for n in range(len(shape.layers))] == list(ours.weights)
        assert theirs["model.embed_tokens"] == ours.first
        # A tied head is counted once there; here it is copied where the embedding is on another stage.
        assert theirs["model.norm"] + (theirs["lm_head"] or theirs["model.embed_tokens"]) == ours.last
        buffers = theirs["model.rotary_emb"]
        assert theirs[""] - buffers == sum(ours.weights) + ours.both


@FEW
@given(shares=st.lists(st.floats(0.05, 1.1), min_size=2, max_size=4))
def test_sequential_is_accelerate_s(llama: tuple[Any, ModelShape], shares: list[float]) -> None:
    """Wherever accelerate's map is a pipeline: the embedding with the first layer, the head with the last one."""
    model, shape = llama
    ours = load(shape)
    rooms = [int(share * (sum(ours.weights) + ours.both)) for share in shares]
    # It counts a few bytes of its own: no room is for a whole number of layers, but for less than a hundredth of one.
    beside = (0, ours.first, ours.last, ours.both)
    assume(all(0.01 < (room - other) / ours.weights[0] % 1 < 0.99 for room in rooms for other in beside))
    buffers = compute_module_sizes(model)["model.rotary_emb"]
    # It keeps the largest layer's room free on the first GPU.
    caps: dict[Any, int] = {gpu: room + buffers for gpu, room in enumerate(rooms)}
    caps[0] += int(max(ours.weights))
    theirs = infer_auto_device_map(
        model,
        max_memory={**caps, "cpu": PLENTY},
        no_split_module_classes=model._no_split_modules,
        clean_result=False,
    )
    on = {name: device for name, device in theirs.items() if "rotary" not in name}
    assume(not {"cpu", "disk"} & set(on.values()) and on.get("model") is None and on.get("") is None)
    last = on.get(f"model.layers.{len(shape.layers) - 1}")
    assume(last not in (0, None) and on["model.norm"] == on["lm_head"] == last)
    assume(on["model.embed_tokens"] == on["model.layers.0"])
    assert balance_layers(ours, rooms, "sequential") == layers_of(on, shape, len(rooms))
    assert stages(shape, theirs).layers == tuple(filter(None, layers_of(on, shape, len(rooms))))


@FEW
@given(gpus=st.integers(2, 5), is_tied=st.booleans())
def test_balanced_is_at_least_as_even_as_accelerate_s(
    llama: tuple[Any, ModelShape], tied: tuple[Any, ModelShape], gpus: int, is_tied: bool
) -> None:
    model, shape = tied if is_tied else llama
    caps: dict[Any, int] = {**dict.fromkeys(range(gpus), PLENTY), "cpu": PLENTY}
    blocks = model._no_split_modules
    balanced = get_balanced_memory(model, max_memory=caps, no_split_module_classes=blocks)
    theirs = infer_auto_device_map(model, max_memory=balanced, no_split_module_classes=blocks, clean_result=False)
    ours, each = load(shape), balance_layers(load(shape), [float(PLENTY)] * gpus, "balanced")
    assert sum(each) == len(shape.layers) and all(each)
    assert stages(shape, theirs).devices == tuple(range(len(stages(shape, theirs).devices)))
    sizes = compute_module_sizes(model)
    fullest = max(sum(sizes[name] for name, on in theirs.items() if on == gpu) for gpu in range(gpus))
    held = [count * ours.weights[0] for count in each]
    held[0] += ours.first
    held[-1] += ours.last
    # A pipeline holds a tied head twice; accelerate moves the hidden states back to the first GPU.
    assert max(held) <= fullest + (ours.last if is_tied else 0)


def test_balanced_low_0_leaves_the_first_gpu_free(llama: tuple[Any, ModelShape]) -> None:
    model, shape = llama
    caps: dict[Any, int] = {**dict.fromkeys(range(3), PLENTY), "cpu": PLENTY}
    blocks = model._no_split_modules
    low = get_balanced_memory(model, max_memory=caps, no_split_module_classes=blocks, low_zero=True)
    theirs = infer_auto_device_map(model, max_memory=low, no_split_module_classes=blocks, clean_result=False)
    assert layers_of(theirs, shape, 3)[0] == 0
    assert balance_layers(load(shape), [float(PLENTY)] * 3, "balanced_low_0")[0] == 0
