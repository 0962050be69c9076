"""Other people's clients and load generators against `weft serve demo`; each test needs its package, or is skipped.

LangChain's is installed for tests; docs/apis.md says which versions of the others have been run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.test_serve import Server
from weft.checkpoint.hub.demo import fetch_demo

WORDS = ("demo", "--port", "0", "--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "128M")
SCHEMA = {
    "title": "place",
    "description": "a place",
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "size": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "weather", "parameters": SCHEMA}}
HI = [{"role": "user", "content": "Say hello."}]
PATIENCE_S = 300


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*WORDS) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the demo's tokenizer, as these programs want it."""
    from transformers import AutoTokenizer

    folder, file = tmp_path_factory.mktemp("tokenizer"), fetch_demo()
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    read = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(read))
    return str(folder)


@needs("langchain_openai")
@pytest.mark.parametrize("responses", [False, True])
def test_langchain(server: Server, responses: bool) -> None:
    import langchain_openai

    model = langchain_openai.ChatOpenAI(
        model="demo",
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=60,
        use_responses_api=responses,
        # LangChain asks OpenAI's servers to keep what Weft does not keep.
        **({"store": False} if responses else {}),
    )
    whole = model.invoke("Say hello.")
    parts = list(model.stream("Say hello.", **({} if responses else {"stream_usage": True})))
    joined = parts[0]
    for part in parts[1:]:
        joined += part
    assert whole.text and joined.text == whole.text
    assert whole.usage_metadata == joined.usage_metadata or joined.usage_metadata["output_tokens"] > 0
    called = model.bind_tools([TOOL], tool_choice="weather").invoke("The weather?")
    assert [call["name"] for call in called.tool_calls] == ["weather"]
    assert set(called.tool_calls[0]["args"]) == {"city", "size"}
    placed = model.with_structured_output(SCHEMA, method="json_schema").invoke("A place.")
    assert set(placed) == {"city", "size"}


@needs("litellm")
@pytest.mark.parametrize("provider", ["openai", "anthropic", "ollama_chat"])
def test_litellm(server: Server, provider: str) -> None:
    import litellm

    base = f"{server.url}/v1" if provider == "openai" else server.url
    asked: dict[str, Any] = {
        "model": f"{provider}/demo",
        "api_base": base,
        "api_key": "none",
        "messages": HI,
        "max_tokens": 40,
        "temperature": 0,
        "num_retries": 0,
    }
    whole = litellm.completion(**asked)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens > 0
    streamed = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
    assert "".join(streamed) == text
    if provider != "ollama_chat" and find_spec("mcp"):  # whose API asks for no call; LiteLLM wants mcp for tools
        choice = {"type": "function", "function": {"name": "weather"}}
        called = litellm.completion(**{**asked, "max_tokens": 100}, tools=[TOOL], tool_choice=choice)
        (call,) = called.choices[0].message.tool_calls
        assert call.function.name == "weather" and set(json.loads(call.function.arguments)) == {"city", "size"}
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": f"{provider}/other"})


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE_S)


@needs("guidellm")
def test_guidellm(server: Server, tokenizer: str, tmp_path: Path) -> None:
    out = tmp_path / "benchmarks.json"
    done = run(
        *("-m", "guidellm", "run", "--backend", f"kind=openai_http,target={server.url},model=demo"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}", "--profile", "kind=synchronous"),
        *("--constraint", "kind=max_requests,count=4", "--output", f"kind=json,path={out}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--disable-console-interactive"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == 4


@needs("vllm")
def test_vllm_bench_serve(server: Server, tokenizer: str, tmp_path: Path) -> None:
    done = run(
        *("-m", "vllm.entrypoints.cli.main", "bench", "serve", "--base-url", server.url, "--model", "demo"),
        *("--tokenizer", tokenizer, "--dataset-name", "random", "--num-prompts", "8"),
        *("--random-input-len", "32", "--random-output-len", "16", "--ignore-eos"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 8 and result["total_output_tokens"] == 8 * 16
