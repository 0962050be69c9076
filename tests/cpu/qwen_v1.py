"""Tiny checkpoints as Qwen v1 was published, and the model in NumPy float64, from its published description."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

Array = npt.NDArray[np.float64]
LAYERS, HIDDEN, HEADS, HEAD_DIM, FFN, VOCAB = 5, 48, 6, 8, 160, 160
CONFIG: dict[str, Any] = {
    "architectures": ["QWenLMHeadModel"],
    "auto_map": {
        "AutoConfig": "configuration_qwen.QWenConfig",
        "AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel",
    },
    "attn_dropout_prob": 0.0,
    "bf16": False,
    "emb_dropout_prob": 0.0,
    "fp16": False,
    "fp32": False,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * FFN,
    "initializer_range": 0.02,
    "kv_channels": HEAD_DIM,
    "layer_norm_epsilon": 1e-06,
    "max_position_embeddings": 128,
    "model_type": "qwen",
    "no_bias": True,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "onnx_safe": None,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 128,
    "tie_word_embeddings": False,
    "tokenizer_class": "QWenTokenizer",
    "use_cache": True,
    "use_dynamic_ntk": True,
    "use_flash_attn": "auto",
    "use_logn_attn": True,
    "vocab_size": VOCAB,
}


def write(folder: Path, *, vocab: int = VOCAB, **config: Any) -> Path:
    """Write a random checkpoint in float32, with `config` over CONFIG."""
    torch.manual_seed(11)
    dims = {"wte.weight": (vocab, HIDDEN), "ln_f.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        dims |= {
            f"h.{layer}.ln_1.weight": (HIDDEN,),
            f"h.{layer}.attn.c_attn.weight": (3 * HEADS * HEAD_DIM, HIDDEN),
            f"h.{layer}.attn.c_attn.bias": (3 * HEADS * HEAD_DIM,),
            f"h.{layer}.attn.c_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"h.{layer}.ln_2.weight": (HIDDEN,),
            f"h.{layer}.mlp.w1.weight": (FFN, HIDDEN),
            f"h.{layer}.mlp.w2.weight": (FFN, HIDDEN),
            f"h.{layer}.mlp.c_proj.weight": (HIDDEN, FFN),
        }
    tensors = {f"transformer.{name}": torch.randn(size) * 0.15 for name, size in dims.items()}
    tensors["lm_head.weight"] = torch.randn(vocab, HIDDEN) * 0.15
    for name, value in tensors.items():
        if ".ln_" in name:
            value.uniform_(0.5, 1.5)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab, **config}))
    return folder


class Reference:
    """The model of a folder, with its weights or with `tensors`.

    `length`: the text's length by which the base of the rotary embedding is chosen.
    """

    def __init__(self, folder: Path, length: int, tensors: Mapping[str, Any] | None = None) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = tensors or load_file(folder / "model.safetensors")
        self.tensors = {name: np.asarray(value, dtype=np.float64) for name, value in self.tensors.items()}
        self._heads, self._head_dim = self.config["num_attention_heads"], self.config["kv_channels"]
        alpha = 1.0
        if self.config["use_dynamic_ntk"]:
            context = math.log(length / self.config["seq_length"], 2) + 1
            alpha = max(2 ** math.ceil(context) - 1, 1)
        base = self.config["rotary_emb_base"] * alpha ** (self._head_dim / (self._head_dim - 2))
        self._frequencies = 1.0 / base ** (np.arange(0, self._head_dim, 2) / self._head_dim)

    def logits(self, tokens: list[int]) -> Array:
        """Logits of each position: [T, vocab]."""
        x = self.tensors["transformer.wte.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"transformer.h.{layer}."
            x = x + self._attend(self._norm(x, name + "ln_1"), name + "attn.")
            x = x + self._feed_forward(self._norm(x, name + "ln_2"), name + "mlp.")
        return self._norm(x, "transformer.ln_f") @ self.tensors["lm_head.weight"].T

    def greedy(self, prompt: list[int], new: int) -> list[int]:
        """The `new` most likely tokens after a prompt, one after the other."""
        tokens = list(prompt)
        for _ in range(new):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _norm(self, x: Array, name: str) -> Array:
        scale = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.config["layer_norm_epsilon"])
        return x * scale * self.tensors[name + ".weight"]

    def _attend(self, x: Array, name: str) -> Array:
        qkv = x @ self.tensors[name + "c_attn.weight"].T + self.tensors[name + "c_attn.bias"]
        q, k, v = (part.reshape(len(x), self._heads, self._head_dim) for part in np.split(qkv, 3, axis=1))
        q, k = self._rotate(q), self._rotate(k)
        if self.config["use_logn_attn"]:
            trained = self.config["seq_length"]
            factors = [math.log(n, trained) if n > trained else 1.0 for n in range(1, len(x) + 1)]
            q = q * np.array(factors)[:, None, None]
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(self._head_dim)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed: Array = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
        return mixed @ self.tensors[name + "c_proj.weight"].T

    def _rotate(self, x: Array) -> Array:
        angles = np.outer(np.arange(len(x)), self._frequencies)
        cos, sin = (np.concatenate([f(angles)] * 2, axis=1)[:, None] for f in (np.cos, np.sin))
        first, second = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate([-second, first], axis=-1) * sin

    def _feed_forward(self, x: Array, name: str) -> Array:
        up, gate = x @ self.tensors[name + "w1.weight"].T, x @ self.tensors[name + "w2.weight"].T
        activated: Array = up * gate / (1 + np.exp(-gate))
        return activated @ self.tensors[name + "c_proj.weight"].T
