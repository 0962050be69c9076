"""GGUF files of models with experts and with windows compute what Transformers computes from the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.cpu import checkpoints
from tests.pure.gguf_files import metadata_of, write
from weft import LLM, SamplingParams
from weft.architectures.registry import find_architecture
from weft.architectures.shape import ModelShape
from weft.formats import config_json
from weft.formats.gguf_names import layer_modules, outer_modules

PROMPT, NEW = list(range(3, 60)), 12


def ggml_tensors(tensors: Mapping[str, np.ndarray], shape: ModelShape) -> dict[str, np.ndarray]:
    """Tensors as llama.cpp's converter writes them: experts in stacks, the offset of norms added to their weights."""
    known = find_architecture(shape.architecture)
    names = known.names
    own = {name: ggml for ggml, name in outer_modules(names).items()}
    out = {f"{own[name[:-7]]}.weight": value for name, value in tensors.items() if name[:-7] in own}
    for layer in range(len(shape.layers)):
        for ggml, module in layer_modules(names).items():
            for kind in ("weight", "bias"):
                source = f"{names.layer.format(layer=layer)}{module}.{kind}"
                if "{expert}" in source:
                    stack = [tensors.get(source.format(expert=expert)) for expert in range(6)]
                    value = None if stack[0] is None else np.stack([block for block in stack if block is not None])
                else:
                    value = tensors.get(source)
                if value is not None:
                    out[f"blk.{layer}.{ggml}.{kind}"] = value
    return {name: value + shape.norm.offset if "norm" in name else value for name, value in out.items()}


def convert(folder: Path, more: dict[str, Any]) -> Path:
    shape = config_json.read_shape(folder)
    arch = find_architecture(shape.architecture).gguf
    metadata = metadata_of(shape) | {f"{arch}.{key}": value for key, value in more.items()}
    tensors = ggml_tensors(load_file(folder / "model.safetensors"), shape)
    return write(folder / "model.gguf", arch, metadata, tensors)


MIXTURE = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 96, "feed_forward_length": 160}
WINDOW = {"attention.sliding_window": 9, "rope.freq_base": 1e6}


@pytest.mark.parametrize(("recipe", "metadata"), [("qwen3-moe-gguf", MIXTURE), ("gemma3-gguf", WINDOW)])
@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 2}])
def test_tokens_equal(tmp_path: Path, recipe: str, metadata: dict[str, Any], layout: dict[str, Any]) -> None:
    folder = checkpoints.make(recipe, tmp_path)
    model = checkpoints.reference(folder)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    truth = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0]
    path = convert(folder, metadata)
    with LLM(str(path), dtype="float32", skip_tokenizer_init=True, executor="inline", **layout) as llm:
        output = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))[0]
    assert output.outputs[0].token_ids == truth[len(PROMPT) :].tolist()
