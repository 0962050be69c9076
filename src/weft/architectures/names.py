"""Tensor names of each architecture in Hugging Face checkpoints.

Source: the modelling files of Transformers 5.23 and the headers of the published checkpoints. A fused tensor (`qkv`,
`gate_up`) is named once per part that it holds, in the order of the parts.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """Module names of one architecture; "" for a module that it does not have.

    Names of a layer's modules are relative to `layer`, names of an expert's modules to `expert`.

    - `norm_bias`: norms have a bias (LayerNorm, not RMSNorm).
    - `transposed`: matrices are stored as [inputs, outputs].
    - `head_norms`: query and key norms are per head; False: over all heads at once.
    - `expert_pairs`: one tensor holds gate and up of all experts, gate and up rows alternating.
    """

    embed: str = "model.embed_tokens"
    positions: str = ""
    layer: str = "model.layers.{layer}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    sinks: str = ""
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = ""
    norm: str = "model.norm"
    head: str = "lm_head"
    norm_bias: bool = False
    transposed: bool = False
    head_norms: bool = True
    router: str = "mlp.gate"
    router_bias: bool = False
    correction: str = ""  # added to the router's scores to balance the experts
    expert: str = "mlp.experts.{expert}."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    expert_pairs: bool = False
    shared: str = "mlp.shared_experts."

    @property
    def gated(self) -> bool:
        """True if the MLP multiplies its up projection by an activated gate."""
        return len(self.gate_up) == 2


LLAMA = Names()
PHI3 = Names(qkv=("self_attn.qkv_proj",) * 3, gate_up=("mlp.gate_up_proj",) * 2)
GEMMA2 = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
MIXTRAL = Names(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{expert}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)
QWEN = Names(
    embed="transformer.wte",
    layer="transformer.h.{layer}.",
    attention_norm="ln_1",
    qkv=("attn.c_attn",) * 3,
    out="attn.c_proj",
    mlp_norm="ln_2",
    gate_up=("mlp.w2", "mlp.w1"),
    down="mlp.c_proj",
    norm="transformer.ln_f",
)
GPT2 = Names(
    embed="wte",
    positions="wpe",
    layer="h.{layer}.",
    attention_norm="ln_1",
    qkv=("attn.c_attn",) * 3,
    out="attn.c_proj",
    mlp_norm="ln_2",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    norm="ln_f",
    norm_bias=True,
    transposed=True,
)
OPT = Names(
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{layer}.",
    attention_norm="self_attn_layer_norm",
    out="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    gate_up=("fc1",),
    down="fc2",
    norm="model.decoder.final_layer_norm",
    norm_bias=True,
)
GPT_OSS = Names(
    sinks="self_attn.sinks",
    router="mlp.router",
    router_bias=True,
    expert="mlp.experts.",
    expert_gate_up=("gate_up_proj",),
    expert_pairs=True,
)


def _vision_language(names: Names) -> Names:
    """Names of a language model inside a vision-language model; Weft leaves the vision part out."""
    outer = {field: "language_model." + getattr(names, field) for field in ("embed", "layer", "norm", "head")}
    return replace(names, **outer)


NAMES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen3MoeForCausalLM": LLAMA,
    "DeepseekV2ForCausalLM": LLAMA,
    "DeepseekV3ForCausalLM": replace(LLAMA, correction="mlp.gate.e_score_correction_bias"),
    "MiniMaxM2ForCausalLM": replace(MIXTRAL, head_norms=False, correction="block_sparse_moe.e_score_correction_bias"),
    "GptOssForCausalLM": GPT_OSS,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA2,
    "Gemma3ForConditionalGeneration": _vision_language(GEMMA2),
    "Mistral3ForConditionalGeneration": _vision_language(LLAMA),
    "Phi3ForCausalLM": PHI3,
    "QWenLMHeadModel": QWEN,
    "OPTForCausalLM": OPT,
    "GPT2LMHeadModel": GPT2,
}
