"""vLLM's page on distributed inference, with its own commands on tiny weights: OPT on four ranks, 40 narrow heads."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import torch

from tests.cpu import checkpoints
from tests.cpu.test_parity import greedy
from tests.cpu.test_serve import Server
from tests.pure.vocabularies import byte_level
from weft import SamplingParams

# The page's own lines; only the import names the other package.
PROGRAM = """\
from weft import LLM
llm = LLM("facebook/opt-13b", tensor_parallel_size=4)
output = llm.generate("San Franciso is a")
"""
PROMPT = "San Franciso is a"
NEW = 16  # tokens, SamplingParams' own number


class ApiServer(Server):
    program = ("-m", "weft.entrypoints.openai.api_server")


def write_published(recipe: str, folder: Path, **sizes: object) -> Path:
    """A checkpoint of a recipe with the tokenizer of its kind: GPT-2's vocab.json and merges.txt."""
    tokenizer = json.loads(byte_level().to_str())["model"]
    wide = {"vocab_size": len(tokenizer["vocab"]), **sizes}
    original = checkpoints.RECIPES[recipe]
    with pytest.MonkeyPatch.context() as patch:
        changed = checkpoints.Recipe(original.model, wide, sizes=original.sizes)
        patch.setitem(checkpoints.RECIPES, folder.name, changed)
        checkpoints.make(folder.name, folder.parent)
    (folder / "vocab.json").write_text(json.dumps(tokenizer["vocab"]))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]))
    return folder


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "facebook" / "opt-13b"
    return write_published("opt", folder, hidden_size=160, word_embed_proj_dim=160, num_attention_heads=40)


@pytest.fixture(scope="module")
def truth(opt: Path) -> list[int]:
    """Transformers' greedy continuation of the prompt."""
    ids = byte_level().encode(PROMPT, add_special_tokens=False).ids
    return greedy(checkpoints.reference(opt, torch.float32), ids, NEW)


def test_the_page_s_program(opt: Path, truth: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(opt.parents[1])
    names: dict[str, object] = {}
    exec(compile(PROGRAM, "page", "exec"), names)
    llm, output = names["llm"], names["output"]
    try:
        rows = llm.layout()  # type: ignore[attr-defined]
        assert [row["q_heads"] for row in rows] == [10] * 4 and len({row["rank"] for row in rows}) == 4
        assert len(output[0].outputs[0].token_ids) <= NEW and output[0].prompt == PROMPT  # type: ignore[index]
        # The program samples; greedily the tokens are those of Transformers.
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        (again,) = llm.generate(PROMPT, params)  # type: ignore[attr-defined]
        assert list(again.outputs[0].token_ids) == truth
    finally:
        llm.shutdown()  # type: ignore[attr-defined]


@pytest.mark.long  # four more processes; test_serve has the server
def test_the_page_s_server(opt: Path, truth: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(opt.parents[1])
    words = ["--model", "facebook/opt-13b", "--tensor-parallel-size", "4", "--port", "0"]
    with ApiServer(*words) as server:
        ranks = [process for process in server.family() if "weft.worker" in " ".join(process.cmdline())]
        assert len(ranks) == 4
        body = {"model": "facebook/opt-13b", "prompt": PROMPT, "temperature": 0, "max_tokens": NEW, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=60).json()
    assert answer["choices"][0]["token_ids"] == truth, answer
