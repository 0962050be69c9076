"""The HTTP application over an engine that says what the test tells it to."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.pure.letters import END, frontend, output
from weft.client.frontend import Words
from weft.core.request import Output, Request, Stats
from weft.core.step import TokenLogprobs
from weft.errors import Cause, EngineError, QueueFullError
from weft.serving.app import app
from weft.serving.options import ServeOptions
from weft.serving.service import Service

Script = Callable[[Request], Iterable[Output]]
HI = [{"role": "user", "content": "hi"}]
CHAT = {"model": "tiny", "messages": HI}
DEAD = EngineError(Cause(1, "step", "killed by SIGKILL", "look at dmesg"))


def saying(text: str) -> Script:
    """Each choice says `text`, letter by letter, and then the end token; or max_tokens of it."""

    def script(request: Request) -> Iterable[Output]:
        most = request.params.max_tokens or 10**6
        for at, letter in enumerate(text[:most]):
            yield output(request.id, letter, "length" if at + 1 == most else None, cached_tokens=2)
        if len(text) < most:
            yield output(request.id, END, "stop")

    return script


HELLO = saying("hello")


class FakeEngine:
    """Says its script, and then ends its stream; or breaks; or, where a request has not ended, waits for ever."""

    def __init__(self, script: Script = HELLO) -> None:
        self.script = script
        self.failure: EngineError | None = None
        self.full = False
        self.breaks = False
        self.stats = Stats(blocks_total=10)
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.open: set[str] = set()

    def submit(self, requests: Sequence[Request]) -> AsyncGenerator[Output, None]:
        if self.full:
            raise QueueFullError("1024 requests wait already", retry_after_s=3)
        if self.failure:
            raise self.failure
        self.requests += requests
        self.open.update(request.id for request in requests)
        return Stream(self._run(requests), lambda: self.abort([r.id for r in requests if r.id in self.open]))

    def abort(self, ids: Sequence[str]) -> None:
        self.aborted += ids
        self.open.difference_update(ids)

    async def _run(self, requests: Sequence[Request]) -> AsyncGenerator[Output, None]:
        for step in zip(*(self.script(request) for request in requests), strict=True):
            await asyncio.sleep(0)
            for made in step:
                if made.finish_reason:
                    self.open.discard(made.id)
                yield made
        if self.breaks:
            self.failure = DEAD
            raise DEAD
        if self.open:
            await asyncio.Event().wait()


class Stream(AsyncGenerator[Output, None]):
    """A generator whose closing is heard of even where it never began."""

    def __init__(self, inner: AsyncGenerator[Output, None], on_close: Callable[[], None]) -> None:
        self._inner, self._on_close = inner, on_close

    async def __anext__(self) -> Output:
        return await self._inner.__anext__()

    async def asend(self, value: None) -> Output:
        return await self._inner.asend(value)

    async def athrow(self, *error: Any) -> Output:
        return await self._inner.athrow(*error)

    async def aclose(self) -> None:
        await self._inner.aclose()
        self._on_close()


class World:
    """An application and a client for it."""

    def __init__(self, engine: FakeEngine | None = None, words: Words | None = None, **options: Any) -> None:
        self.engine = engine or FakeEngine()
        front = frontend() if words is None else frontend(words=words)
        self.service = Service(self.engine, front, ServeOptions(**options), model="tiny", capacity=8)
        self.app = app(self.service)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://weft")

    async def post(self, path: str, body: Any = None, **how: Any) -> httpx.Response:
        if body is not None:
            how["json"] = body
        return await self.client.post(path, **how)

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {**CHAT, **fields})

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": "ab", **fields})

    async def metric(self, name: str, **labels: str) -> float | None:
        page = (await self.client.get("/metrics")).text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return None


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    assert "\r" not in response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def refused(response: httpx.Response, status: int = 400, **fields: Any) -> str:
    """The message of an error in the one shape that all have."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (key, error), *rest = response.json().items()
    assert key == "error" and not rest and set(error) == {"message", "type", "param", "code"}
    assert {name: error[name] for name in fields} == fields
    assert isinstance(error["message"], str) and error["message"]
    return str(error["message"])


# Chat


async def test_a_chat_completion() -> None:
    world = World()
    answer = (await world.chat()).json()
    choice = answer["choices"][0]
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "hello"
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    prompt = len(world.engine.requests[0].prompt)
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    # As long as the model allows, where nothing is said.
    assert world.engine.requests[0].params.max_tokens == 64 - prompt


async def test_a_chat_stream() -> None:
    chunks = events(await World().chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "hello"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * 6 + ["stop"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 6
    assert len({c["id"] for c in chunks}) == 1 and {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert all(c["usage"] is None for c in chunks[:-1])


async def test_usage_only_where_asked_and_in_every_chunk_where_asked() -> None:
    assert all(c["choices"] and c["usage"] is None for c in events(await World().chat(stream=True)))
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c["usage"]["completion_tokens"] for c in events(await World().chat(stream=True, stream_options=options))]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 6


async def test_choices_of_a_stream_are_told_apart() -> None:
    chunks = events(await World().chat(stream=True, n=3))
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == "hello"
        assert mine[-1]["finish_reason"] == "stop"


async def test_chat_logprobs() -> None:
    world = World(FakeEngine(saying("é")))
    entry = {"top_logprobs": [{"token": "A", "logprob": -0.1, "bytes": [65]}]}
    whole = (await world.chat(logprobs=True, top_logprobs=1)).json()
    half = "é".encode()
    content = whole["choices"][0]["logprobs"]["content"]
    # The engine of letters says bytes: each token is half of the character, and its bytes are told exactly.
    assert content[0] == {"token": "\ufffd", "logprob": -half[0] / 1000, "bytes": [half[0]], **entry}
    chunks = events(await world.chat(logprobs=True, top_logprobs=1, stream=True))
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert streamed == content
    plain = (await world.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"][0]
    assert plain["top_logprobs"] == []


async def test_minus_infinity_is_a_number_in_json() -> None:
    def script(request: Request) -> Iterable[Output]:
        yield Output(request.id, [97], [TokenLogprobs(float("-inf"), 9, [], [])], "length")

    answer = await World(FakeEngine(script)).chat(logprobs=True)
    assert answer.json()["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_a_stop_string_ends_the_request_in_the_engine() -> None:
    world = World()
    answer = (await world.chat(stop=["l"])).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"], answer["stop_reason"]) == ("he", "stop", "l")
    assert world.engine.aborted == [world.engine.requests[0].id]


async def test_template_kwargs_of_request_and_server() -> None:
    async def prompt(world: World, **fields: Any) -> bytes:
        await world.chat(**fields)
        return bytes(token for token in world.engine.requests[-1].prompt if token < 256)

    assert (await prompt(World(), chat_template_kwargs={"shout": True})).endswith(b"assistant:LOUD")
    world = World(default_chat_template_kwargs={"shout": True})
    assert (await prompt(world)).endswith(b"LOUD")
    assert (await prompt(world, chat_template_kwargs={"shout": False})).endswith(b"assistant:")
    assert (await prompt(World(), add_generation_prompt=False)).endswith(b"hi")
    assert (await prompt(World(), continue_final_message=True)).endswith(b"user:hi")


async def test_fields_reach_the_sampler() -> None:
    world = World()
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "max_completion_tokens": 4}
    more = {"repetition_penalty": 1.1, "stop_token_ids": [7], "ignore_eos": True, "min_tokens": 2, "priority": 5}
    await world.chat(**fields, **more, logit_bias={"65": 1.5}, presence_penalty=0.3, frequency_penalty=0.2)
    request = world.engine.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (0.5, 0.9, 5, 0.1, 4)
    assert (params.repetition_penalty, params.min_tokens, request.stop_ids) == (1.1, 2, (7,))
    assert (params.logit_bias, params.presence_penalty, params.frequency_penalty) == ({65: 1.5}, 0.3, 0.2)
    assert request.priority == 5


# Completions


async def test_a_completion() -> None:
    world = World()
    answer = (await world.complete(max_tokens=3)).json()
    assert answer["object"] == "text_completion" and answer["choices"][0]["text"] == "hel"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (await world.complete()).json()["choices"][0]["text"] == "hello"
    assert world.engine.requests[-1].params.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", [b"a"]),
        (["a", "bc"], [b"a", b"bc"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
)
async def test_prompts_of_every_kind(prompt: Any, prompts: list[bytes]) -> None:
    world = World()
    answer = (await world.complete(prompt=prompt, n=2)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
    assert [bytes(t for t in r.prompt if t < 256) for r in world.engine.requests[::2]] == prompts
    chunks = events(await world.complete(prompt=prompt, n=2, stream=True))
    said = dict.fromkeys(range(2 * len(prompts)), "")
    for chunk in chunks:
        said[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert set(said.values()) == {"hello"}


async def test_special_tokens_only_where_wanted() -> None:
    world = World()
    await world.complete()
    await world.complete(add_special_tokens=False)
    assert [len(request.prompt) for request in world.engine.requests] == [3, 2]


async def test_completion_logprobs() -> None:
    answer = (await World().complete(max_tokens=2, logprobs=2)).json()["choices"][0]["logprobs"]
    assert answer == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.104, -0.101],
        "tokens": ["h", "e"],
        "top_logprobs": [{"A": -0.1, "B": -0.2}] * 2,
    }
    chunks = events(await World().complete(max_tokens=2, logprobs=2, stream=True))
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1]]


async def test_echo() -> None:
    assert (await World().complete(echo=True)).json()["choices"][0]["text"] == "abhello"
    chunks = events(await World().complete(echo=True, stream=True, prompt=[97]))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ahello"


async def test_scoring_a_prompt() -> None:
    def script(request: Request) -> Iterable[Output]:
        assert request.params.prompt_logprobs == 1
        entries = [TokenLogprobs(-0.5, 1, [token], [-0.5]) for token in request.prompt[1:]]
        yield output(request.id, "x", "length", prompt_logprobs=entries)

    answer = (await World(FakeEngine(script)).complete(prompt=[97, 98], echo=True, max_tokens=0, logprobs=1)).json()
    choice = answer["choices"][0]
    assert choice["text"] == "ab" and answer["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.5}]


# What is refused

BAD_CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"n": 9}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"logit_bias": {"65": 1000}}, "logit_bias"),
    ({"seed": "x"}, "seed"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "logprobs"),
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"best_of": 5}, "best_of"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
async def test_bad_chats_are_a_clear_400(fields: dict[str, Any], param: str | None) -> None:
    world = World()
    refused(await world.chat(**fields), type="invalid_request_error", param=param)
    assert not world.engine.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [[97, "a"]]}, "prompt[0][1]"),
        ({"prompt": [9999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 99}, "logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt": ["a"] * 5, "n": 2}, "n"),
    ],
    ids=str,
)
async def test_bad_completions_are_a_clear_400(fields: dict[str, Any], param: str | None) -> None:
    refused(await World().complete(**fields), param=param)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b'"x"', "object"),
        (b'{"model": NaN}', "JSON"),
        (b'{"temperature": 1e999}', "JSON"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b"\xff\xfe", "JSON"),
        (b"[" * 100_000, "nested"),
        (b'{"model": "\\ud800"}', "JSON"),
    ],
    ids=repr,
)
async def test_broken_bodies_are_a_clear_400(content: bytes, words: str) -> None:
    assert words in refused(await World().post("/v1/chat/completions", content=content))


async def test_missing_fields_are_named() -> None:
    refused(await World().post("/v1/chat/completions", {"model": "tiny"}), param="messages")
    refused(await World().post("/v1/completions", {"model": "tiny"}), param="prompt")


async def test_what_asks_for_nothing_is_no_error() -> None:
    idle = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "n": None, "user": "me"}
    assert (await World().chat(**idle, best_of=1, store=False, stop=None, temperature=None)).status_code == 200


async def test_unknown_fields_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.WARNING, logger="weft.serving"):
        for _ in range(2):
            assert (await world.chat(wish="more", user="me", whim=1)).status_code == 200
    assert [record.getMessage() for record in caplog.records] == ["ignored unknown request fields: 'wish', 'whim'"]


async def test_the_frameworks_own_errors_have_our_shape() -> None:
    world = World()
    refused(await world.client.get("/v1/nothing"), 404, code="unknown_url")
    refused(await world.client.get("/v1/models/"), 404)
    answer = await world.client.get("/v1/completions")
    refused(answer, 405, code="method_not_allowed")
    assert answer.headers["allow"] == "POST"


async def test_a_bug_is_a_500_in_our_shape() -> None:
    world = World()
    world.engine.submit = None  # type: ignore[assignment, method-assign]
    world.client = httpx.AsyncClient(
        transport=httpx.ASGITransport(world.app, raise_app_exceptions=False), base_url="http://weft"
    )
    assert "TypeError" in refused(await world.chat(), 500, type="server_error")


async def test_too_long_a_body_is_a_413() -> None:
    world = World(max_body_bytes=200)
    assert "200 bytes" in refused(await world.chat(user="x" * 200), 413, type="invalid_request_error")

    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(100):
            yield b"x" * 10

    refused(await world.post("/v1/chat/completions", content=pieces()), 413)


async def test_a_full_queue_is_a_429_with_the_time_to_wait() -> None:
    world = World()
    world.engine.full = True
    for stream in (False, True):
        answer = await world.chat(stream=stream)
        refused(answer, 429, code="queue_full", type="rate_limit_error")
        assert answer.headers["retry-after"] == "3"
    assert not world.service.answers


async def test_while_draining_nothing_new_is_taken() -> None:
    world = World()
    world.service.draining = True
    answer = await world.chat()
    refused(answer, 503, code="shutting_down")
    assert "retry-after" in answer.headers
    refused(await world.client.get("/health/ready"), 503)
    assert (await world.client.get("/health")).status_code == 200
    assert (await world.client.get("/health/live")).status_code == 200


# Names and keys


async def test_names() -> None:
    world = World(served_model_name=("a", "b/c"))
    rows = (await world.client.get("/v1/models")).json()
    assert rows["object"] == "list" and [row["id"] for row in rows["data"]] == ["a", "b/c"]
    keys = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"}
    assert all(set(row) == keys and (row["root"], row["max_model_len"]) == ("tiny", 64) for row in rows["data"])
    assert (await world.client.get("/v1/models/b/c")).json()["id"] == "b/c"
    assert (await world.chat(model="b/c")).json()["model"] == "b/c"
    assert (await world.chat(model=None)).json()["model"] == "a"
    refused(await world.chat(model="tiny"), 404, code="model_not_found", param="model")
    refused(await world.client.get("/v1/models/tiny"), 404, code="model_not_found")


async def test_keys_guard_everything_but_probes() -> None:
    world = World(api_key=("one", "two"))
    for path in ("/v1/models", "/health", "/metrics", "/load", "/version", "/ping", "/nothing"):
        answer = await world.client.get(path)
        refused(answer, 401, code="invalid_api_key", type="authentication_error")
        assert "one" not in answer.text
    for path in ("/health/live", "/health/ready"):
        assert (await world.client.get(path)).status_code == 200
    for key, status in (("one", 200), ("two", 200), ("three", 401), ("", 401), ("onetwo", 401), ("ö", 401)):
        headers = [(b"authorization", f"Bearer {key}".encode())]
        assert (await world.client.get("/v1/models", headers=headers)).status_code == status
    basic = {"Authorization": "Basic one"}
    assert (await world.client.get("/v1/models", headers=basic)).status_code == 401


async def test_request_ids_are_sent_back_where_enabled() -> None:
    world = World(enable_request_id_headers=True)
    assert (await world.chat()).headers["x-request-id"]
    named = await world.client.get("/nothing", headers={"X-Request-Id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    assert "x-request-id" not in (await World().chat()).headers


async def test_origins() -> None:
    asks = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    world = World(allowed_origins=("http://page",), api_key=("k",))
    allowed = await world.client.options("/v1/chat/completions", headers=asks)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "http://page")
    closed = await World().client.get("/version", headers={"Origin": "http://page"})
    assert "access-control-allow-origin" not in closed.headers


# Tokens


async def test_tokenize_and_back() -> None:
    world = World()
    made = (await world.post("/tokenize", {"prompt": "hi"})).json()
    assert made == {"count": 3, "max_model_len": 64, "tokens": [256, 104, 105]}
    assert (await world.post("/tokenize", {"prompt": "hi", "add_special_tokens": False})).json()["count"] == 2
    assert (await world.post("/tokenize", {"prompt": "x" * 50_000})).json()["count"] == 50_001
    talk = (await world.post("/tokenize", {"messages": HI})).json()
    assert (await world.post("/detokenize", {"tokens": talk["tokens"]})).json() == {
        "prompt": "<bos><s>user:hi<e><s>assistant:"
    }
    refused(await world.post("/tokenize", {}), param="prompt")
    refused(await world.post("/detokenize", {"tokens": [9999]}), param="tokens")


async def test_without_a_tokenizer_ids_are_served() -> None:
    world = World(words=Words())
    answer = (await world.complete(prompt=[97], logprobs=1, max_tokens=2)).json()
    assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 2
    refused(await world.chat(), param="messages")


# Streams that end badly, and clients that go away


class Wire:
    """One request straight to the application, with what a server would see of it."""

    def __init__(self, world: World, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.arrived = asyncio.Event()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [],
            "server": ("weft", 80),
        }
        self.task = asyncio.ensure_future(world.app(scope, self._inbox.get, self._take))  # type: ignore[arg-type]

    async def _take(self, message: Any) -> None:
        self.sent.append(message)
        self.arrived.set()

    def hang_up(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def text(self, *, until: str) -> str:
        while until not in (text := b"".join(m.get("body", b"") for m in self.sent).decode()):
            self.arrived.clear()
            await self.arrived.wait()
        return text

    @property
    def whole(self) -> bool:
        """Whether the body was brought to its end."""
        return any(m["type"] == "http.response.body" and not m.get("more_body") for m in self.sent)


def endless(request: Request) -> Iterable[Output]:
    """Says one letter, and never ends."""
    yield output(request.id, "a")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_requests(path: str, stream: bool) -> None:
    world = World(FakeEngine(endless))
    wire = Wire(world, path, {**CHAT, "prompt": "ab", "stream": stream, "n": 2})
    while len(world.engine.open) < 2 or (stream and not wire.sent):
        await asyncio.sleep(0)
    wire.hang_up()
    await wire.task
    assert not world.engine.open and len(world.engine.aborted) == 2
    assert not world.service.answers


async def test_a_client_that_is_gone_before_the_first_byte_ends_its_requests() -> None:
    world = World(FakeEngine(endless))
    wire = Wire(world, "/v1/chat/completions", {**CHAT, "stream": True})
    wire.hang_up()
    await wire.task
    assert world.engine.requests and not world.engine.open and not world.service.answers


async def test_a_handler_that_is_cancelled_ends_its_requests() -> None:
    world = World(FakeEngine(endless))
    wire = Wire(world, "/v1/chat/completions", {**CHAT, "stream": True})
    await wire.text(until='"content":"a"')
    wire.task.cancel()
    await asyncio.gather(wire.task, return_exceptions=True)
    assert not world.engine.open and not world.service.answers


async def test_a_stream_that_breaks_says_why_and_is_cut() -> None:
    engine = FakeEngine(endless)
    engine.breaks = True
    wire = Wire(World(engine), "/v1/chat/completions", {**CHAT, "stream": True})
    await wire.task
    text = b"".join(message.get("body", b"") for message in wire.sent).decode()
    last = json.loads(text.strip().rpartition("\n\n")[2].removeprefix("data: "))
    assert last["error"]["code"] == "engine_dead" and "rank 1 failed during step" in last["error"]["message"]
    assert "[DONE]" not in text and not wire.whole


async def test_before_the_first_byte_a_dead_engine_is_a_500() -> None:
    engine = FakeEngine(endless)
    engine.breaks = True
    assert "look at dmesg" in refused(await World(engine).chat(), 500, code="engine_dead", type="server_error")
    world = World()
    world.engine.failure = DEAD
    refused(await world.chat(stream=True), 500, code="engine_dead")
    assert "SIGKILL" in refused(await world.client.get("/health"), 503)
    assert (await world.client.get("/health/live")).status_code == 200


async def test_a_silent_stream_is_kept_alive() -> None:
    world = World(FakeEngine(endless), keepalive_interval=0.01)
    wire = Wire(world, "/v1/chat/completions", {**CHAT, "stream": True})
    text = await wire.text(until=": keepalive\n\n: keepalive\n\n")
    assert '"content":"a"' in text
    wire.hang_up()
    await wire.task


# Health and numbers


async def test_health_is_forward_progress() -> None:
    world = World(FakeEngine(endless), progress_timeout=0.0)
    # Nothing to do, nothing done: fine for ever.
    assert (await world.client.get("/health")).status_code == 200
    wire = Wire(world, "/v1/chat/completions", {**CHAT, "stream": True})
    await wire.text(until='"content":"a"')
    assert (await world.client.get("/load")).json() == {"server_load": 1}
    world.engine.stats = replace_steps(world.engine.stats, 1)
    assert (await world.client.get("/health")).status_code == 200
    assert "no step has finished" in refused(await world.client.get("/health"), 503, code="unhealthy")
    world.engine.stats = replace_steps(world.engine.stats, 2)
    assert (await world.client.get("/ping")).status_code == 200
    wire.hang_up()
    await wire.task
    assert (await world.client.get("/health")).status_code == 200


def replace_steps(stats: Stats, steps: int) -> Stats:
    return Stats(blocks_total=stats.blocks_total, steps=steps)


async def test_numbers() -> None:
    world = World()
    world.engine.stats = Stats(running=2, waiting=3, blocks_used=5, blocks_total=10, prompt_tokens=7, preemptions=1)
    await world.chat(n=2)
    await world.complete(max_tokens=3)
    labels = {"model_name": "tiny", "engine": "0"}
    expected = {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "kv_cache_usage_perc": 0.5,
        "prompt_tokens_total": 7,
        "num_preemptions_total": 1,
        "time_to_first_token_seconds_count": 3,
        "inter_token_latency_seconds_count": 5 + 5 + 2,
        "e2e_request_latency_seconds_count": 3,
        "request_generation_tokens_sum": 6 + 6 + 3,
    }
    for name, value in expected.items():
        assert await world.metric(f"vllm:{name}", **labels) == value, name
    for reason, count in (("stop", 2), ("length", 1)):
        assert await world.metric("vllm:request_success_total", finished_reason=reason, **labels) == count
    assert await world.metric("vllm:time_to_first_token_seconds_bucket", le="0.001") is not None
    assert (await world.client.get("/version")).json()["version"]
