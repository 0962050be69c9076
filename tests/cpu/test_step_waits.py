"""Steps of every family of models on the stand-in for a card (fake_cuda.py): the host waits for nothing in them, and
copies from pinned memory only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

from tests.cpu import checkpoints
from tests.cpu.fake_cuda import Card, the_card  # noqa: F401
from weft import LLM, SamplingParams
from weft.ranks.kernels.batch import Batch
from weft.ranks.models.decoder import DecoderModel

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "executor": "inline",
    "max_model_len": 96,
    "kv_cache_memory_bytes": 1_000_000,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
}
# One that soon decodes, a short one, one that is expanded at once, and one that is read in chunks, the last beside rows
# that decode.
PROMPTS = [[3 + (7 * i + 3 * j) % 100 for j in range(count)] for i, count in enumerate((1, 4, 30, 44))]
# A recipe for each family and each kind of attention, feed-forward part and position; experts take long.
FAMILIES = ["llama", "phi3", "qwen2-window", "qwen3", "gemma3", "opt", "gpt2", "deepseek-v2-lite", "gpt-oss"]
SLOW = ["phi3-longrope", "mistral", "llama-dynamic", "qwen3-moe", "mixtral", "qwen2-moe", "deepseek-v2", "deepseek-v3"]


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in SLOW)])
def test_steps_wait_for_nothing(name: str, tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    path, batches = str(checkpoints.write_config(name, tmp_path, layers=2)), list[Batch]()
    params = [SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True) for _ in PROMPTS]
    with LLM(path, **COMMON, device="cpu", attention_backend="torch", async_scheduling=False) as llm:
        want = [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, params, use_tqdm=False)]
    forward = DecoderModel.hidden

    def hidden(self: DecoderModel, incoming: Any, caches: Any, batch: Batch) -> Any:
        batches.append(batch)
        return forward(self, incoming, caches, batch)

    monkeypatch.setattr(DecoderModel, "hidden", hidden)
    # Steps of several tokens a row run without graphs; those with graphs are in test_on_card.py.
    with LLM(path, **COMMON, device="cuda", attention_backend="triton", enforce_eager=True) as llm:
        batches.clear()
        before = card.waits.copy()
        got = [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, params, use_tqdm=False)]
        assert card.waits == before
    assert got == want
    assert any(0 < batch.decodes < batch.rows for batch in batches), "no prompt beside rows that decode"
    if "deepseek" in name:
        divided = [batch.forms for batch in batches if batch.forms]
        assert any(forms.absorbed and forms.absorbed.decodes for forms in divided)
        assert {len(forms.expanded) for forms in divided} == {1}
