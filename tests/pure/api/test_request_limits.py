"""Limits on one request, and the work that the server does before it refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from tests.pure.bad_bodies import TOO_MANY
from tests.pure.letters import frontend, output, text_tools
from tests.pure.worlds import HI, World, error_codes, refused
from tests.refusals import refuses
from weft.api.service import service
from weft.engine.core.params import SamplingParams
from weft.engine.frontend import collector
from weft.engine.frontend.text_tools import TextTools
from weft.engine.replicas import output_stream
from weft.engine.replicas.memory import Trimmer
from weft.engine.templates.limits import LIMITS, RequestLimits
from weft.engine.text import tokenizer as tokenizer_module
from weft.engine.text.byte_level import ALPHABET, build_byte_level
from weft.engine.text.pretokenizers import GPT2
from weft.engine.text.settings import TokenizerSettings
from weft.engine.text.tokenizer import Tokenizer
from weft.errors import RequestError
from weft.http import threads
from weft.http.body import check_structure
from weft.http.errors import HttpError
from weft.http.threads import WorkThreads


@pytest.mark.parametrize(("fields", "param", "code", "values"), TOO_MANY, ids=lambda value: str(value)[:20])
async def test_lists_are_bounded(fields: dict[str, Any], param: str, code: str, values: tuple[str, str]) -> None:
    world = World()
    with error_codes() as codes:
        message = refused(await world.chat(**fields), param=param)
    assert codes == [code] and all(value in message for value in values)
    assert not world.engine.requests


async def test_lists_at_their_limits_are_taken() -> None:
    response = await World().complete(stop=["zq"] * 64, stop_token_ids=[1] * 1024, bad_words=["zq"] * 1024)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (b'{"prompt": [' + b"[]," * 100_000 + b"[]]}", ("100,003 lists and objects", "100,000")),
        (b'{"prompt": [' + b'"a",' * 100_000 + b'"a"]}', ("100,002 texts", "100,000")),
        (b'{"prompt": [' + b"1," * 500_000 + b"1]}", ("500,002 values", "500,000")),
    ],
)
async def test_json_of_too_many_values_is_refused_before_they_are_made(content: bytes, values: tuple[str, str]) -> None:
    with error_codes() as codes:
        message = refused(await World().client.post("/v1/completions", content=content))
    assert codes == ["too-many-items"] and all(value in message for value in values)


def test_brackets_in_texts_are_no_structure() -> None:
    check_structure(json.dumps({"prompt": r'[{,"\[' * 50_000, "stop": ["\\"]}).encode(), 10)


async def test_fields_are_bounded() -> None:
    with error_codes() as codes:
        assert "257 fields" in refused(await World().complete(**{f"x{i}": 1 for i in range(255)}))
    assert codes == ["too-many-items"]


async def test_unknown_names_are_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.WARNING, "weft.serving"):
        for start in range(0, 1400, 200):
            fields = {f"{at:04d}" + "x" * 500: 1 for at in range(start, start + 200)}
            assert (await world.complete(**fields)).status_code == 200
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 5 and all(line.endswith("and 190 more") for line in lines)
    assert max(map(len, lines)) < 1100
    assert len(world.service._unknown_fields._names._seen) == 1000
    assert {len(name) for name in world.service._unknown_fields._names._seen} == {80}


async def test_a_default_limit_of_bodies_follows_the_models_length() -> None:
    assert World().service._body_receiver.limit == 8 * 2**20
    long = service.Service(
        World().engine, frontend(max_model_len=2**20), World().service.options, model="m", capacity=1
    )
    assert long._body_receiver.limit == 16 * 2**20


async def test_bodies_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.http.body.LIMITS", RequestLimits(bodies=0))
    refused(await World().complete(), 503, code="overloaded")


async def test_a_text_that_cannot_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(tokenizer_module.Tokenizer, "encode", encode)
    text = "x" * (63 * text_tools().tokenizer.longest_token + 1)  # type: ignore[union-attr]
    with error_codes() as codes:
        assert "64 tokens" in refused(await World().complete(prompt=text), param="prompt")
    assert codes == ["prompt-too-long"]


async def test_tokenize_and_detokenize_are_bounded() -> None:
    world = World()
    assert "1,048,577 characters" in refused(await world.post("/tokenize", {"prompt": "a" * (2**20 + 1)}))
    assert "131,073 items" in refused(await world.post("/detokenize", {"tokens": [65] * 131_073}), param="tokens")
    assert (await world.post("/tokenize", {"prompt": "a" * 100_000})).json()["count"] == 100_001


async def test_requests_to_the_engine_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LIMITS", RequestLimits(prompt_tokens=0, sampling_ids=40))
    world = World(max_body_bytes=10_000)
    ids = [65] * 40
    refused(await world.complete(prompt=ids, n=7), param="n")  # 280 tokens; four times the model's length is 256
    assert (await world.complete(prompt=ids, n=6)).status_code == 200
    refused(await world.complete(stop_token_ids=[1] * 11, n=4), param="n")
    assert (await world.complete(stop_token_ids=[1] * 10, n=4)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab", "n": 8}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/tokenize", {"prompt": "ab"}),
        ("/detokenize", {"tokens": [65]}),
    ],
)
async def test_bodies_are_worked_on_outside_the_event_loop(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[threading.Thread] = []
    plain = service.Service.decode_body

    def noted(this: service.Service, content: bytes, target: Any) -> Any:
        seen.append(threading.current_thread())
        return plain(this, content, target)

    monkeypatch.setattr(service.Service, "decode_body", noted)
    await World().post(path, body)
    assert [thread.daemon for thread in seen] == [True]


async def test_work_that_takes_too_long_is_a_503_and_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LIMITS", RequestLimits(work_s=0.05))
    workers, end = WorkThreads(1), threading.Event()
    with refuses(HttpError, "request-too-slow") as slow:
        await workers.result(lambda: end.wait(60))
    with refuses(HttpError, "overloaded") as busy:
        await workers.result(lambda: 1)
    assert slow.value.status == busy.value.status == 503 and "0.05 s" in str(slow.value)
    end.set()
    monkeypatch.setattr(threads, "LIMITS", LIMITS)
    assert await workers.result(lambda: 2) == 2
    with refuses(RequestError, "no"):
        await workers.result(_raises)


def _raises() -> None:
    raise RequestError("no", code="no")


async def test_a_tokenizer_that_panics_is_an_error_of_the_api(caplog: pytest.LogCaptureFixture) -> None:
    hf_tokenizer = build_byte_level(
        {char: byte for byte, char in enumerate(ALPHABET)}, [], GPT2.create_pre_tokenizer(), whole_words=False
    )
    hf_tokenizer.pre_tokenizer = Split(Regex("(a+)+$"), "isolated")
    world = World(text_tools=TextTools(Tokenizer(hf_tokenizer, TokenizerSettings(tokens={}))))
    with caplog.at_level(logging.ERROR, "weft.serving"), error_codes() as codes:
        refused(await world.complete(prompt="a" * 45 + "b"), 500, code="internal_error")
    assert codes == ["tokenizer-failed"]
    assert len(caplog.records) == 1


class Core:
    """The engine of an OutputStream, whose aborts are noted."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def abort(self, ids: list[str]) -> None:
        self.aborted += ids


async def test_a_backlog_lets_others_go_on_and_is_dropped_with_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_stream, "TURN_S", 0.0)
    stream = output_stream.OutputStream(Core(), ["a", "b"])  # type: ignore[arg-type]
    for _ in range(1000):
        stream.put(output("a", "x"))
        stream.put(output("b", "y"))
    read: list[str] = []

    async def reader() -> None:
        async for news in stream:
            read.append(news.id)

    task = asyncio.create_task(reader())
    while len(read) < 10:
        await asyncio.sleep(0)
    assert len(read) < 100
    stream.drop_request("a")
    stream.close_request("b")
    await task
    assert read.count("b") == 1000 and read.count("a") < 100


async def test_a_reader_who_leaves_drops_its_backlog() -> None:
    core = Core()
    stream = output_stream.OutputStream(core, ["a"])  # type: ignore[arg-type]
    for _ in range(1000):
        stream.put(output("a", "x"))
    await anext(stream)
    await stream.aclose()
    assert [news async for news in stream] == [] and set(core.aborted) == {"a"}


def test_choices_share_what_is_known_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    plain = collector.TextStream

    def noted(*args: Any) -> Any:
        made.append(args)
        return plain(*args)

    monkeypatch.setattr(collector, "TextStream", noted)
    front = frontend()
    job = front.create_collector(front.parse_prompt("ab"), SamplingParams(n=5, stop="cd"), arrival_s=0.0)
    assert len(made) == 1
    for request in job.requests:
        assert [delta.text for letter in "xcd" if (delta := job.add(output(request.id, letter), 0.0))] == ["x", "", ""]


@pytest.mark.parametrize(("tokens", "times"), [(1000, 0), (100_000, 1)])
async def test_memory_of_long_prompts_is_given_back_after_the_answer(
    tokens: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, calls = World(), []
    monkeypatch.setattr(Trimmer, "trim_later", lambda self: calls.append(self))
    job = SimpleNamespace(output=SimpleNamespace(prompt_ids=[1] * tokens))
    answer = type("Done", (), {"collectors": [job]})()
    world.service.stream_closed(answer)
    assert len(calls) == times
