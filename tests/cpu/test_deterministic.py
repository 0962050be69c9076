"""--deterministic: a request's tokens and logprobs, to the last bit, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cpu.checkpoints import VOCAB, make
from tests.cpu.layouts import plan_for
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.checkpoint.architectures.library import PREFIX, LibraryModel
from weft.checkpoint.checkpoint import resolve
from weft.config import EngineConfig
from weft.engine.core import kv
from weft.engine.frontend.outputs import RequestOutput
from weft.errors import ConfigError
from weft.machine.hardware import host
from weft.machine.hardware.cpu import probe_cpu
from weft.plan.backends import AttentionSpec
from weft.plan.determinism import FEATURES, fixed_order_backend
from weft.plan.layout import build_plan

pytestmark = pytest.mark.skipif(not set(FEATURES) <= set(probe_cpu().features), reason="shown for CPUs with AVX2 only")
REQUESTS, NEW, LONGEST = 10, 20, 100
KV_TOKENS = 240  # of two or three requests
# Model and how it runs; sums over ranks are those of C++, in shared memory. In float32 no difference is rounded away.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("qwen2", {}),
    "float32": ("qwen2", {"dtype": "float32"}),
    "int4": ("qwen2", {"quantization": "int4"}),
    "int8": ("qwen2", {"quantization": "int8", "dtype": "float32"}),
    "tp2": ("qwen2", {"tensor_parallel_size": 2}),
    "tp2 q4_0": ("qwen2", {"tensor_parallel_size": 2, "quantization": "q4_0", "dtype": "float32"}),
    "guesses": ("qwen2", {"guesses": True}),
    # In blocks of 16 tokens, CPUs that multiply bf16 have a way of their own to attend.
    "large blocks": ("qwen2", {"block_size": 16}),
    "tp2 int4 in large blocks": ("qwen2", {"block_size": 16, "tensor_parallel_size": 2, "quantization": "int4"}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("qwen2", {"quantization": "fp8", "dtype": "float32"}),
    "tp3 int8": ("qwen2", {"tensor_parallel_size": 3, "quantization": "int8"}),
    "processes": ("qwen2", {"tensor_parallel_size": 2, "quantization": "int4", "executor": "processes"}),
    "stages": ("qwen2", {"pipeline_parallel_size": 2, "dtype": "float32"}),
    "experts": ("qwen2-moe", {"dtype": "float32"}),
    "expert parallel": ("qwen3-moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True, "dtype": "float32"}),
    # Whose blocks behind the window are freed: few are left to want more.
    "windows": ("mistral", {"dtype": "float32", "preempts": False}),
    "sinks": ("gpt-oss", {"dtype": "float32", "preempts": False}),
    "latents": ("deepseek-v3", {"dtype": "float32"}),
}
LIBRARY = LibraryModel(config="", layer="", embedding="", head=(), width=0, kinds=(), layers=())
BATCHES = 4  # of each case in the fast tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deterministic")


def checkpoint(name: str, folder: Path) -> Path:
    return folder / name if (folder / name).exists() else make(name, folder)


def answer(output: RequestOutput) -> tuple[list[int], list[dict[int, float]]]:
    """The tokens, and the logprobs of each and of the likeliest ones."""
    (choice,) = output.outputs
    assert choice.logprobs is not None
    return list(choice.token_ids), [{token: one.logprob for token, one in found.items()} for found in choice.logprobs]


def request(number: int) -> tuple[dict[str, list[int]], SamplingParams]:
    """A prompt that begins like some others and goes on in its own way, greedy or sampled."""
    draw = Random(number)
    ids = [number % 3 + 5] * draw.randrange(0, 40) + [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 40))]
    params = SamplingParams(
        temperature=float(number % 2),
        seed=number,
        max_tokens=NEW,
        ignore_eos=True,
        logprobs=2,
        top_p=0.9,
        repetition_penalty=1.0 + number % 4 / 8,
    )
    return {"prompt_token_ids": ids}, params


def differences(
    path: Path,
    batches: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    guesses: bool = False,
    preempts: bool = True,
    block_size: int = 4,
    **how: Any,
) -> int:
    """Number of answers in random batches, chunked, preempted and after prefix hits, that are not those of alone. With
    `guesses` a draft model drafts for the batches, which is the model itself."""
    requests = [request(number) for number in range(REQUESTS)]
    given = {"dtype": "bfloat16", "skip_tokenizer_init": True, "executor": "inline", "max_model_len": LONGEST, **how}
    given["block_size"] = block_size
    with LLM(str(path), enable_prefix_caching=False, **given) as llm:
        alone = [answer(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt, params in requests]
    with monkeypatch.context() as patch:
        patch.setattr(kv, "GROWTH", 1)
        ranks = {name: how[name] for name in how if name.endswith("_parallel_size")}
        plan = plan_for(path, "whole", dtype=given["dtype"], block_size=block_size, **ranks)
        block_bytes = max(plan.block_bytes(place.rank) for place in plan.places) * (1 + guesses)
        small = {
            "kv_cache_memory_bytes": KV_TOKENS // block_size * len(plan.kv_layout.groups) * block_bytes,
            "max_num_batched_tokens": 37,
        }
        draft = {"speculative_config": {"model": str(path), "num_speculative_tokens": 3}} if guesses else {}
        different = 0
        with LLM(str(path), **small, **given, **draft) as llm:
            draw, cached = Random(1), 0
            for _ in range(batches):
                chosen = [draw.randrange(REQUESTS) for _ in range(draw.randrange(1, 2 * REQUESTS))]
                prompts, params = zip(*(requests[number] for number in chosen), strict=True)
                outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
                cached += sum(output.num_cached_tokens for output in outputs)
                different += sum(answer(one) != alone[number] for one, number in zip(outputs, chosen, strict=True))
            stats = llm.stats()
        assert cached and (stats.preemptions or not preempts), (cached, stats)
        assert not guesses or stats.accepted_tokens, stats
    return different


@pytest.mark.usefixtures("shared_memory")
@pytest.mark.parametrize("case", CASES)
def test_answers_do_not_depend_on_the_batch(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, how = CASES[case]
    assert differences(checkpoint(name, folder), BATCHES, monkeypatch, deterministic=True, **how) == 0


def test_without_the_flag_they_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests would show nothing."""
    assert differences(checkpoint("qwen2", folder), BATCHES, monkeypatch, dtype="float32") > 0


@pytest.mark.long
@pytest.mark.usefixtures("shared_memory")
@pytest.mark.parametrize(("case", "batches"), [*((case, 200) for case in CASES), *((case, 20) for case in MORE)])
def test_many_batches(case: str, batches: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, how = (CASES | MORE)[case]
    assert differences(checkpoint(name, folder), batches, monkeypatch, deterministic=True, **how) == 0


@pytest.mark.parametrize(
    ("name", "how", "value"),
    [
        ("llama", {"attention_backend": "torch"}, "--attention-backend torch"),
        ("llama", {"dtype": "float16"}, "float16"),
        ("llama-mha-odd", {}, "10 dims"),
        ("gemma3", {}, "torch"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(name: str, how: dict[str, Any], value: str, folder: Path) -> None:
    path = checkpoint(name, folder)
    with refuses(ConfigError, "not-deterministic", value):
        plan_for(path, "whole", deterministic=True, **how)


def test_gpus_and_groups_that_share_experts_are_refused(folder: Path) -> None:
    shape = plan_for(checkpoint("qwen3-moe", folder), "whole").shape
    spec, here = AttentionSpec.from_shape(shape, "bfloat16"), host.probe_host()
    config = EngineConfig(model="", deterministic=True)
    with refuses(ConfigError, "not-deterministic", "--device cpu"):
        fixed_order_backend(config, shape, spec, here, ["cuda:0"])
    groups = EngineConfig(model="", deterministic=True, enable_expert_parallel=True, data_parallel_size=2)
    with refuses(ConfigError, "not-deterministic", "--data-parallel-size"):
        fixed_order_backend(groups, shape, spec, here, ["cpu", "cpu"])
    fixed = fixed_order_backend(config, shape, spec, here, ["cpu"])
    assert fixed and fixed.value == "cpu"
    library = replace(shape, architecture=f"{PREFIX}Olmo2ForCausalLM", library=LIBRARY)
    with refuses(ConfigError, "not-deterministic", "Olmo2ForCausalLM"):
        fixed_order_backend(config, library, spec, here, ["cpu"])


def test_vllms_variable_counts_where_it_can(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    plans = {}
    for name in ("llama", "gemma3"):
        path = str(checkpoint(name, folder))
        plans[name] = build_plan(EngineConfig(model=path), resolve(path), host.probe_host())
    assert plans["llama"].deterministic and plans["llama"].attention_backend == "cpu"
    assert not plans["gemma3"].deterministic
    assert caplog.text.count("VLLM_BATCH_INVARIANT") == 1
