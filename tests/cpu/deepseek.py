"""DeepSeek's models in NumPy float64, from their published description, for what Transformers' classes leave out.

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2), DeepSeek-V3 (arXiv 2412.19437, section 2.1), modeling_deepseek.py in
the repositories deepseek-ai/DeepSeek-V2 and deepseek-ai/DeepSeek-V3. Transformers 5.23 ignores `moe_layer_freq`, and
`norm_topk_prob` in V2.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from tests.cpu.checkpoints import MSCALES

Array = npt.NDArray[np.float64]
# Fields of config.json of Kimi-K2, for the recipe "deepseek-v3".
KIMI: dict[str, Any] = {
    "model_type": "kimi_k2",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": {**MSCALES, "type": "yarn", "beta_fast": 1.0, "mscale": 1, "mscale_all_dim": 1},
}
LATENT_EPS = 1e-6  # of the norms of compressed vectors


def edit_config(folder: Path, **fields: Any) -> Path:
    """Change fields of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


class Reference:
    """The model of a folder whose config.json is of Transformers 4, as DeepSeek publishes it."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.tensors = {name: np.asarray(value, dtype=np.float64) for name, value in tensors.items()}

    def logits(self, tokens: list[int]) -> Array:
        """Logits of each position: [T, vocab]."""
        x = self.tensors["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            x = x + self._attend(self._norm(x, name + "input_layernorm"), name + "self_attn.")
            normed = self._norm(x, name + "post_attention_layernorm")
            x = x + (
                self._mixture(normed, name + "mlp.") if self._has_experts(layer) else self._mlp(normed, name + "mlp.")
            )
        return self._norm(x, "model.norm") @ self.tensors["lm_head.weight"].T

    def greedy(self, prompt: list[int], new: int) -> list[int]:
        """The `new` most likely tokens after a prompt, one after the other."""
        tokens = list(prompt)
        for _ in range(new):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _has_experts(self, layer: int) -> bool:
        return layer >= self.config["first_k_dense_replace"] and layer % self.config.get("moe_layer_freq", 1) == 0

    def _norm(self, x: Array, name: str, eps: float | None = None) -> Array:
        eps = self.config["rms_norm_eps"] if eps is None else eps
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * self.tensors[name + ".weight"]

    def _linear(self, x: Array, name: str) -> Array:
        product: Array = x @ self.tensors[name + ".weight"].T
        return product + self.tensors.get(name + ".bias", 0.0)

    def _attend(self, x: Array, name: str) -> Array:
        """The expanded form: keys and values of each head from the latents of all tokens."""
        config, tokens = self.config, len(x)
        heads, nope, rope = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
        if config["q_lora_rank"] is None:
            q = self._linear(x, name + "q_proj")
        else:
            compressed = self._norm(self._linear(x, name + "q_a_proj"), name + "q_a_layernorm", LATENT_EPS)
            q = self._linear(compressed, name + "q_b_proj")
        q = q.reshape(tokens, heads, nope + rope)
        latents = self._linear(x, name + "kv_a_proj_with_mqa")
        rank = config["kv_lora_rank"]
        normed = self._norm(latents[:, :rank], name + "kv_a_layernorm", LATENT_EPS)
        both = self._linear(normed, name + "kv_b_proj").reshape(tokens, heads, -1)
        rotated = self._rotate(latents[:, None, rank:])
        scores = np.einsum("qhd,khd->hqk", q[..., :nope], both[..., :nope])
        scores += np.einsum("qhd,kd->hqk", self._rotate(q[..., nope:]), rotated[:, 0])
        scores *= self._magnitude("mscale_all_dim") ** 2 / math.sqrt(nope + rope)
        scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
        mixed = np.einsum("hqk,khd->qhd", softmax(scores), both[..., nope:])
        return self._linear(mixed.reshape(tokens, -1), name + "o_proj")

    def _magnitude(self, key: str) -> float:
        scaling = self.config["rope_scaling"] or {}
        mscale, factor = scaling.get(key, 0), scaling.get("factor", 1)
        return 0.1 * mscale * math.log(factor) + 1 if mscale and factor > 1 else 1.0

    def _rotate(self, x: Array) -> Array:
        """Rotate the pairs of neighbours of x [T, heads, rope_dim]."""
        angles = np.outer(np.arange(len(x)), self._frequencies(x.shape[-1]))[:, None]
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
        turned *= self._magnitude("mscale") / self._magnitude("mscale_all_dim")
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)

    def _frequencies(self, dim: int) -> Array:
        """YaRN's radians per position, of each pair."""
        scaling, base = self.config["rope_scaling"], self.config.get("rope_theta", 10000.0)
        plain: Array = base ** -(np.arange(0, dim, 2) / dim)
        if not scaling:
            return plain
        trained = scaling["original_max_position_embeddings"]

        def pair(turns: float) -> float:
            return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(pair(scaling["beta_fast"])), 0), min(math.ceil(pair(scaling["beta_slow"])), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high > low else 0.001), 0, 1)
        return plain / scaling["factor"] * ramp + plain * (1 - ramp)

    def _mlp(self, x: Array, name: str) -> Array:
        gate, up = self._linear(x, name + "gate_proj"), self._linear(x, name + "up_proj")
        return self._linear(gate / (1 + np.exp(-gate)) * up, name + "down_proj")

    def _mixture(self, x: Array, name: str) -> Array:
        out = self._mlp(x, name + "shared_experts.")
        for row, (experts, weights) in enumerate(map(self._route, self._linear(x, name + "gate"), [name] * len(x))):
            for expert, weight in zip(experts, weights, strict=True):
                out[row] += weight * self._mlp(x[row : row + 1], f"{name}experts.{expert}.")[0]
        return out

    def _route(self, scores: Array, name: str) -> tuple[Array, Array]:
        """The experts of one token, and their weights."""
        config, top_k = self.config, self.config["num_experts_per_tok"]
        third = config["topk_method"] == "noaux_tc"
        weights = 1 / (1 + np.exp(-scores)) if third else softmax(scores)
        values = weights + self.tensors[name + "gate.e_score_correction_bias"] if third else weights.copy()
        if config["topk_method"] != "greedy":
            groups = np.sort(values.reshape(config["n_group"], -1), axis=1)
            worth = groups[:, -2:].sum(axis=1) if third else groups[:, -1]
            worst = np.argsort(-worth)[config["topk_group"] :]
            values.reshape(config["n_group"], -1)[worst] = -np.inf
        chosen = np.argsort(-values)[:top_k]
        picked = weights[chosen]
        if config["norm_topk_prob"]:
            picked = picked / picked.sum()
        if third or not config["norm_topk_prob"]:
            picked = picked * config["routed_scaling_factor"]
        return chosen, picked


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
