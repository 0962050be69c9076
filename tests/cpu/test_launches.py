"""Every kernel that an engine launches for requests was launched before them, so no request waits for a compiler."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from tests.cpu import checkpoints, tiny
from tests.cpu.attention import shaped
from tests.cpu.launches import Launches
from weft import LLM, SamplingParams
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.shape import Experts, LatentAttention
from weft.ranks.kernels import triton, warm
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.batch import ExpandedRow
from weft.ranks.kernels.held import DenseLatentProducts
from weft.ranks.kernels.latents import AbsorbedQueries, LatentDims, attend_expanded
from weft.ranks.kernels.matrices import ExpertStack
from weft.ranks.kernels.plain import create_plain_kernels
from weft.ranks.kernels.triton import attention, pointwise, products, tuning
from weft.ranks.kernels.triton.kernels import TritonMatrices
from weft.ranks.kernels.triton.latents import TritonLatents
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.worker import graphs, runner

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

CPU = torch.device("cpu")
HOPPER_BYTES = 227 << 10  # of shared memory of a program
PROCESSORS = 6
PROMPTS = [[1, 5, 9], [4], list(range(3, 40)), [7] * 18, *([3 + i, 5] for i in range(12))]
ASKED = [
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=7, ignore_eos=True),
    SamplingParams(top_k=5, top_p=0.9, min_p=0.1, max_tokens=4, ignore_eos=True),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, max_tokens=5, ignore_eos=True),
    SamplingParams(logprobs=3, prompt_logprobs=2, max_tokens=3, ignore_eos=True),
    SamplingParams(logit_bias={5: 3.0}, allowed_token_ids=[5, 6, 7], min_tokens=2, max_tokens=4, ignore_eos=True),
]
TABLE = tuning.Tunings(
    {1: tuning.DECODE, 8: replace(tuning.DECODE, warps=2), 64: tuning.DECODE_CANDIDATES[-1]}, tuning.PREFILL
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launches:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(triton, "multiprocessor_count", lambda device: PROCESSORS)
    return Launches(monkeypatch)


def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.ModelRunner, "_agree_on_captures", lambda self: True)
    monkeypatch.setattr(runner, "CudaGraphs", lambda: lambda run: (run(), run)[1])
    monkeypatch.setattr(graphs, "graph_sizes", lambda most: [1, 2, 4, 12])


ENGINES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen2-window", {"quantization": "int4"}),
    ("llama-biased", {"quantization": "int8", "max_num_batched_tokens": 200}),
    ("mistral", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ("tiny", {"tensor_parallel_size": 2, "quantization": "int4"}),
    ("llama", {"pipeline_parallel_size": 2, "max_num_batched_tokens": 24}),
    ("qwen3-moe", {}),
    ("gpt-oss", {"quantization": "int4", "max_num_batched_tokens": 200}),
]
EAGER = ("qwen3", "llama-biased", "llama", "gpt-oss")  # with graphs all; without, what differs most


@pytest.mark.parametrize(
    ("graphed", "name", "how"),
    [
        pytest.param(
            graphed,
            name,
            how,
            marks=[pytest.mark.long] * (not graphed and name not in EAGER),
            id=f"{'graphs' if graphed else 'eager'}-{name}-{', '.join(how) or 'plain'}",
        )
        for graphed in (False, True)
        for name, how in ENGINES
    ],
)
def test_nothing_new_is_launched_while_requests_run(
    name: str, how: dict, graphed: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    if graphed:
        captured(monkeypatch)
    folder = tmp_path_factory.mktemp("launches")
    path = tiny.write(folder / name) if name == "tiny" else checkpoints.make(name, folder)
    common = {"dtype": "float16", "attention_backend": "triton", "executor": "inline", "max_num_seqs": 14}
    with LLM(str(path), skip_tokenizer_init=True, load_format="dummy", **common, **how) as llm:
        warm = [*launches.variants]
        for asked in ASKED:
            llm.generate(PROMPTS, asked)
            llm.generate(PROMPTS[:1], asked)
        llm.generate(PROMPTS, [ASKED[i % len(ASKED)] for i in range(len(PROMPTS))])
    assert {it.partition("(")[0] for it in warm} >= {"_decode", "_prefill", "_survey", "_filter", "_draw"}
    assert [it for it in launches.variants if it not in warm] == []


@pytest.mark.parametrize("tunings", [tuning.DEFAULT, TABLE], ids=["one", "table"])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_attention_warms_what_any_number_of_rows_launches(
    tunings: tuning.Tunings, kv_heads: int, launches: Launches
) -> None:
    shape = shaped(torch.float16, q_heads=16, kv_heads=kv_heads, rows=300, windows=(None, 40))
    backend = attention.TritonAttention(132, tunings)
    given = backend.launches(shape, CPU)
    warm.warm_kernels(given, CPU)
    before = [*launches.variants]
    assert len(launches.of("_prefill")) == 2
    sizes = len(given[0]) // 2
    assert len(launches.of("_decode")) == 2 * sizes <= 12
    for rows in range(1, 301, 7):
        for window in shape.windows:
            backend.attend(*attention.attention_inputs.decode_inputs(shape, CPU, [3] * rows), shape.scale, window)
    assert [*launches.variants] == before


@pytest.mark.parametrize(("hopper", "heads"), [(False, 20), (True, 16), (True, 128)])
def test_latent_attention_warms_what_any_step_launches(
    hopper: bool, heads: int, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in parts of their contexts and in whole ones, wide programs, short prompts, and expanded ones of any number
    of tokens and some heads at a time."""
    spec = LatentAttention(
        heads=heads, kv_lora_rank=512, q_lora_rank=None, scale=0.1, nope_dim=128, rope_dim=64, v_dim=128
    )
    limits = {"rows": 300, "length": 5000, "tokens": 4096}
    shape = shaped(torch.bfloat16, q_heads=heads, kv_heads=heads, head_dim=192, latent=spec, **limits)
    kernels = replace(
        create_plain_kernels(), latents=TritonLatents(132, HOPPER_BYTES if hopper else 99 << 10, warp_groups=hopper)
    )
    warm.warm_kernels(kernels.latents.launches(shape, CPU), CPU)
    before = [*launches.variants]
    assert {it.partition("(")[0] for it in before} == {"_decode_latents", "_prefill_latents", "_attend_expanded"}
    dims = LatentDims.of(spec, heads)
    absorbed = replace(shape, kv_heads=1, head_dim=576, latent=None)
    for rows in (1, 2, 16, 17, 33, 66, 132, 264, 300):
        q, cache, batch = attention.attention_inputs.decode_inputs(absorbed, CPU, [3] * rows)
        kernels.latents.attend(AbsorbedQueries.of(q, 512), KVCache.of_latents(cache.keys, 512), batch, 0.1)
    products = DenseLatentProducts(torch.zeros(heads * 256, 512, dtype=torch.bfloat16), dims)
    monkeypatch.setattr("weft.plan.memory.EXPANDED_BYTES", 200 * 640 * 13)  # 13 heads at once, then the rest
    for context in (200, 301):
        q, cache, batch = attention.attention_inputs.decode_inputs(absorbed, CPU, [context])
        latents = KVCache.of_latents(cache.keys, 512)
        for tokens in (171, 190):
            out = torch.zeros(tokens, heads * 128, dtype=torch.bfloat16)
            q = torch.zeros(tokens, heads, 192, dtype=torch.bfloat16)
            row = ExpandedRow(slice(0, tokens), context, batch.tables[0])
            attend_expanded(kernels.latents, products, q, latents, row, 0.1, out)
    assert [*launches.variants] == before


@pytest.mark.parametrize("held", [16, 128])
@pytest.mark.parametrize("type", [None, "MXFP4"])
def test_experts_warm_what_any_number_of_tokens_launches(type: str | None, held: int, launches: Launches) -> None:
    spec = Experts(count=128, top_k=8, width=96)

    def stack(rows: int, cols: int) -> ExpertStack:
        if type is None:
            return ExpertStack("", torch.zeros(held, rows, cols, dtype=torch.bfloat16), None)
        return ExpertStack("", QuantisedWeight.empty(type, rows, Span(0, cols), torch.bfloat16, CPU, (held,)), None)

    matrices = TritonMatrices(132)
    product = matrices.experts(spec, stack(192, 64), stack(64, 96), 0)
    warm.warm_kernels(matrices.launches(8192), CPU)
    before = [*launches.variants]
    assert 2 * 4 <= len(launches.of("_multiply_experts")) <= 2 * 2 * len(products.TILES)
    for tokens in (*range(1, 300), *range(300, 8193, 99), 8192):
        zeros = torch.zeros(tokens, 8)
        product(torch.zeros(tokens, 64, dtype=torch.bfloat16), zeros.long(), zeros)
    assert [*launches.variants] == before


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(6144, 4096), (64, 14336), (32_768, 1024), (96, 96)])
def test_products_warm_what_any_number_of_rows_launches(rows: int, cols: int, biased: bool, launches: Launches) -> None:
    bias = torch.zeros(rows, dtype=torch.bfloat16) if biased else None
    weight = QuantisedWeight.empty("Q4_1", rows, Span(0, cols), torch.bfloat16, CPU)
    product = products.create_quantised_matrix(weight, bias, 132)
    warm.warm_kernels([product.launches(8192)], CPU)
    before = [*launches.variants]
    assert len(launches.of("_multiply")) <= 2 * len(products.TILES)
    for tokens in range(1, products.MANY):
        product(torch.zeros(tokens, cols, dtype=torch.bfloat16))
    assert [*launches.variants] == before


def test_threads_begin_with_one_launch_of_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: begun.append(str(device)))
    monkeypatch.setattr(warm.torch, "zeros", lambda *dims, device: begun.append(str(device)))
    seen: list[str] = []

    def launch(name: str) -> None:
        assert torch.is_inference_mode_enabled() and threading.current_thread().name.startswith("weft-warm")
        seen.append(name)

    groups = [[partial(launch, f"{kernel}{n}") for n in range(4)] for kernel in "ab"]
    warm.warm_kernels([*groups, []], torch.device("cuda:1"))
    assert seen[:2] == ["a0", "b0"] and len({*seen}) == len(seen) == 8 and {*begun} == {"cuda:1"}
    warm.warm_kernels([], torch.device("cuda:1"))

    def broken() -> None:
        raise RuntimeError("no code for this GPU")

    with pytest.raises(RuntimeError, match="no code"):
        warm.warm_kernels([[broken]], torch.device("cuda:1"))


def test_a_recorder_tells_variants_apart(launches: Launches) -> None:
    """Variants differ as Triton's do: by dtype, by alignment, by divisibility by 16, by constants."""
    weight = torch.ones(96, dtype=torch.float16)
    wide = torch.ones(4, 128, dtype=torch.float16)
    norm = pointwise.norm
    norm(wide[:, :96].contiguous(), None, weight, 1e-6)
    norm(wide[:2, :96].contiguous(), None, weight, 1e-6)
    assert len(launches.variants) == 1
    norm(wide[:, :95].contiguous(), None, weight, 1e-6)
    norm(wide[:, :96].contiguous(), wide[:, :96].contiguous(), weight, 1e-6)
    norm(wide[:, :96].float(), None, weight, 1e-6)
    norm(torch.ones(193, dtype=torch.float16)[1:].view(2, 96), None, weight, 1e-6)
    assert len(launches.variants) == 5
