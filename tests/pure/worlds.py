"""The HTTP application over an engine that says what a test tells it to, and clients of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tests.pure.letters import END, frontend, output
from tests.pure.shapes import SMOLLM2
from weft.api.server.app import create_app
from weft.api.service.service import Service
from weft.checkpoint.config.pooling import PoolingSettings
from weft.engine.core.commands import (
    Command,
    Done,
    RankReport,
    RankStats,
    Replies,
    Reply,
    ResetPrefixCache,
    level_after,
)
from weft.engine.core.request import Output, Request, Stats
from weft.engine.executors.base import StartResult
from weft.engine.frontend.text_tools import TextTools
from weft.engine.replicas.running import RunningReplica
from weft.errors import Cause, EngineError, QueueFullError
from weft.http import errors
from weft.http.errors import describe_error
from weft.http.options import ServeOptions
from weft.plan.memory import Capacity
from weft.plan.places import cut_places
from weft.plan.plan import Plan, named_devices

HIDDEN = 4  # numbers of a state
Script = Callable[[Request], Iterable[Output]]
HI = [{"role": "user", "content": "hi"}]
CHAT = {"model": "tiny", "messages": HI}
DEAD = EngineError(Cause(rank=1, phase="step", code="process-killed", cause="killed by SIGKILL", hint="look at dmesg"))


def saying(text: str) -> Script:
    """Each choice says `text`, letter by letter, and then the end token; or max_tokens of it."""

    def script(request: Request) -> Iterable[Output]:
        most = request.params.max_tokens or 10**6
        for at, letter in enumerate(text[:most]):
            yield output(request.id, letter, "length" if at + 1 == most else None, cached_tokens=2)
        if len(text) < most:
            yield output(request.id, END, "stop")

    return script


def in_pieces(*texts: str) -> Script:
    """Each choice says one text a step, and then the end token."""

    def script(request: Request) -> Iterable[Output]:
        for text in texts:
            yield Output(request.id, list(text.encode()), [None] * len(text.encode()))
        yield output(request.id, END, "stop")

    return script


def pools(request: Request) -> Iterable[Output]:
    """Each prompt yields its state, or the logits of the tokens that are wanted, made of its bytes."""
    assert request.pooling is not None
    wanted = len(request.pooling.token_ids) or HIDDEN
    yield Output(request.id, [], [], "stop", cached_tokens=1, pooled=state_of(request.prompt, wanted).tobytes())


def state_of(prompt: Iterable[int], length: int) -> np.ndarray:
    """Numbers that depend on every token of a prompt."""
    state = np.zeros(length)
    for at, token in enumerate(prompt):
        state[at % length] += np.sin((at + 1) * (token + 1))
    return state.astype("<f4")


def dying(request: Request) -> Iterable[Output]:
    """The engine that has the request dies."""
    raise DEAD


HELLO = saying("hello")


PLAN = Plan(
    model="tiny",
    checkpoint="",
    load_format="dummy",
    shape=SMOLLM2,
    dtype="bfloat16",
    places=tuple(cut_places(SMOLLM2, [2, 1], [30])),
    devices=named_devices("cpu", "cpu"),
    cores=((0,), (1,)),
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=16,
)
READY = StartResult(
    num_blocks=10,
    ranks=[
        Capacity(
            rank=rank,
            host="here",
            device="cpu",
            weight_bytes=0,
            activation_bytes=0,
            free_bytes=0,
            block_bytes=PLAN.block_bytes(rank),
            load_s=0.0,
        )
        for rank in range(2)
    ],
)


class FakeEngine:
    """Engine of two ranks that outputs its script, unless it sleeps.

    Afterwards it ends the stream, or breaks; while a request has not ended, it waits.
    """

    plan, ready = PLAN, READY

    def __init__(self, script: Script = HELLO) -> None:
        self.script = script
        self.failure: EngineError | None = None
        self.full = False
        self.breaks = False
        self.stats = Stats(blocks_total=10)
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.open: set[str] = set()
        self.left = asyncio.Event()
        self.stopped_s, self.computes = 0.0, False
        self.called: list[Command | ResetPrefixCache] = []
        self.reply: Reply = Done()  # of every rank to a command, except RankStats
        self.awake = asyncio.Event()
        self.awake.set()

    @property
    def replicas(self) -> list[RunningReplica]:
        return [RunningReplica(self.plan, self.ready)]

    @property
    def replica_stats(self) -> list[Stats]:
        return [self.stats]

    @property
    def outage(self) -> str:
        return str(self.failure or "")

    async def call_each(self, command: Command | ResetPrefixCache) -> list[tuple[RunningReplica, Replies]]:
        return [(RunningReplica(self.plan, self.ready), await self.call(command))]

    def submit(self, requests: Sequence[Request]) -> AsyncGenerator[Output, None]:
        if self.full:
            raise QueueFullError("1024 requests wait already", retry_after_s=3, code="queue-full")
        if self.failure:
            raise self.failure
        self.requests += requests
        self.open.update(request.id for request in requests)
        return Stream(self._run(requests), lambda: self.abort([r.id for r in requests if r.id in self.open]))

    def abort(self, ids: Sequence[str]) -> None:
        self.aborted += ids
        self.open.difference_update(ids)
        self.left.set()

    async def call(self, command: Command | ResetPrefixCache) -> Replies:
        self.stats.sleep_level = level_after(command, self.stats.sleep_level)
        self.called.append(command)
        if self.stats.sleep_level:
            self.awake.clear()
        else:
            self.awake.set()
        if isinstance(command, RankStats):
            return [
                RankReport(
                    steps=0,
                    compute_s=0.0,
                    communication_s=0.0,
                    waiting_s=0.0,
                    allocated_bytes=1000 + rank,
                    routed_tokens=(7,),
                )
                for rank in range(2)
            ]
        return [self.reply] * 2

    async def _run(self, requests: Sequence[Request]) -> AsyncGenerator[Output, None]:
        await self.awake.wait()
        for step in zip(*(self.script(request) for request in requests), strict=True):
            await asyncio.sleep(0)
            for made in step:
                if made.finish_reason:
                    self.open.discard(made.id)
                yield made
        if self.breaks:
            self.failure = DEAD
            raise DEAD
        while self.open & {request.id for request in requests}:
            self.left.clear()
            await self.left.wait()


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

    def __init__(
        self,
        engine: FakeEngine | None = None,
        text_tools: TextTools | None = None,
        max_model_len: int = 64,
        pooling: PoolingSettings | None = None,
        **options: Any,
    ) -> None:
        self.engine = engine or FakeEngine()
        tools = {} if text_tools is None else {"text_tools": text_tools}
        front = frontend(max_model_len=max_model_len, pooling=pooling, hidden=HIDDEN, **tools)
        self.service = Service(self.engine, front, ServeOptions(**options), model="tiny", capacity=8)
        self.app = create_app(self.service)
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


@contextmanager
def error_codes() -> Iterator[list[str]]:
    """Codes of the errors with which the application answers meanwhile; "" for an error without a code."""
    codes: list[str] = []

    def noted(error: Exception) -> Any:
        codes.append(getattr(error, "code", ""))
        return describe_error(error)

    with patch.object(errors, "describe_error", noted):
        yield codes


class Wire:
    """One request straight to the application, with what a server would see of it; without a body none has come yet."""

    def __init__(self, world: World, path: str, body: dict[str, Any] | None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.arrived = asyncio.Event()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        if body is not None:
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
        """True if the body was sent to its end."""
        return any(m["type"] == "http.response.body" and not m.get("more_body") for m in self.sent)


def endless(request: Request) -> Iterable[Output]:
    """Says one letter, and never ends."""
    yield output(request.id, "a")
