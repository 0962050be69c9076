"""Synthetic models for measurements: a Llama's shape with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

HEAD = 64  # columns of an attention head
LONGEST = 8192  # tokens of context
# Parameters of a layer over its width squared: query and output 2, key and value 1, an MLP of three matrices 2.75 wide.
PER_LAYER, FFN, GROUP = 11.25, 2.75, 2


class SyntheticModel(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a synthetic model."""

    name: str
    layers: int
    hidden: int
    vocab: int

    def config(self) -> dict[str, object]:
        """Content of config.json."""
        heads = self.hidden // HEAD
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": round(self.hidden * FFN / HEAD) * HEAD,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // GROUP,
            "head_dim": HEAD,
            "vocab_size": self.vocab,
            "max_position_embeddings": LONGEST,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    @contextmanager
    def folder(self) -> Iterator[str]:
        """A temporary directory that an engine can load with `load_format` "dummy"."""
        with TemporaryDirectory(prefix="weft-bench-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.config()))
            yield folder


def synthetic_of_size(name: str, nbytes: float, *, layers: int, vocab: int, number_bytes: int = 2) -> SyntheticModel:
    """A model whose layers and head have about `nbytes` bytes of weights, `number_bytes` for each parameter."""
    parameters, per_layer = nbytes / number_bytes, PER_LAYER * layers
    # The positive root of per_layer * width^2 + vocab * width = parameters.
    width = (sqrt(vocab * vocab + 4 * per_layer * parameters) - vocab) / (2 * per_layer)
    step = HEAD * GROUP
    return SyntheticModel(name=name, layers=layers, hidden=max(step, round(width / step) * step), vocab=vocab)


# Its steps take little but Python and kernel launches.
TINY = SyntheticModel(name="tiny", layers=1, hidden=HEAD * GROUP, vocab=1024)
