"""Device maps: the pipelines that they come to, and one clear line for those that are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.drawn_shapes import shapes
from tests.refusals import refuses
from weft.checkpoint.architectures.modules import holds_weights, pipeline_units
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.names import catalogue
from weft.errors import ConfigError
from weft.plan.device_map import AvailableDevices, Device, Stages, map_to_stages, parse_device
from weft.plan.placement import check_flags, check_stages, module_devices, unit_bytes

LLAMA = catalogue.find("Llama-3.1-8B").shape
TIED = catalogue.find("Llama-3.2-1B").shape
GPT2 = catalogue.find("gpt2").shape
MIXTRAL = catalogue.find("Mixtral-8x7B").shape
DEEPSEEK = catalogue.find("DeepSeek-V3").shape
KNOWN = st.sampled_from(
    ["gpt2", "Llama-3.2-1B", "Mixtral-8x7B", "gpt-oss-20b", "opt-13b", "Qwen-72B-Chat", "gemma-2-9b"]
)


def stages(device_map: Mapping[str, object], shape: ModelShape = LLAMA, gpus: int = 2, **more: Any) -> Stages:
    return map_to_stages(shape, device_map, AvailableDevices(gpus=range(gpus), nbytes=lambda unit: 10**8, **more))


def fails(device_map: Mapping[str, object], code: str, *words: str, shape: ModelShape = LLAMA, **more: Any) -> None:
    """The error is one line and has all of `words`."""
    with refuses(ConfigError, code) as caught:
        stages(device_map, shape, **more)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def whole(shape: ModelShape, devices: list[Device]) -> dict[str, Device]:
    """A map with every part of a model: `devices` has one for each layer, the ends go with theirs."""
    ends = {"embedding": devices[0], "norm": devices[-1], "head": devices[-1]}
    return {
        unit.name: devices[unit.layer] if unit.layer is not None else ends[unit.kind] for unit in pipeline_units(shape)
    }


# --- pipelines ---


@given(st.data())
def test_a_map_is_the_pipeline_that_it_says(data: st.DataObject) -> None:
    """Every layer once, in order, on the device that the map gives it; GPUs may come again."""
    shape = data.draw(shapes())
    devices = data.draw(st.lists(st.integers(0, 3), min_size=len(shape.layers), max_size=len(shape.layers)))
    found = stages(whole(shape, list(devices)), shape, gpus=4)
    assert [it for it, count in zip(found.devices, found.layers, strict=True) for _ in range(count)] == devices
    assert all(before != after for before, after in zip(found.devices, found.devices[1:], strict=False))


@given(KNOWN, st.integers(0, 7))
def test_one_device_for_all(model: str, gpu: int) -> None:
    shape = catalogue.find(model).shape
    for said in (gpu, str(gpu), f"cuda:{gpu}"):
        assert stages({"": said}, shape, gpus=8) == Stages((gpu,), (len(shape.layers),))
    assert stages({"": "cpu"}, shape, gpus=0) == Stages(("cpu",), (len(shape.layers),))


@given(KNOWN, st.data())
def test_whatever_is_left_out_is_named(model: str, data: st.DataObject) -> None:
    shape = catalogue.find(model).shape
    everything = whole(shape, [0] * len(shape.layers))
    gone = data.draw(st.sampled_from([name for name in everything if name != "lm_head" or not shape.tied]))
    fails({name: it for name, it in everything.items() if name != gone}, "map-leaves-modules-out", gone, shape=shape)


@given(KNOWN, st.data())
def test_a_block_that_is_split_is_named(model: str, data: st.DataObject) -> None:
    shape = catalogue.find(model).shape
    unit = data.draw(st.sampled_from([it for it in pipeline_units(shape) if it.kind == "layer"]))
    tensor = data.draw(st.sampled_from(unit.tensors))[0].replace("{expert}", "1")
    fails({"": 0, tensor.rpartition(".")[0]: 1}, "map-splits-layer", unit.name, "GPU 0", "GPU 1", shape=shape)


def test_the_nearest_module_counts() -> None:
    nested = {
        "": 0,
        "model.layers": 1,
        "model.layers.0": 0,
        "model.layers.1.self_attn": 1,
        "model.norm": 1,
        "lm_head": 1,
    }
    assert stages(nested) == Stages((0, 1), (1, 31))
    assert stages({"model": 0, "lm_head": 0, "model.rotary_emb": 1, "model.layers.3.mlp.act_fn": 1}) == Stages(
        (0,), (32,)
    )
    experts = {f"model.layers.0.mlp.experts.{number}": 0 for number in range(8)}
    assert stages({"": 0, **experts}, MIXTRAL) == Stages((0,), (32,))
    assert stages({"": 0, "model.layers.3.block_sparse_moe": 0}, MIXTRAL) == Stages((0,), (32,))


def test_gpt2_is_known_by_its_modules_and_by_its_tensors() -> None:
    assert stages({"transformer": 0}, GPT2) == stages({"wte": 0, "wpe": 0, "h": 0, "ln_f": 0}, GPT2)
    fails({"transformer": 0, "h.3": 1, "transformer.h.3": 0}, "module-twice-in-map", "h.3 on GPU 1", shape=GPT2)


def test_a_tied_head_may_be_named_with_either_end() -> None:
    """Transformers puts it with the embedding."""
    layers = {f"model.layers.{n}": int(n > 8) for n in range(16)}
    ends = {"model.embed_tokens": 0, "model.norm": 1}
    for head in ({}, {"lm_head": 0}, {"lm_head": 1}):
        assert stages({**ends, **layers, **head}, TIED) == Stages((0, 1), (9, 7))
    fails({**ends, **layers, "lm_head": 2}, "map-moves-end-of-model", "lm_head", "GPU 2", shape=TIED, gpus=3)


def test_ends_lie_with_their_layers() -> None:
    split = {"": 0, **{f"model.layers.{n}": 1 for n in range(16, 32)}}
    fails(split, "map-moves-end-of-model", "model.norm on GPU 0", "model.layers.31 on GPU 1")
    fails({**split, "model.norm": 1}, "map-moves-end-of-model", "lm_head on GPU 0")
    whole_split = {**split, "model.norm": 1, "lm_head": 1}
    assert stages(whole_split) == Stages((0, 1), (16, 16))
    fails({**whole_split, "model.embed_tokens": 1}, "map-moves-end-of-model", "model.embed_tokens on GPU 1")


# --- what is not there ---


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("model.layers.32", "model.layers.0 to model.layers.31"),
        ("model.layers.99.mlp", "model.layers.0 to model.layers.31"),
        ("model.layer.3", "'model.layers.3'"),
        ("model.layers.3.self_atn", "'model.layers.3.self_attn'"),
        ("lm_heads", "'lm_head'"),
        ("visual.blocks", "model.embed_tokens"),
        ("model.layers.-1", "layers"),
    ],
)
def test_unknown_modules(module: str, told: str) -> None:
    fails({"": 0, module: 0}, "unknown-module-in-map", repr(module), told)
    assert holds_weights(LLAMA, module) is None


def test_experts_have_numbers() -> None:
    fails({"": 0, "model.layers.0.mlp.experts.8": 0}, "unknown-module-in-map", "experts.8", shape=MIXTRAL)
    fails({"": 0, "model.layers.3.mlp.experts.255": 1}, "map-splits-layer", "model.layers.3", shape=DEEPSEEK)
    fails({"model.layers.61": 0}, "unknown-module-in-map", "model.layers.60", shape=DEEPSEEK)


@pytest.mark.parametrize("said", [-1, True, 1.0, None, [0], "mps", "gpu0", "cuda:-1", "meta", {}])
def test_invalid_devices(said: object) -> None:
    fails({"": said}, "bad-device-in-map", repr(said))
    with refuses(ConfigError, "bad-device-in-map"):
        parse_device(said)


def test_devices_that_are_not_there() -> None:
    fails({"": 0, "model.layers.3": 7}, "map-beyond-gpus", "model.layers.3 on GPU 7", "GPUs 0 to 1")
    fails({"": 1}, "map-beyond-gpus", "GPU 0 only", gpus=1)
    fails({"": 0}, "map-without-gpu", "cpu", gpus=0)
    fails({"": 3}, "map-outside-max-memory", "--max-memory", "3=40GB", left_out=[3])
    fails({}, "empty-device-map")


def test_layers_on_disk_have_their_price() -> None:
    off = {"": 0, "model.layers.29": "cpu", "model.layers.30": "disk", "model.layers.31": "disk"}
    fails(off, "map-to-disk", "model.layers.30 to model.layers.31", "200 MB", "0.067 s", "3 GB/s", "cpu")
    fails({"": "disk"}, "map-to-disk", "disk", "cpu", gpus=0)
    fails({"": "cpu", "lm_head": "disk"}, "map-to-disk", "lm_head", "cpu", gpus=0)


def test_layers_on_the_cpu() -> None:
    assert stages({"": "cpu"}).devices == ("cpu",)
    beside = stages({"": 0, "model.layers.3": "cpu", "model.layers.4": "cpu", "model.layers.5": 1})
    assert beside.devices == (0, "cpu", 1, 0) and beside.layers[:3] == (3, 2, 1)


def test_bytes_of_parts_add_up() -> None:
    from weft.checkpoint.quantised.precision import weight_bytes

    for shape in (LLAMA, TIED, MIXTRAL, GPT2):
        for precision in ("bf16", "int4", "q4_k_m"):
            parts = sum(unit_bytes(shape, precision, unit) for unit in pipeline_units(shape))
            norm = weight_bytes(shape, precision) - parts
            # A tied head is no weight of its own, and the norm is then left out with it.
            assert norm == 0 or (shape.tied and 0 < norm <= 8 * shape.hidden)


# --- beside other flags ---


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2"),
        ({"tensor_split": (2.0, 1.0)}, "--tensor-split 2,1"),
        ({"data_parallel_size": 2}, "--data-parallel-size 2"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel"),
        ({"device_ids": (0, 1)}, "--device-ids"),
    ],
)
def test_flags_that_contradict_any_map(said: dict[str, Any], word: str) -> None:
    code = "device-map-beside-device-ids" if "device_ids" in said else "device-map-beside-other-cut"
    for device_map in ("balanced", {"": 0}):
        with refuses(ConfigError, code, word):
            check_flags(device_map, said)
    check_flags("auto", {"tensor_parallel_size": 1, "tensor_split": (1.0,), "data_parallel_size": 1})


def test_stages_that_are_said_twice_agree() -> None:
    made = Stages((0, 1), (20, 12))
    check_stages(made, {"pipeline_split": (20, 12), "pipeline_parallel_size": 2})
    with refuses(ConfigError, "device-map-contradicts-split", "16,16", "20,12"):
        check_stages(made, {"pipeline_split": (16, 16)})
    with refuses(ConfigError, "device-map-contradicts-stages", "3", "2 stages", "20,12"):
        check_stages(made, {"pipeline_parallel_size": 3})
    for said in ({"pipeline_split": (16, 16)}, {"pipeline_parallel_size": 2}):
        with refuses(ConfigError, "device-map-makes-stages", "balanced"):
            check_flags("balanced", said)


def test_a_word_that_is_none() -> None:
    assert (
        module_devices("cuda:1") == {"": "cuda:1"}
        and module_devices("0") == {"": "0"}
        and module_devices("cpu") == {"": "cpu"}
    )
    with refuses(ConfigError, "unknown-device-map", "balanced_low_0"):
        module_devices("even")
