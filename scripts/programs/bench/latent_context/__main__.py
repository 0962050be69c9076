"""`scripts/bench latent-context`: decoding over a long context in DeepSeek's form, from latents and expanded.

Attention of one token in one layer: from the cache of latents, as Weft decodes, and in the expanded form, with keys and
values of all heads. They take turns on this machine's CPU in bf16; times are medians in milliseconds. Prints one JSON
object.

- `latents`: queries are absorbed, attend over the latents, and their results become values.
- `kept`: Weft's attention over keys and values that were kept for all heads.
- `kept, torch`: the same by `scaled_dot_product_attention`.
- `kept, Transformers`: the same behind the concatenation with which Transformers' dynamic cache grows by a token.
- `expanded anew`: the cache has latents, from which keys and values are projected in each step.

With `--layers N`, whole decode steps of a model with random weights: N layers in the form of DeepSeek-V2-Lite with
32 experts, its head and greedy sampling, as a rank runs them.

- `latents`: the engine as it is, with all layers in one call of C++.
- `latents, layer by layer`: the same kernels, called for each layer.
- `expanded anew`: layer by layer, with the cached latents projected to keys and values in each step.
- `kept`: layer by layer, with keys and values of all heads in the cache, which grow by a token, and Weft's attention.
- `Transformers`: `DeepseekV2ForCausalLM` (5.24), which projects the cached latents to keys and values in each step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from weft.checkpoint.checkpoint import resolve
from weft.config import EngineConfig
from weft.engine.core.params import SamplingParams
from weft.engine.core.step import Admission, StepPlan
from weft.engine.core.token_ids import TokenIds
from weft.machine.hardware import host
from weft.plan.layout import build_plan
from weft.ranks.comm import Links
from weft.ranks.kernels.attention import AttentionShape, KVCache
from weft.ranks.kernels.batch import Batch, ExpandedRow, Lengths
from weft.ranks.kernels.latents import LatentDims, LatentKernels, LatentProducts, attend_absorbed, attend_expanded
from weft.ranks.kernels.native import complete_kernels, create_attention
from weft.ranks.worker.worker import Worker

LITE = LatentDims(heads=16, rank=512, rope_dim=64, nope_dim=128, value_dim=128)  # DeepSeek-V2-Lite's
BLOCK = 16  # positions of a KV block
MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 49152,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "moe_intermediate_size": 384,
    "first_k_dense_replace": 1,
    "num_attention_heads": LITE.heads,
    "num_key_value_heads": LITE.heads,
    "q_lora_rank": None,
    "kv_lora_rank": LITE.rank,
    "qk_nope_head_dim": LITE.nope_dim,
    "qk_rope_head_dim": LITE.rope_dim,
    "v_head_dim": LITE.value_dim,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench latent-context", description=__doc__.split("\n")[0])
    parser.add_argument("--context", type=int, default=32768, help="tokens (default: 32768)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--layers", type=int, default=0, help="whole steps of a model of so many layers")
    parser.add_argument("--transformers", action="store_true", help="with --layers: Transformers' class too")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.layers:
        print(json.dumps(time_steps(given.layers, given.context, given.rounds, transformers=given.transformers)))
        return
    with torch.inference_mode():
        forms = create_forms(given.context)
        times: dict[str, list[float]] = {name: [] for name in forms}
        for number in range(-1, given.rounds):  # the first warms up
            for name, run in forms.items():
                began = time.perf_counter()
                run()
                if number >= 0:
                    times[name].append(1000 * (time.perf_counter() - began))
    print(json.dumps({"context": given.context, **{name: round(median(each), 2) for name, each in times.items()}}))


def create_forms(context: int) -> dict[str, Callable[[], object]]:
    """Each form as a call that computes the attention of one token."""
    device, dims, key_dim = torch.device("cpu"), LITE, LITE.nope_dim + LITE.rope_dim
    scale = key_dim**-0.5
    attention = AttentionShape(
        q_heads=dims.heads,
        kv_heads=dims.heads,
        head_dim=key_dim,
        windows=(None,),
        scale=scale,
        dtype=torch.bfloat16,
        cache_dtype=torch.bfloat16,
        block_size=BLOCK,
        rows=1,
        tokens=1,
        length=context,
    )
    kernels = complete_kernels(create_attention(device, attention), device, attention)
    batch = decode_batch(context)
    q = draw(1, dims.heads, key_dim)
    products = kernels.matrices.latent_products(draw(dims.heads * (dims.nope_dim + dims.value_dim), dims.rank), dims)
    latents = KVCache.of_latents(draw(context // BLOCK, BLOCK, 1, dims.rank + dims.rope_dim), dims.rank)
    kept_dims = context // BLOCK, BLOCK, dims.heads, key_dim
    kept = KVCache(draw(*kept_dims), draw(*kept_dims))
    keys, values = draw(1, dims.heads, context - 1, key_dim), draw(1, dims.heads, context - 1, dims.value_dim)
    return {
        "latents": partial(attend_absorbed, kernels.latents, products, q, latents, batch, scale),
        "kept": partial(kernels.attention.attend, q, kept, batch, scale, None),
        "kept, torch": partial(F.scaled_dot_product_attention, q[:, :, None], keys, values, scale=scale),
        "kept, Transformers": partial(attend_and_grow, q[:, :, None], keys, values, scale),
        "expanded anew": partial(expand_anew, kernels.latents, products, q, latents, batch, scale),
    }


def draw(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float32).mul_(0.1).bfloat16()


def decode_batch(context: int) -> Batch:
    """One row with the last token of a context, whose blocks lie in order."""
    numbers = torch.tensor([0, 1, context], dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int32)
    return Batch(
        tokens=none,
        positions=none,
        slots=none.long(),
        row_starts=numbers[:2],
        context=numbers[2:],
        tables=torch.arange(context // BLOCK, dtype=torch.int32)[None],
        order=torch.zeros(1, dtype=torch.int32),
        decodes=1,
        host=Lengths(numbers[:2].numpy(), numbers[2:].numpy()),
    )


def attend_and_grow(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    keys, values = (torch.cat((part, part[:, :, :1]), dim=2) for part in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values, scale=scale)


def expand_anew(
    kernels: LatentKernels, products: LatentProducts, q: torch.Tensor, latents: KVCache, batch: Batch, scale: float
) -> torch.Tensor:
    """`attend_by_latents` of one decode row in the expanded form."""
    out = q.new_empty(1, LITE.heads * LITE.value_dim)
    row = ExpandedRow(slice(0, 1), int(batch.context[0]), batch.tables[0])
    attend_expanded(kernels, products, q, latents, row, scale, out)
    return out


# --- whole steps ---


def time_steps(layers: int, context: int, rounds: int, *, transformers: bool) -> dict[str, Any]:
    """Median milliseconds of a step of one token by each engine, by the clock and in CPU time of the process. The
    engines of Weft take turns."""
    config = {**MODEL, "num_hidden_layers": layers, "max_position_embeddings": context + BLOCK}
    with TemporaryDirectory() as folder, torch.inference_mode():
        (Path(folder) / "config.json").write_text(json.dumps(config))
        engines = [
            WholeSteps(folder, context, form="latents"),
            WholeSteps(folder, context, form="latents, layer by layer"),
            WholeSteps(folder, context, form="expanded anew"),
            WholeSteps(folder, context, form="kept"),
        ]
        names = [engine.form for engine in engines]
        times: dict[str, list[float]] = {name: [] for name in names}
        cpu: dict[str, list[float]] = {name: [] for name in names}
        for number in range(-1, rounds):  # the first warms up
            for name, engine in zip(names, engines, strict=True):
                began = time.process_time()
                seconds = engine.time_step()
                if number >= 0:
                    times[name].append(1000 * seconds)
                    cpu[name].append(1000 * (time.process_time() - began))
        sizes = {name: engine.cache_bytes for name, engine in zip(names, engines, strict=True)}
        if transformers:
            engines.clear()
            times["Transformers"] = [1000 * seconds for seconds in time_transformers(config, context, min(rounds, 2))]
    step_ms, cpu_ms = ({name: round(median(each), 1) for name, each in made.items()} for made in (times, cpu))
    return {
        "layers": layers,
        "context": context,
        "step_ms": step_ms,
        "cpu_ms": cpu_ms,
        "cache_bytes_per_token": sizes,
    }


class WholeSteps:
    """A rank of the whole model, whose caches hold random numbers for all tokens but the last of a context.

    `form` is one of the names in the module's docstring.
    """

    def __init__(self, folder: str, context: int, *, form: str) -> None:
        self.form, self._context, self._number = form, context, 0
        fused, keeps = form == "latents", form == "kept"
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            block_size=BLOCK,
            max_model_len=context + BLOCK,
            max_num_seqs=1,
            max_num_batched_tokens=64,
        )
        plan = build_plan(config, resolve(folder, load_format="dummy"), host.probe_host())
        with nullcontext() if fused else mock.patch("weft.ranks.models.decoder.describe_layer", return_value=None):
            self._worker = Worker(plan, 0, Links())
            self._worker.load()
        assert self._worker.runner.model.is_fused == fused
        self._worker.allocate(context // BLOCK + 1)
        caches = self._worker.runner.caches
        self._kept: dict[int, KVCache] = {}
        for cache in caches:
            fill(cache.keys)
        if keeps:
            width = LITE.nope_dim + LITE.rope_dim
            for cache in caches:
                both = [torch.empty(*cache.keys.shape[:2], LITE.heads, width, dtype=torch.bfloat16) for _ in range(2)]
                for part in both:
                    fill(part)
                self._kept[cache.keys.data_ptr()] = replace(cache, keys=both[0], values=both[1])
        held = [part for cache in self._kept.values() for part in (cache.keys, cache.values)]
        # Values are as long as keys only because Weft's attention wants them so.
        kept_bytes = LITE.heads * (LITE.nope_dim + LITE.rope_dim + LITE.value_dim) * 2 * len(caches)
        latent_bytes = sum(cache.keys[0, 0].nbytes for cache in caches)
        self.cache_bytes = kept_bytes if held else latent_bytes

    def time_step(self) -> float:
        """Compute the last token of the context; return the seconds."""
        context, first = self._context, self._number == 0
        blocks = list(range(context // BLOCK + 1))
        prompt = TokenIds.pack([7 + n % 1000 for n in range(context)])
        step = StepPlan(
            id=self._number,
            released=[],
            admitted=[Admission(0, 0, SamplingParams(temperature=0), prompt, [])] if first else [],
            slots=[0],
            starts=[context - 1],
            counts=[1],
            tokens=[7],
            blocks=[[blocks if first else []]],
            samples=[True],
            draft_counts=[0],
        )
        self._number += 1
        forms = {"kept": self._attend_kept, "expanded anew": expand_anew}
        attend = forms.get(self.form)
        with mock.patch("weft.ranks.layers.latent.attend_by_latents", attend) if attend else nullcontext():
            began = time.perf_counter()
            self._worker.execute(step)
            return time.perf_counter() - began

    def _attend_kept(
        self, _: LatentKernels, products: LatentProducts, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float
    ) -> torch.Tensor:
        """`attend_by_latents` over kept keys and values: those of the step's token are added first."""
        kept, slot = self._kept[cache.keys.data_ptr()], int(batch.slots[0])
        latent = cache.keys.flatten(0, 2)[slot : slot + 1]
        keys, values = products.expand(latent, slice(0, LITE.heads))
        kept.keys.flatten(0, 1)[slot, :, : LITE.nope_dim] = keys[0]
        kept.keys.flatten(0, 1)[slot, :, LITE.nope_dim :] = latent[0, LITE.rank :]
        kept.values.flatten(0, 1)[slot, :, : LITE.value_dim] = values[0]
        mixed = self._worker.runner.kernels.attention.attend(q, kept, batch, scale, None)
        return mixed.view(1, LITE.heads, -1)[..., : LITE.value_dim].reshape(1, -1)


def fill(tensor: torch.Tensor) -> None:
    """Give a cache small random numbers, the same in every 64 blocks."""
    some = torch.randn(tensor[:64].shape).mul_(0.1).to(tensor.dtype)
    for block in tensor.split(64):
        block.copy_(some[: len(block)])


def time_transformers(config: dict[str, Any], context: int, rounds: int) -> list[float]:
    """Seconds of each step of Transformers' own class, in bf16, over a cache of random latents."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DynamicCache

    torch.set_default_dtype(torch.bfloat16)
    try:
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**config)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    seconds = []
    cache = DynamicCache(config=model.config)
    for layer in range(config["num_hidden_layers"]):
        latents, rotated = (draw(1, 1, context - 1, width) for width in (LITE.rank, LITE.rope_dim))
        cache.update(latents, rotated, layer)
    for number in range(-1, rounds):
        began = time.perf_counter()
        model(input_ids=torch.tensor([[7]]), cache=cache, use_cache=True)
        if number >= 0:
            seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
