"""GGUF files of models whose attention has one matrix for queries, keys and values: GPT-2 and Qwen v1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cpu import checkpoints, qwen_v1
from tests.cpu.test_gguf_models import NEW, PROMPT, tokens_of, truth_of
from tests.pure.gguf_files import write
from weft.checkpoint.config import config_json


def convert(folder: Path, arch: str, tensors: Mapping[str, np.ndarray], more: Mapping[str, Any]) -> Path:
    """Write the tensors under the names that llama.cpp's converter gives them."""
    shape = config_json.read_shape(folder)
    [kind] = (kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, len(shape.layers))
    values = {
        "block_count": len(shape.layers),
        "context_length": shape.max_positions,
        "embedding_length": shape.hidden,
        "attention.head_count": shape.q_heads,
        **more,
    }
    metadata = {f"{arch}.{key}": value for key, value in values.items()}
    metadata["tokenizer.ggml.tokens"] = [f"t{i}" for i in range(shape.vocab)]
    own = {names.get_name(name, (".weight", ".bias")): value for name, value in tensors.items()}
    return write(folder / "model.gguf", arch, metadata, own)


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 2}], ids=str)
def test_gpt2(tmp_path: Path, layout: dict[str, Any]) -> None:
    folder = checkpoints.make("gpt2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    turned = {
        name: np.ascontiguousarray(value.T) if ".c_" in name and value.ndim == 2 else value
        for name, value in tensors.items()
    }
    path = convert(folder, "gpt2", turned, {"feed_forward_length": 192, "attention.layer_norm_epsilon": 1e-5})
    assert tokens_of(path, **layout) == truth_of(folder)


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 2}], ids=str)
def test_qwen_v1(tmp_path: Path, layout: dict[str, Any]) -> None:
    folder = qwen_v1.write(tmp_path / "qwen")
    more = {
        "feed_forward_length": 2 * qwen_v1.FFN,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": qwen_v1.HEAD_DIM,
    }
    path = convert(folder, "qwen", load_file(folder / "model.safetensors"), more)
    truth = qwen_v1.Reference(folder, len(PROMPT) + NEW).greedy(PROMPT, NEW)
    assert tokens_of(path, **layout) == truth
