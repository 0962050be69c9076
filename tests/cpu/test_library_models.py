"""Models that run through Transformers' own classes: the same logits and tokens as in Transformers, in every layout."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.cpu import checkpoints
from tests.cpu.describing import ask_here
from tests.cpu.layouts import LAYOUTS, logits_of
from tests.cpu.test_parity import NEW, PROMPTS, greedy
from tests.refusals import refusal, refuses
from weft import LLM, SamplingParams
from weft.checkpoint.architectures.parameters import parameter_count
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.config import library
from weft.checkpoint.files.safetensors import read_directory
from weft.checkpoint.lookup import look_up
from weft.config import EngineConfig
from weft.errors import ModelError, PlanError
from weft.machine.hardware import host
from weft.plan.layout import build_plan
from weft.plan.plan import Plan
from weft.ranks.kernels.plain import create_plain_kernels
from weft.ranks.models.library.modules import MergedLinear, SharedProduct, kernel_norm

pytestmark = pytest.mark.usefixtures("small_caches")

GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
ask_child = library._ask_child


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_ask_child", ask_here)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module", params=checkpoints.LIBRARY_RECIPES)
def checkpoint(request: pytest.FixtureRequest, folder: Path) -> Path:
    return checkpoints.make(request.param, folder)


@pytest.fixture(scope="module")
def olmo2(folder: Path) -> Path:
    return checkpoints.make("olmo2", folder / "alone")


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> list[list[int]]:
    model = checkpoints.reference(checkpoint)
    return [greedy(model, prompt, NEW) for prompt in PROMPTS]


def plan_for(path: Path, layout: str = "whole", **config: Any) -> Plan:
    options = EngineConfig(**{"model": str(path), "dtype": "float32", **LAYOUTS[layout], **config})
    return build_plan(options, resolve(str(path), model_impl=options.model_impl), host.probe_host())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_a_norm_that_computes_the_same_is_the_kernels(dtype: torch.dtype) -> None:
    kernels = create_plain_kernels()
    plain, shifted = LlamaRMSNorm(32, eps=1e-5).to(dtype), Gemma2RMSNorm(32, eps=1e-5).to(dtype)
    for module in (plain, shifted):
        torch.nn.init.normal_(module.weight).requires_grad_(False)
    norm = kernel_norm(plain, kernels)
    assert norm is not None and norm.weight is plain.weight
    assert kernel_norm(shifted, kernels) is None and kernel_norm(torch.nn.LayerNorm(32), kernels) is None
    x = torch.randn(1, 3, 2, 32, dtype=dtype)
    torch.testing.assert_close(norm(x), plain(x))
    # A class that normalises in another dtype keeps its own norm.
    torch.testing.assert_close(norm(x.double()), plain(x.double()))


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["whole", "tp2", "pp2", "pp 1,1,1", "tp2 x pp2"])
def test_logits_agree_in_every_layout(checkpoint: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "pp 1,1,1", {"pipeline_split": (1, 1, 1)})
    plan = plan_for(checkpoint, layout)
    with torch.inference_mode():
        exact = checkpoints.reference(checkpoint)(torch.tensor([PROMPTS[1]])).logits[0]
    assert (logits_of(plan, PROMPTS[1]) - exact).abs().max() <= 1e-4 * exact.std()


def test_layers_that_read_the_same_tensor_are_one_product(folder: Path) -> None:
    """All of Cohere's parallel blocks; not OLMo 2's queries and keys, which all ranks gather for a norm."""
    qkv, gate_up = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
    expected = {"granite": (qkv, gate_up), "cohere": ((*qkv, *gate_up),), "starcoder2": (qkv,), "olmo2": (gate_up,)}
    for recipe, merged in expected.items():
        shape = plan_for(checkpoints.make(recipe, folder / "merged")).shape
        assert shape.library is not None and shape.library.merged == merged


def test_a_shared_product_is_that_of_the_tensor_it_is_called_with() -> None:
    weight = torch.randn(5, 4)
    calls: list[torch.Tensor] = []

    def multiply(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x @ weight.t()

    shared = SharedProduct(multiply, [2, 3])  # type: ignore[arg-type]
    first, second = MergedLinear(shared, 0), MergedLinear(shared, 1)
    x, y = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    for one in (x, y, x):
        torch.testing.assert_close(first(one), one @ weight[:2].t())
        torch.testing.assert_close(second(one), one @ weight[2:].t())
    assert len(calls) == 3
    # In any order, and with other tensors between.
    torch.testing.assert_close(second(x), x @ weight[2:].t())
    torch.testing.assert_close(first(y), y @ weight[:2].t())
    torch.testing.assert_close(first(x), x @ weight[:2].t())
    torch.testing.assert_close(first(x), x @ weight[:2].t())


def test_bytes_are_those_of_the_file(checkpoint: Path) -> None:
    plan = plan_for(checkpoint)
    assert plan.weight_bytes(0) == sum(info.nbytes for info in read_directory(checkpoint).values())
    halves = plan_for(checkpoint, "tp2")
    # Norms and biases are whole on both ranks; everything else is cut.
    assert plan.weight_bytes(0) < halves.weight_bytes(0) + halves.weight_bytes(1) < 1.1 * plan.weight_bytes(0)
    model = look_up(str(checkpoint))
    assert model.shape == plan.shape
    assert model.params == parameter_count(plan.shape) == plan.weight_bytes(0) // 4


@pytest.mark.each_value
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"tensor_parallel_size": 2, "max_num_batched_tokens": 20},
        {"pipeline_parallel_size": 2},
        {"max_num_batched_tokens": 7},  # chunked prefill, mixed with decode
        {"max_num_seqs": 1, "attention_backend": "torch"},
        {"block_size": 4, "async_scheduling": True},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_scheduling(checkpoint: Path, truth: list[list[int]], how: dict[str, Any]) -> None:
    with LLM(str(checkpoint), dtype="float32", skip_tokenizer_init=True, executor="inline", **how) as llm:
        first = llm.generate(PROMPTS, GREEDY)
        again = llm.generate(PROMPTS, GREEDY)  # now from the prefix cache
    assert [o.outputs[0].token_ids for o in first] == truth
    assert [o.outputs[0].token_ids for o in again] == truth
    assert first[1].num_cached_tokens == 0
    assert again[1].num_cached_tokens >= 48


def test_a_process_per_rank_sleep_and_other_weights(olmo2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the child's own report on the class. One rank: each would import Transformers."""
    monkeypatch.setattr(library, "_ask_child", ask_child)
    expected = greedy(checkpoints.reference(olmo2), PROMPTS[1], NEW)
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
    with LLM(str(olmo2), executor="processes", **options) as llm:
        assert llm.plan.shape.architecture == "transformers:Olmo2ForCausalLM"
        assert llm.plan.shape == plan_for(olmo2).shape
        assert llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].token_ids == expected
        llm.sleep(2)
        llm.wake_up()
        llm.swap_weights(olmo2)
        assert llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].token_ids == expected


def test_a_model_that_weft_runs_itself(folder: Path) -> None:
    """The choice is the user's: the same tokens from Weft's own model and through Transformers' class."""
    path = checkpoints.make("qwen3", folder)
    tokens = []
    for impl in ("weft", "transformers"):
        options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "executor": "inline"}
        with LLM(str(path), model_impl=impl, **options) as llm:
            assert (llm.plan.shape.library is None) == (impl == "weft")
            tokens.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)])
    assert tokens[0] == tokens[1]
    assert plan_for(path).shape.library is None, "auto takes Weft's own model"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_rounded_as_they_are_read(olmo2: Path, quantization: str) -> None:
    exact, rounded = (logits_of(plan_for(olmo2, quantization=q), PROMPTS[1]) for q in ("none", quantization))
    errors = (rounded - exact).abs().mean() / exact.std()
    assert 0 < errors < (0.02 if quantization == "int8" else 0.3)


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Configurations of models that are refused, by what is the matter."""
    sizes = {key: checkpoints.LIBRARY_SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 64}

    def config(name: str, **values: Any) -> dict[str, Any]:
        made = getattr(transformers, f"{name}Config")(**{**sizes, **values})
        return {"architectures": [f"{name}ForCausalLM"], **json.loads(made.to_json_string())}

    yield "experts", config("Olmoe", **heads)
    yield "latent attention", config("DeepseekV3")
    yield "recurrent states", config("Mamba")
    yield "softcapping", config("Gemma2", head_dim=8, **heads)
    yield (
        "rope of the longest text",
        config("Olmo2", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, **heads),
    )
    yield "quantised", {**config("Olmo2", **heads), "quantization_config": {"quant_method": "gptq", "bits": 4}}
    yield "attention of its own", config("StableLm", **heads)
    yield "embedding of its own", config("Gemma", head_dim=8, **heads)
    yield "a type that Transformers lacks", {"architectures": ["NewForCausalLM"], "model_type": "new"}
    yield "code of the checkpoint", {"model_type": "new", "auto_map": {"AutoModelForCausalLM": "new.NewModel"}}
    yield "an encoder", config("Bart")


def test_refused_classes(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    def resolve_dummy() -> object:
        return resolve(str(tmp_path), load_format="dummy", model_impl="transformers")

    lines = []
    for name, config in variants():
        (tmp_path / "config.json").write_text(json.dumps(config))
        lines.append(f"{name}\n  {refusal(resolve_dummy, tmp_path, transformers.__version__)}")
    golden("library_models.txt", "".join(lines))


def test_refused_cuts(olmo2: Path, folder: Path) -> None:
    with refuses(PlanError, "library-model-uneven-split", "tensor_split 2,1", "evenly"):
        plan_for(olmo2, "tp 2:1")
    with refuses(PlanError, "library-model-uneven-split", 3, 2, "KV heads"):
        plan_for(olmo2, "tp3")
    gpt2 = checkpoints.make("gpt2", folder)
    with refuses(PlanError, "library-model-without-tensor-plan", 2, "GPT2LMHeadModel"):
        plan_for(gpt2, "tp2", model_impl="transformers")
    with refuses(PlanError, "library-model-without-pipeline", 2, "GPT2LMHeadModel"):
        plan_for(gpt2, "pp2", model_impl="transformers")


def test_norms_over_heads_are_not_cut(tmp_path: Path) -> None:
    sizes = {**checkpoints.LIBRARY_SIZES, "use_qk_norm": True}
    transformers.CohereForCausalLM(transformers.CohereConfig(**sizes)).save_pretrained(tmp_path)
    with refuses(PlanError, "library-model-without-tensor-plan", 2, "q_norm.weight"):
        plan_for(tmp_path, "tp2")
    assert plan_for(tmp_path, "pp2").stages == 2


def test_without_transformers(olmo2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with refuses(ModelError, "transformers-not-installed", "weft-llm[transformers]"):
        resolve(str(olmo2), model_impl="transformers")
    with refuses(ModelError, "unknown-architecture", "Olmo2ForCausalLM", "weft-llm[transformers]"):
        resolve(str(olmo2))
    monkeypatch.undo()
    assert importlib.util.find_spec("transformers")
    with refuses(ModelError, "unknown-architecture", "Olmo2ForCausalLM"):
        resolve(str(olmo2), model_impl="weft")
