"""The APIs of `weft serve` as a process of its own: the same answers over each of them, and batches after kill -9."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import ollama
import pytest

from tests.cpu import tiny
from tests.cpu.test_serve import HI, Server, eventually

URL = "/v1/chat/completions"
LINES = 300
TOKENS = 30


def words(folder: Path, *more: str) -> list[str]:
    said = "--load-format dummy --dtype float32 --max-model-len 512 --kv-cache-memory-bytes 16M --port 0"
    names = ["--served-model-name", "tiny", "--storage-directory", str(folder / "storage")]
    return [str(tiny.write(folder / "tiny")), *said.split(), *names, *more]


@pytest.fixture(scope="module", params=["1", "2"], ids=["whole", "tp2"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    more = ("--tensor-parallel-size", request.param, "--convert", "embed")
    with Server(*words(tmp_path_factory.mktemp("apis"), *more)) as running:
        yield running


def test_the_same_answer_over_every_api(server: Server) -> None:
    chat = server.client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=TOKENS, temperature=0, extra_body={"top_k": 0}
    )
    text, usage = chat.choices[0].message.content, chat.usage
    assert text and usage
    response = server.client.responses.create(model="tiny", input="hi", max_output_tokens=TOKENS, temperature=0)
    assert (response.output_text, response.usage and response.usage.output_tokens) == (text, usage.completion_tokens)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": TOKENS, "messages": HI, "temperature": 0}
        message = claude.messages.create(**asked)
        assert message.content[0].text == text  # type: ignore[union-attr]
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == usage.prompt_tokens
        with claude.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == text
        counted = claude.messages.count_tokens(model="tiny", messages=HI)  # type: ignore[arg-type]
        assert counted.input_tokens == usage.prompt_tokens
    llama = ollama.Client(host=server.url)
    options = {"num_predict": TOKENS, "temperature": 0}
    answer = llama.chat("tiny", HI, options=options)
    assert (answer.message.content, answer.eval_count) == (text, usage.completion_tokens)
    parts = llama.generate("tiny:latest", "hi", options=options, stream=True)
    assert "".join(part.response or "" for part in parts) == text
    llama.close()
    eventually(server.at_rest)


def test_embeddings_over_every_api(server: Server) -> None:
    """64 texts share steps, also beside an answer, and leave nothing behind."""
    texts = [f"text {n}" for n in range(64)]
    alone = [
        np.array(server.client.embeddings.create(model="tiny", input=text).data[0].embedding) for text in texts[:3]
    ]
    eventually(server.at_rest)  # steps of other tests' streams, which are being aborted, are not counted
    taken = []
    for _ in range(3):  # beside other work on its core, the engine may be given the texts one by one
        steps = server.metric("weft:steps_total")
        made = server.client.embeddings.create(model="tiny", input=texts)
        taken.append(server.metric("weft:steps_total") - steps)
    assert min(taken) < len(texts) / 4
    answering = server.client.completions.create(model="tiny", prompt="a", max_tokens=400, stream=True)
    beside = server.client.embeddings.create(model="tiny", input=texts)
    answering.close()
    assert np.allclose([row.embedding for row in beside.data], [row.embedding for row in made.data], atol=1e-4)
    vectors = np.array([row.embedding for row in made.data])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.abs(vectors[:3] - alone).max() < 1e-4
    llama = ollama.Client(host=server.url)
    assert np.abs(np.array(llama.embed("tiny", texts).embeddings) - vectors).max() < 1e-4
    llama.close()
    ranked = httpx.post(f"{server.url}/v1/rerank", json={"query": texts[0], "documents": texts[1:4]}).json()["results"]
    cosines = vectors[1:4] @ vectors[0]
    assert np.allclose([row["relevance_score"] for row in ranked], sorted(cosines, reverse=True), atol=1e-4)
    eventually(server.at_rest)


def batch_lines() -> bytes:
    bodies = [
        {"model": "tiny", "messages": [{"role": "user", "content": f"{n}"}], "max_tokens": TOKENS, "temperature": 0}
        for n in range(LINES)
    ]
    rows = [{"custom_id": f"{n}", "method": "POST", "url": URL, "body": body} for n, body in enumerate(bodies)]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_a_batch_goes_on_after_kill_9(tmp_path: Path) -> None:
    said = words(tmp_path)
    with Server(*said) as first:
        file = first.client.files.create(file=("in.jsonl", batch_lines()), purpose="batch")
        id = first.client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h").id

        answered = 0

        def begun() -> bool:
            nonlocal answered
            counts = first.client.batches.retrieve(id).request_counts
            answered = counts.completed if counts else 0
            return answered > 5

        eventually(begun)
        first.process.kill()
        assert answered < LINES
        first.ended()
    with Server(*said) as second:
        eventually(lambda: second.client.batches.retrieve(id).status == "completed")
        batch = second.client.batches.retrieve(id)
        assert batch.request_counts and batch.request_counts.completed == LINES and batch.output_file_id
        text = second.client.files.content(batch.output_file_id).text
        rows = [json.loads(row) for row in text.splitlines()]
        assert [row["custom_id"] for row in rows] == [f"{n}" for n in range(LINES)]
        done = second.metric("vllm:request_success_total")
        assert done <= LINES - answered  # what was answered is not asked again
        direct = second.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "7"}], max_tokens=TOKENS, temperature=0
        )
        body = rows[7]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == direct.choices[0].message.content
