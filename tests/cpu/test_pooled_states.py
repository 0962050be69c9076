"""Embeddings and scores beside those that Transformers' hidden states and logits give."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from tests.cpu import checkpoints, tiny
from tests.cpu.layouts import LAYOUTS
from tests.pure.letters import text_tools
from tests.refusals import refuses
from weft import LLM, AsyncLLM, SamplingParams
from weft.engine.core.step import StepResult
from weft.errors import RequestError
from weft.ranks.worker.device import ToHost
from weft.ranks.worker.pooling import NOT_FINITE, PooledRows

pytestmark = pytest.mark.usefixtures("small_caches")

LENGTH = 128
PROMPTS = [[1, 5, 9, 33, 7], list(range(3, 60)), [1], [40, 41, 42] * 9, [*range(3, 60), 9], [7] * LENGTH]
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "distributed_executor_backend": "inline",
    "max_model_len": LENGTH,
    "max_num_batched_tokens": 24,  # long prompts are read in chunks, short ones beside them
    "kv_cache_memory_bytes": 2**22,
}
OTHERS: dict[str, dict[str, Any]] = {
    "lookahead": {"async_scheduling": True},
    "dp2 x ep2": {"data_parallel_size": 2, "enable_expert_parallel": True},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SMALL = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}


def states(path: Path, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Transformers' last hidden states of prompts, of length 1."""
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        vectors = [model(torch.tensor([list(prompt)])).last_hidden_state[0, -1].numpy() for prompt in prompts]
    return [vector / np.linalg.norm(vector) for vector in vectors]


def at_rest(llm: LLM) -> bool:
    stats = llm.stats()
    return (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def same(embedded: Sequence[Any], truth: Sequence[np.ndarray]) -> None:
    for output, wanted in zip(embedded, truth, strict=True):
        assert np.abs(np.array(output.embedding) - wanted).max() < 2e-5


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("qwen3", "whole"),
        ("qwen3", "tp2"),
        ("qwen3", "pp2"),
        ("qwen3", "lookahead"),
        ("gemma3", "tp2"),
        ("qwen3-moe", "dp2 x ep2"),
        pytest.param("olmo2", "whole", marks=pytest.mark.long),
    ],
)
def test_states_of_transformers(recipe: str, layout: str, tmp_path: Path) -> None:
    """At once and in chunks, from the prefix cache, and beside answers, whose tokens stay as they are."""
    path = checkpoints.make(recipe, tmp_path)
    truth = states(path, PROMPTS)
    with LLM(path, **ENGINE, **(LAYOUTS | OTHERS)[layout], convert="embed", skip_tokenizer_init=True) as llm:
        same(llm.embed(PROMPTS), truth)
        again = llm.embed(PROMPTS)
        same(again, truth)
        assert sum(output.num_cached_tokens for output in again) > LENGTH
        alone = [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS[:4], GREEDY)]
        llm.reset_prefix_cache()
        answers: list[list[int]] = []

        def generate() -> None:
            answers.extend(answer.outputs[0].token_ids for answer in llm.generate(PROMPTS[:4], GREEDY))

        beside = threading.Thread(target=generate)
        beside.start()
        same(llm.embed(PROMPTS * 4), truth * 4)
        beside.join()
        assert answers == alone
        assert at_rest(llm)


def test_prompts_share_steps(tmp_path: Path) -> None:
    path = checkpoints.make("qwen3", tmp_path)
    prompts = [[3 + n, 4, 5] for n in range(64)]
    with LLM(path, **ENGINE, convert="embed", skip_tokenizer_init=True) as llm:
        before = llm.stats().steps
        same(llm.embed(prompts), states(path, prompts))
        assert llm.stats().steps - before == 64 * 3 // 24
        counts = llm.stats()
        assert counts.prompt_tokens == 64 * 3 and counts.generation_tokens == 0


def test_lengths_and_what_is_refused(tmp_path: Path) -> None:
    path = checkpoints.make("qwen3", tmp_path)
    with LLM(path, **ENGINE, convert="embed", skip_tokenizer_init=True) as llm:
        [whole] = llm.embed([PROMPTS[1]])
        [cut] = llm.embed([PROMPTS[1]], dimensions=10)
        short = np.array(whole.embedding[:10])
        assert np.allclose(cut.embedding, short / np.linalg.norm(short), atol=1e-6)
        assert cut.outputs.embedding == cut.embedding and cut.prompt_token_ids == PROMPTS[1]
        same(llm.embed([[7] * 200], truncate_prompt_tokens=-1), states(path, [[7] * LENGTH]))
        assert llm.embed([]) == []
        with refuses(RequestError, "prompt-too-long", 129, 128):
            llm.embed([[7] * (LENGTH + 1)])
        with refuses(RequestError, "invalid-dimensions", 49, 48):
            llm.embed("a", dimensions=49)
        with refuses(RequestError, "token-id-out-of-range", 999):
            llm.embed([999])
        for wrong, code in (
            (5, "invalid-prompt"),
            ([["a"]], "prompt-not-token-ids"),
            ({}, "prompt-dict-without-prompt"),
        ):
            with refuses(RequestError, code):
                llm.embed(wrong)  # type: ignore[arg-type]
        with refuses(RequestError, "tokenizer-missing"):
            llm.embed("a")
    with LLM(path, **ENGINE, skip_tokenizer_init=True) as llm:
        with refuses(RequestError, "model-does-not-embed", "--convert embed"):
            llm.embed([[1]])
        with refuses(RequestError, "model-does-not-score"):
            llm.score("a", "b")


@pytest.mark.parametrize("layout", ["whole", "pp2"])
def test_files_without_a_head(layout: str, tmp_path: Path) -> None:
    """Like those of Qwen3-Embedding-8B: the base model's names, and no head though it is not tied."""
    path = checkpoints.make("qwen3-biased", tmp_path)
    model = transformers.AutoModel.from_pretrained(path)
    base = tmp_path / "base"
    model.save_pretrained(base)
    declare(base, "Pooling", {"pooling_mode_lasttoken": True})
    with LLM(base, **ENGINE, **LAYOUTS[layout], skip_tokenizer_init=True) as llm:
        same(llm.embed(PROMPTS), states(path, PROMPTS))
        llm.swap_weights(base)
        same(llm.embed(PROMPTS), states(path, PROMPTS))
        with refuses(RequestError, "model-does-not-generate"):
            llm.generate([[1]], GREEDY)


def declare(path: Path, module: str, config: dict[str, Any]) -> None:
    """Write the files of a Sentence Transformers module."""
    (path / f"1_{module}").mkdir()
    (path / f"1_{module}/config.json").write_text(json.dumps(config))
    rows = [{"path": f"1_{module}", "type": f"sentence_transformers.models.{module}"}]
    rows.append({"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (path / "modules.json").write_text(json.dumps(rows))


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 with a tokenizer that, like Qwen3-Embedding's, ends every text with a token of its own."""
    path = tmp_path_factory.mktemp("spoken")
    torch.manual_seed(3)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    ids = {"bos_token_id": None, "eos_token_id": 257}
    config = transformers.Qwen3Config(**SMALL, **heads, **ids, tie_word_embeddings=True, initializer_range=0.3)
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(path)
    letters = text_tools().tokenizer
    assert letters is not None
    content = letters._hf_tokenizer.to_str().replace('"<bos>"', '"<|endoftext|>"')
    tokenizer = type(letters._hf_tokenizer).from_str(content)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.post_processor = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 256)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"add_bos_token": False, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


TEXTS = ["The sky is blue", "", "Water boils at 100 degrees", "é" * 20]


def test_texts(spoken: Path) -> None:
    """Their tokens are those of Transformers' tokenizer, with the one that ends them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(spoken)
    prompts = tokenizer(TEXTS)["input_ids"]
    assert all(prompt[-1] == 256 for prompt in prompts)
    with LLM(spoken, **{**ENGINE, "max_model_len": 1024}, convert="embed") as llm:
        embedded = llm.embed(TEXTS)
        assert [output.prompt_token_ids for output in embedded] == prompts
        truth = states(spoken, prompts)
        same(embedded, truth)
        wanted = [float(truth[0] @ vector) for vector in truth[2:]]
        assert np.allclose(llm.score(TEXTS[0], TEXTS[2:]), wanted, atol=1e-5)


OPENING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
CLOSING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
WEB = "Given a web search query, retrieve relevant passages that answer the query"


def published_scores(path: Path, query: str, documents: Sequence[str], instruction: str = WEB) -> list[float]:
    """Scores as the model card of Qwen3-Reranker computes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    opening, closing = (tokenizer.encode(text, add_special_tokens=False) for text in (OPENING, CLOSING))
    scores = []
    for document in documents:
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = [*opening, *tokenizer.encode(text, add_special_tokens=False), *closing]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        scores.append(torch.nn.functional.log_softmax(logits[[no, yes]], dim=0)[1].exp().item())
    return scores


@pytest.mark.parametrize("layout", ["whole", "tp2", "pp2"])
def test_scores_of_a_reranker(layout: str, spoken: Path) -> None:
    truth = published_scores(spoken, "Why?", TEXTS[2:])
    options = {**ENGINE, "max_model_len": 1024, "max_num_batched_tokens": 200}
    with LLM(spoken, **options, **LAYOUTS[layout], convert="classify") as llm:
        assert np.allclose(llm.score("Why?", TEXTS[2:]), truth, atol=1e-5)
        other = published_scores(spoken, "Why?", TEXTS[2:3], "Find it")
        assert np.allclose(llm.score("Why?", TEXTS[2], instruction="Find it"), other, atol=1e-5)
        assert np.allclose(llm.score(["Why?"] * 2, TEXTS[2:]), truth, atol=1e-5)
        assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 12  # it still answers
        assert at_rest(llm)


def test_numbers_that_are_not_finite_end_their_request_alone() -> None:
    numbers = ToHost(torch.tensor([1.0, 2.0, float("nan"), 4.0]))
    result = PooledRows([3, 5, 6], [2, 1, 1], numbers).add_to(StepResult(0, [], [], {}))
    assert {slot: np.frombuffer(row, "<f4").tolist() for slot, row in result.pooled.items()} == {3: [1, 2], 6: [4]}
    assert result.failed == {5: NOT_FINITE}


async def test_from_asyncio(tmp_path: Path) -> None:
    """The engine in processes of its own gives what one in this process gives. A cancelled task leaves nothing."""
    path = tiny.write(tmp_path / "tiny")
    options = {"load_format": "dummy", "dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 2**22}
    with LLM(path, **options, convert="embed") as local:
        truth = local.embed(["ab", [97, 98]])
        score = local.score("a", "b")
    async with AsyncLLM(path, **options, convert="embed") as llm:
        embedded = await llm.embed(["ab", [97, 98]])
        same(embedded, [np.array(output.embedding) for output in truth])
        assert np.allclose(await llm.score("a", "b"), score, atol=1e-5)
        assert await llm.embed([]) == []
        task = asyncio.create_task(llm.embed([[97] * 500] * 200))
        while not llm.stats.running:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while llm.stats.running or llm.stats.waiting or llm.stats.blocks_used:
            await llm.embed("a")
