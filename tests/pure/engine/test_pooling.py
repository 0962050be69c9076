"""Embeddings and scores over HTTP, with the clients of their APIs, on an engine whose states are known."""

from __future__ import annotations

import asyncio
import base64
import logging
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import httpx
import jsonschema
import numpy as np
import ollama
import openai
import pytest

from tests.pure.api import test_batches as batches
from tests.pure.letters import BOS, END, START, text_tools
from tests.pure.worlds import HIDDEN, FakeEngine, Wire, World, error_codes, pools, refused, state_of
from weft.api.service.pooled import PIECE_BYTES, PooledAnswer
from weft.checkpoint.config.pooling import PoolingSettings
from weft.engine.core.request import Output, Request
from weft.engine.core.step import SlotFailure
from weft.engine.frontend.text_tools import TextTools
from weft.engine.templates.limits import LIMITS
from weft.engine.text.tokenizer import Tokenizer
from weft.http.answer_bytes import AnswerBytes

EMBEDS = PoolingSettings(task="embed", generates=False)
SCORES = PoolingSettings(task="score", tokens=(121, 110))
URLS = ("/v1/embeddings", "/v1/score", "/v1/rerank", "/api/embed", "/api/embeddings")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "tiny", "input": "ab"},
    "/v1/score": {"model": "tiny", "text_1": "a", "text_2": ["b", "c"]},
    "/score": {"model": "tiny", "text_1": "a", "text_2": "b"},
    "/v1/rerank": {"model": "tiny", "query": "a", "documents": ["b", {"text": "c"}]},
    "/v2/rerank": {"model": "tiny", "query": "a", "documents": ["b"]},
    "/rerank": {"model": "tiny", "query": "a", "documents": ["b"]},
    "/api/embed": {"model": "tiny", "input": ["a", "b"]},
    "/api/embeddings": {"model": "tiny", "prompt": "a"},
}


def world(settings: PoolingSettings | None = EMBEDS, script: Any = pools, **more: Any) -> World:
    return World(FakeEngine(script), pooling=settings, **more)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def expected(text: str, length: int = HIDDEN) -> np.ndarray:
    """The embedding of a text."""
    return unit(state_of([BOS, *text.encode()], HIDDEN)[:length])


@asynccontextmanager
async def client(of: World) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(of.app))
    async with openai.AsyncOpenAI(base_url="http://weft/v1", api_key="none", http_client=http, max_retries=0) as api:
        yield api


async def test_openai_s_client() -> None:
    """It asks for base64 unless told otherwise, and decodes that itself."""
    of = world()
    async with client(of) as api:
        for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = await api.embeddings.create(model="tiny", input=["ab", "c"], **encoding)  # type: ignore[arg-type]
            for row, text in zip(answer.data, ("ab", "c"), strict=True):
                given = row.embedding
                if encoding.get("encoding_format") == "base64":
                    given = np.frombuffer(base64.b64decode(given), "<f4").tolist()  # type: ignore[arg-type]
                assert np.allclose(given, expected(text), atol=1e-6)
            assert [row.index for row in answer.data] == [0, 1]
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (5, 5)
        cut = await api.embeddings.create(model="tiny", input="ab", dimensions=2)
        assert np.allclose(cut.data[0].embedding, expected("ab", 2), atol=1e-6)
        ids = await api.embeddings.create(model="tiny", input=[[BOS, 97], [98]])
        assert np.allclose(ids.data[0].embedding, expected("a"), atol=1e-6)
        one = await api.embeddings.create(model="tiny", input=[BOS, 97])
        assert len(one.data) == 1 and one.data[0].embedding == ids.data[0].embedding
    assert all(request.pooling is not None for request in of.engine.requests)


async def test_ollama_s_client() -> None:
    of = world()
    api = ollama.AsyncClient(host="http://weft")
    api._client = httpx.AsyncClient(transport=httpx.ASGITransport(of.app), base_url="http://weft")
    many = await api.embed("tiny:latest", ["ab", "c"])
    assert np.allclose(many.embeddings, [expected("ab"), expected("c")], atol=1e-6)
    assert many.prompt_eval_count == 5 and many.total_duration
    cut = await api.embed("tiny", "x" * 500, dimensions=3)
    assert np.allclose(cut.embeddings, [expected("x" * 63, 3)], atol=1e-6)
    with pytest.raises(ollama.ResponseError, match="64"), error_codes() as codes:
        await api.embed("tiny", "x" * 100, truncate=False)
    assert codes == ["prompt-too-long"]
    old = await api.embeddings("tiny", "ab")
    assert np.allclose(old.embedding, expected("ab"), atol=1e-6)
    assert (await api.embed("tiny", [])).embeddings == []
    assert (await api.show("tiny")).capabilities == ["embedding"]
    await api.close()


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"input": "x" * 80, "truncate_prompt_tokens": -1}, [BOS, *b"x" * 63]),
        ({"input": "abcdef", "truncate_prompt_tokens": 3}, [BOS, *b"ab"]),
        ({"input": "ab", "truncate_prompt_tokens": 3}, [BOS, *b"ab"]),
        ({"input": [1, 2, 3], "truncate_prompt_tokens": 2}, [1, 2]),
        ({"input": "ab", "add_special_tokens": False}, [*b"ab"]),
        ({"input": "x" * 63}, [BOS, *b"x" * 63]),
    ],
    ids=str,
)
async def test_prompts(fields: dict[str, Any], prompt: list[int]) -> None:
    """The last is as long as the model reads: no answer needs room."""
    of = world()
    answer = await of.post("/v1/embeddings", fields)
    assert answer.status_code == 200, answer.text
    assert list(of.engine.requests[0].prompt) == prompt
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt)
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_a_cut_text_keeps_the_tokens_that_end_every_text() -> None:
    tokenizer = text_tools().tokenizer
    assert tokenizer is not None
    ending = Tokenizer(tokenizer._hf_tokenizer, tokenizer._settings)
    ending._ending = [END]
    of = world(text_tools=TextTools(ending))
    for text, truncate in (("ab", None), ("abcdef", 4)):
        await of.post("/v1/embeddings", {"input": text, "truncate_prompt_tokens": truncate})
        assert list(of.engine.requests[-1].prompt) == [BOS, *b"ab", END]


async def test_a_salt_keeps_prompts_apart() -> None:
    of = world()
    await of.post("/v1/embeddings", {"input": "ab", "cache_salt": "mine"})
    assert of.engine.requests[0].identity.cache_salt == "mine"


async def test_models_that_do_not_normalise_or_may_be_told() -> None:
    raw = state_of([BOS, *b"ab"], HIDDEN)
    cases = [(EMBEDS, {}, unit(raw)), (EMBEDS, {"normalize": False}, raw), (EMBEDS, {"use_activation": False}, raw)]
    plain = PoolingSettings(task="embed", normalises=False)
    cases += [(plain, {}, raw), (plain, {"dimensions": 2}, raw[:2]), (plain, {"normalize": True}, unit(raw))]
    for settings, fields, wanted in cases:
        answer = await world(settings).post("/v1/embeddings", {"input": "ab", **fields})
        assert np.allclose(answer.json()["data"][0]["embedding"], wanted, atol=1e-6)


async def test_many_inputs_come_in_waves_in_order() -> None:
    """The queue has room for 8 requests: more of them leave some for others."""
    of = world()
    texts = [chr(97 + n) for n in range(20)]
    answer = await of.post("/v1/embeddings", {"input": texts})
    rows = answer.json()["data"]
    assert all(np.allclose(row["embedding"], expected(text), atol=1e-6) for row, text in zip(rows, texts, strict=True))
    assert not of.service.streams and not of.engine.open
    assert await of.metric("vllm:request_success_total", finished_reason="stop") == 20
    assert await of.metric("vllm:request_prompt_tokens_sum") == 40
    assert await of.metric("vllm:request_generation_tokens_sum") == 0


@pytest.mark.parametrize("path", URLS)
async def test_a_client_that_goes_away_ends_its_requests(path: str) -> None:
    def alike(request: Request) -> Iterable[Output]:
        return ()

    of = world(script=alike)
    wire = Wire(of, path, BODIES[path])
    while not of.engine.open:
        await asyncio.sleep(0)
    wire.hang_up()
    await wire.task
    assert not of.engine.open and of.engine.aborted and not of.service.streams


async def test_a_prompt_of_which_nothing_comes() -> None:
    def failing(request: Request) -> Iterable[Output]:
        yield Output(request.id, [], [], "error", error=SlotFailure("nan-logits", "NaN"))

    of = world(script=failing)
    assert refused(await of.post("/v1/embeddings", {"input": "a"}), status=500) == "NaN"
    assert not of.service.streams


# Scores


async def test_scores_of_a_model_that_embeds_are_cosines() -> None:
    of = world()
    answer = await of.post("/v1/score", BODIES["/v1/score"])
    wanted = [float(expected("a") @ expected(text)) for text in "bc"]
    assert np.allclose([row["score"] for row in answer.json()["data"]], wanted, atol=1e-6)
    assert answer.json()["usage"]["total_tokens"] == 6 and len(of.engine.requests) == 3
    pairs = await of.post("/score", {"text_1": ["a", "b"], "text_2": ["b", "c"]})
    wanted = [float(expected(first) @ expected(second)) for first, second in pairwise("abc")]
    assert np.allclose([row["score"] for row in pairs.json()["data"]], wanted, atol=1e-6)
    ranked = (await of.post("/v1/rerank", {"query": "a", "documents": ["b", "a", "c"], "top_n": 2})).json()
    assert ranked["results"][0]["index"] == 1 and ranked["results"][0]["document"] == {"text": "a"}
    scores = [row["relevance_score"] for row in ranked["results"]]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True)
    bare = await of.post("/rerank", {"query": "a", "documents": ["b"], "return_documents": False})
    assert set(bare.json()["results"][0]) == {"index", "relevance_score"}


def turns() -> TextTools:
    """The letters, and the tokens that Qwen3's turns begin and end with."""
    tokenizer = text_tools().tokenizer
    assert tokenizer is not None
    hf_tokenizer = type(tokenizer._hf_tokenizer).from_str(
        tokenizer._hf_tokenizer.to_str().replace('"<s>"', '"<|im_start|>"').replace('"<e>"', '"<|im_end|>"')
    )
    return TextTools(Tokenizer(hf_tokenizer, tokenizer._settings))


FORM = (
    "\x00system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".\x01\n\x00user\n<Instruct>: {}\n<Query>: {}\n<Document>: {}\x01\n\x00'
    "assistant\n<think>\n\n</think>\n\n"
)
WEB = "Given a web search query, retrieve relevant passages that answer the query"


def form_of(query: str, document: str, instruction: str = WEB) -> list[int]:
    """Token ids of the published form of a pair."""
    special = {0: START, 1: END}
    return [special.get(byte, byte) for byte in FORM.format(instruction, query, document).encode()]


async def test_a_reranker_is_asked_in_its_published_form() -> None:
    of = world(SCORES, text_tools=turns(), max_model_len=600)
    answer = await of.post("/v1/rerank", {"query": "a", "documents": ["b", "c"], "instruction": "Find it"})
    assert [list(request.prompt) for request in of.engine.requests] == [form_of("a", text, "Find it") for text in "bc"]
    assert all(request.pooling and request.pooling.token_ids == (121, 110) for request in of.engine.requests)
    wanted = {}
    for index, text in enumerate("bc"):
        yes, no = state_of(form_of("a", text, "Find it"), 2)
        wanted[index] = 1 / (1 + math.exp(no - yes))
    rows = answer.json()["results"]
    assert [row["index"] for row in rows] == sorted(wanted, key=lambda index: -wanted[index])
    assert all(math.isclose(row["relevance_score"], wanted[row["index"]], rel_tol=1e-5) for row in rows)
    raw = await of.post("/v1/score", {"text_1": "a", "text_2": "b", "use_activation": False})
    yes, no = state_of(form_of("a", "b"), 2)
    assert math.isclose(raw.json()["data"][0]["score"], yes - no, rel_tol=1e-5)


async def test_a_document_cannot_end_its_turn() -> None:
    of = world(SCORES, text_tools=turns(), max_model_len=600)
    await of.post("/v1/score", {"text_1": "a", "text_2": "<|im_end|>"})
    prompt = list(of.engine.requests[0].prompt)
    assert prompt == form_of("a", "<|im_end|>") and prompt.count(END) == 2


async def test_a_pair_that_is_cut_keeps_its_form() -> None:
    of = world(SCORES, text_tools=turns(), max_model_len=600)
    whole, short = form_of("a", "b" * 50), form_of("a", "b" * 20)
    await of.post("/v1/score", {"text_1": "a", "text_2": "b" * 50, "truncate_prompt_tokens": len(short)})
    assert list(of.engine.requests[0].prompt) == short
    await of.post("/v1/score", {"text_1": "a", "text_2": "b" * 50})
    assert list(of.engine.requests[1].prompt) == whole
    cut = {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 10}
    refused(await of.post("/v1/score", cut), param="truncate_prompt_tokens")


# Refusals

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ["a", 5]}, "input"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
    ("/v1/embeddings", {"input": [9999]}, "input"),
    ("/v1/embeddings", {"input": "x" * 64}, "input"),
    ("/v1/embeddings", {"input": [1] * 65}, "input"),
    ("/v1/embeddings", {"input": None}, "input"),
    ("/v1/embeddings", {"dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"dimensions": HIDDEN + 1}, "dimensions"),
    ("/v1/embeddings", {"encoding_format": "int8"}, "encoding_format"),
    ("/v1/embeddings", {"embed_dtype": "float16"}, "embed_dtype"),
    ("/v1/embeddings", {"endianness": "big"}, "endianness"),
    ("/v1/embeddings", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"priority": 10**30}, "priority"),
    ("/v1/embeddings", {"cache_salt": ""}, "cache_salt"),
    ("/v1/score", {"text_1": ["a", "b", "c"]}, "text_1"),
    ("/v1/score", {"text_2": []}, "text_2"),
    ("/v1/score", {"instruction": "x"}, "instruction"),
    ("/v1/rerank", {"top_n": -1}, "top_n"),
    ("/v1/rerank", {"documents": [5]}, "documents[0]"),
    ("/v1/rerank", {"rank_fields": ["title"]}, "rank_fields"),
    ("/v1/rerank", {"max_tokens_per_doc": 5}, "max_tokens_per_doc"),
]


@pytest.mark.parametrize(("path", "fields", "param"), BAD, ids=lambda value: str(value)[:40])
async def test_bad_requests_are_a_clear_400(path: str, fields: dict[str, Any], param: str) -> None:
    of = world()
    refused(await of.post(path, {**BODIES[path], **fields}), type="invalid_request_error", param=param)
    assert not of.engine.requests


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
async def test_too_many_tokens_in_all_are_not_even_made(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.service.pooled.LIMITS", replace(LIMITS, prompt_tokens=1))
    of = world()
    made: list[str] = []
    encode = of.service.frontend.encode
    monkeypatch.setattr(of.service.frontend, "encode", lambda text, **how: made.append(text) or encode(text, **how))
    texts = ["x" * 60] * 100
    bodies = {"/v1/embeddings": {"input": texts}, "/v1/rerank": {"query": "a", "documents": texts}}
    with error_codes() as codes:
        assert "256" in refused(await of.post(path, bodies[path]))
    assert codes == ["too-many-prompt-tokens"]
    assert len(made) < 10 and not of.engine.requests


async def test_dimensions_that_the_model_allows() -> None:
    of = world(PoolingSettings(task="embed", dimensions=(2, 3)))
    refused(await of.post("/v1/embeddings", {"input": "a", "dimensions": 4}), param="dimensions")
    assert (await of.post("/v1/embeddings", {"input": "a", "dimensions": 3})).status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_other_models_do_not(path: str) -> None:
    of, reranker = World(), world(SCORES)  # the latter lacks the turns of the form
    with error_codes() as codes:
        answers = [await each.post(path, BODIES[path]) for each in (of, reranker)]
    assert [answer.status_code for answer in answers] == [400, 400]
    verb = "score" if "score" in path or "rerank" in path else "embed"
    assert codes == [f"model-does-not-{verb}"] * 2 and not of.engine.requests


async def test_a_model_that_embeds_alone_does_not_generate() -> None:
    of = world()
    with error_codes() as codes:
        generated = await of.post("/api/generate", {"model": "tiny", "prompt": "a"})
        answers = [generated, await of.chat(), await of.complete()]
    assert [answer.status_code for answer in answers] == [400] * 3
    assert codes == ["model-does-not-generate"] * 3
    both = world(PoolingSettings(task="embed"), script=lambda request: [Output(request.id, [END], [None], "stop")])
    assert (await both.complete()).status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_models_and_a_server_that_ends(path: str) -> None:
    of = world()
    assert (await of.post(path, {**BODIES[path], "model": "other"})).status_code == 404
    of.service.draining = True
    assert (await of.post(path, BODIES[path])).status_code == 503


@pytest.mark.parametrize("path", BODIES)
async def test_answers_are_as_described(path: str) -> None:
    of = world()
    content = (await of.client.get("/openapi.json")).json()
    operation = content["paths"][path]["post"]
    for kind, value in (("requestBody", BODIES[path]), ("200", (await of.post(path, BODIES[path])).json())):
        described = operation["requestBody"] if kind == "requestBody" else operation["responses"][kind]
        schema = described["content"]["application/json"]["schema"]
        jsonschema.validate(value, {**schema, "components": content["components"]})


VALUES: list[Any] = [None, True, 0, -1, 10**30, 0.5, "", "x", "\u0000\ud7ff", [], ["x"], [[]], [{}], [None], {}]
VALUES += [[[1], "a"], [1, "a"], [-1]]


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_of_any_kind(path: str) -> None:
    of = world()
    fields = {*BODIES[path], "dimensions", "truncate_prompt_tokens", "encoding_format", "truncate", "options", "top_n"}
    for field in fields:
        for value in VALUES:
            answer = await of.post(path, {**BODIES[path], field: value})
            assert answer.status_code in (200, 400, 404), (field, value, answer.text)


async def test_later_waves_wait_for_room_in_the_queue() -> None:
    of = world()
    engine = of.engine

    def filling(request: Request) -> Iterable[Output]:
        if len(engine.requests) == 8:
            engine.full = True
            asyncio.get_running_loop().call_later(0.05, setattr, engine, "full", False)
        return pools(request)

    engine.script = filling
    answer = await of.post("/v1/embeddings", {"input": ["a"] * 12})
    assert answer.status_code == 200 and len(answer.json()["data"]) == 12
    engine.full = True
    assert (await of.post("/v1/embeddings", {"input": ["a"] * 12})).status_code == 429


async def test_a_wave_that_waits_for_room_is_signed_and_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    of = world(api_key=("one", "two"), enable_log_requests=True, max_model_len=2048)
    engine = of.engine

    def filling(request: Request) -> Iterable[Output]:
        if len(engine.requests) == 8:
            engine.full = True
            asyncio.get_running_loop().call_later(0.1, setattr, engine, "full", False)
        return pools(request)

    engine.script = filling
    logging.getLogger("weft").propagate = True
    with caplog.at_level(logging.INFO, "weft.serving"):
        inputs = [f"{number:03}" + "a" * 100 for number in range(12)]
        answer = await of.post("/v1/embeddings", {"input": inputs}, headers={"Authorization": "Bearer one"})
    assert answer.status_code == 200 and len(engine.requests) == 12
    assert len({request.identity for request in engine.requests}) == 1, "or they share no cached prefix"
    prefixes = of.service.monitor.prefixes
    assert (prefixes.prompts, prefixes.repeated) == (12, 0)
    assert sum(": prompt " in record.getMessage() for record in caplog.records) == 12


async def test_a_shutdown_lets_later_waves_run() -> None:
    """A server may leave once no stream is open: an accepted request is one until its last wave has ended."""
    of = world()
    engine, open_streams = of.engine, []

    def draining(request: Request) -> Iterable[Output]:
        of.service.draining = True
        open_streams.append(len(of.service.streams))
        return pools(request)

    async def full_for_a_while() -> None:
        while len(engine.requests) < 8:
            await asyncio.sleep(0)
        engine.full = True
        for _ in range(20):
            await asyncio.sleep(0.002)
            open_streams.append(len(of.service.streams))
        engine.full = False

    engine.script = draining
    answer, _ = await asyncio.gather(of.post("/v1/embeddings", {"input": ["a"] * 12}), full_for_a_while())
    assert answer.status_code == 200 and len(answer.json()["data"]) == 12
    assert {*open_streams[1:]} == {1} and not of.service.streams


async def test_a_request_between_two_waves_can_be_cut_off() -> None:
    of = world()
    asked = asyncio.create_task(of.post("/v1/embeddings", {"input": ["a"] * 12}))
    while len(of.engine.requests) < 8:
        await asyncio.sleep(0)
    of.engine.full = True
    await asyncio.sleep(0.05)
    (stream,) = of.service.streams
    stream.cut_off()
    assert (await asked).status_code == 503 and not of.service.streams


async def test_the_timeout_is_one_for_all_waves_and_the_waits_between_them() -> None:
    of = world(request_timeout=0.05)

    def filling(request: Request) -> Iterable[Output]:
        of.engine.full = True
        return pools(request)

    of.engine.script = filling
    answer = await of.post("/v1/embeddings", {"input": ["a"] * 12})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    assert not of.service.streams


async def test_tokens_of_all_waves_count_together(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("[{name: a, key: one, tpm: 30}]")
    path.chmod(0o600)
    of, headers = world(api_key_file=str(path)), {"Authorization": "Bearer one"}
    refusal = await of.post("/v1/embeddings", {"input": ["a"] * 16}, headers=headers)  # 32 tokens, in two waves
    assert refusal.status_code == 429 and not of.engine.requests
    assert (await of.post("/v1/embeddings", {"input": ["a"] * 15}, headers=headers)).status_code == 200
    assert (await of.post("/v1/embeddings", {"input": ["a"]}, headers=headers)).status_code == 429


async def test_answers_under_way_are_bounded_by_their_bytes() -> None:
    of = world()
    of.service.answer_bytes = AnswerBytes(1000)
    body = {"input": ["a"] * 2, "dimensions": None}
    of.service.answer_bytes.take(990)
    refusal = await of.post("/v1/embeddings", body)
    assert refusal.status_code == 429 and refusal.headers["retry-after"] == "1" and "1,000" in refusal.text
    of.service.answer_bytes.give_back(990)
    for _ in range(3):  # larger than all: one at a time
        assert (await of.post("/v1/embeddings", {"input": ["a"] * 8})).status_code == 200
        assert of.service.answer_bytes.taken == 0
    of.service.draining = True
    assert (await of.post("/v1/embeddings", body)).status_code == 503 and of.service.answer_bytes.taken == 0


async def test_an_answer_goes_out_as_its_client_reads() -> None:
    budget = AnswerBytes(1)
    budget.take(10)
    answer = PooledAnswer("x" * (2 * PIECE_BYTES))
    answer.given_back = lambda: budget.give_back(10)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        assert budget.taken == 10
        sent.append(message)

    await answer({}, cast(Any, None), send)
    assert [len(message["body"]) for message in sent[1:]] == [PIECE_BYTES, PIECE_BYTES, 2]
    assert [message["more_body"] for message in sent[1:]] == [True, True, False] and budget.taken == 0
    assert b"".join(message["body"] for message in sent[1:]) == answer.body


async def test_a_query_that_is_read_for_each_document_is_bounded() -> None:
    of = world(SCORES, text_tools=turns(), max_model_len=600)
    limits = replace(LIMITS, pair_characters=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.api.openai.scores.LIMITS", limits)
        body: dict[str, Any] = {"query": "q" * 90, "documents": ["d"] * 8}
        answer = await of.post("/v1/rerank", body)
        count = 8 * (90 + 1 + len(WEB))
        assert answer.status_code == 400 and f"{count:,}" in answer.text and "1,000" in answer.text
        assert not of.engine.requests
        assert (await of.post("/v1/rerank", body | {"documents": ["d"] * 2})).status_code == 200


async def test_lines_of_a_batch(tmp_path: Path) -> None:
    of = world(storage_directory=str(tmp_path))
    async with batches.client(of) as api:
        rows = [
            {"custom_id": text, "method": "POST", "url": "/v1/embeddings", "body": {"model": "tiny", "input": text}}
            for text in "abc"
        ]
        file = await api.files.create(file=("in.jsonl", batches.jsonl(rows)), purpose="batch")
        made = await api.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        done = await batches.ended(api, made.id)
        assert done.status == "completed" and done.request_counts and done.request_counts.completed == 3
        for row in await batches.rows_of(api, done.output_file_id):
            vector = row["response"]["body"]["data"][0]["embedding"]
            assert np.allclose(vector, expected(row["custom_id"]), atol=1e-6)
