"""AsyncLLM: a model to call from asyncio."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, overload

from weft.config import EngineConfig
from weft.engine.client.arguments import engine_config
from weft.engine.client.control import memory_rows, profile_command, stat_rows, swap_command
from weft.engine.client.traces import END, OpenTraces
from weft.engine.cluster.assembly import assemble
from weft.engine.core.commands import Command, RankStats, Replies, ResetPrefixCache, Sleep, Wake
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Stats, duplicate_id_error
from weft.engine.frontend.collector import Collector
from weft.engine.frontend.frontend import Frontend
from weft.engine.frontend.outputs import EmbeddingOutput, RequestOutput
from weft.engine.frontend.pooling import PendingScores, Pooler
from weft.engine.frontend.prompt import Prompt, PromptLike
from weft.engine.frontend.turns import SYSTEM, History, copy_history, read_turn, turn_messages, turn_params
from weft.engine.replicas.engine_nodes import EngineNodes
from weft.engine.replicas.opening import (
    Message,
    check_params,
    describe_engine,
    list_prompts,
    open_model,
    plan_engines,
)
from weft.engine.replicas.remote import AsyncEngine
from weft.engine.replicas.replicas import ReplicaSet, start_engine
from weft.engine.sandbox.isolated import run_blocking
from weft.errors import EngineError, RequestError
from weft.machine.hardware.host import probe_host
from weft.plan.plan import Plan

UNLIMITED = 2**31 - 1
MakePrompt = Callable[[Frontend], Awaitable[Prompt]]

SHUT_DOWN = "this AsyncLLM has been shut down; make another"


@dataclass(frozen=True)
class StartedEngine:
    """An engine that has started, and the frontend of its model."""

    engine: AsyncEngine | ReplicaSet
    frontend: Frontend


class AsyncLLM:
    """An engine and its model for one event loop, with the arguments of `LLM`.

    The engine runs in processes of its own, so that the event loop stays free. The engine starts with `async with`,
    `await start()` or the first request. Any number of tasks may use it at once, and their requests share the engine's
    steps. `shutdown` ends it; tasks in flight get an EngineError.

    The constructor raises ConfigError; the start raises ConfigError, ModelError, PlanError and EngineError.
    """

    def __init__(self, model: str | os.PathLike[str], **engine: Any) -> None:
        # Tasks wait in the queue: unlike a server's clients, they have no other server to go to.
        queued = engine.get("max_num_queued_reqs")
        self._set(engine_config(model, {**engine, "max_num_queued_reqs": UNLIMITED if queued is None else queued}))

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncLLM:
        """Create an AsyncLLM with a config that has been built before."""
        llm = cls.__new__(cls)
        llm._set(config)
        return llm

    def _set(self, config: EngineConfig) -> None:
        self.config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start: asyncio.Task[StartedEngine] | None = None
        self._ended = False
        self._traces = OpenTraces(elsewhere=False)
        self._running: dict[str, Collector] = {}  # by request id

    async def start(self) -> AsyncLLM:
        """Start the engine and wait until it is ready for requests. May be called twice."""
        await self._ready()
        return self

    @property
    def plan(self) -> Plan:
        """The executed plan: each rank's share of the model, and the limits. Raises RequestError before the start."""
        return self._started.engine.plan

    @property
    def stats(self) -> Stats:
        """Requests, KV blocks and counters as of the last step. Raises RequestError before the start."""
        return self._started.engine.stats

    def sampling_params(self, fields: Mapping[str, Any], **defaults: Any) -> SamplingParams:
        """See `Frontend.sampling_params`. Raises RequestError before the start."""
        return self._started.frontend.sampling_params(fields, **defaults)

    def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answer while it grows: the same object each time, with everything generated so far.

        The prompt is one that `LLM.generate` takes. `request_id`, which `abort` takes, must differ from the ids of
        other requests in flight; None creates one. Without `sampling_params` the model's own defaults apply. Closing
        the iterator, or cancelling its task, ends the request. Iterating raises RequestError, QueueFullError,
        EngineError, and OutputError for an answer that the model cannot go on with.
        """

        async def parse(frontend: Frontend) -> Prompt:
            return frontend.parse_prompt(prompt)

        return self._answer(parse, sampling_params, request_id, priority)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    @overload
    def chat(
        self,
        query: str,
        history: Sequence[tuple[str, str]] | None = None,
        system: str = SYSTEM,
        generation_config: object = None,
        **sampling: Any,
    ) -> Coroutine[Any, Any, tuple[str, History]]: ...

    def chat(
        self, *arguments: Any, **options: Any
    ) -> AsyncGenerator[RequestOutput, None] | Coroutine[Any, Any, tuple[str, History]]:
        """Yield the answer to one conversation, as `generate` does, through the model's chat template.

        With a text instead of messages, or `query=`, await the text of the answer to it and a new list of all turns, as
        `LLM.chat` returns them.
        """
        if (turn := read_turn(arguments, options)) is not None:
            return self._answer_turn(*turn[0], **turn[1])
        return self._answer_messages(*arguments, **options)

    async def _answer_turn(
        self,
        query: str,
        history: Sequence[tuple[str, str]] | None = None,
        system: str = SYSTEM,
        generation_config: object = None,
        **sampling: Any,
    ) -> tuple[str, History]:
        turns, frontend = copy_history(history), (await self._ready()).frontend
        params = turn_params(frontend, generation_config, sampling)
        messages = turn_messages(query, turns, system)
        response = ""
        async for output in self._answer(lambda frontend: frontend.chat_prompt(messages), params, None, 0):
            response = output.outputs[0].text
        return response, [*turns, (query, response)]

    def _answer_messages(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        async def render(frontend: Frontend) -> Prompt:
            return await frontend.chat_prompt(
                messages,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_variables=chat_template_kwargs,
            )

        return self._answer(render, sampling_params, request_id, priority)

    async def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """See `LLM.embed`. Cancelling the task ends the requests."""
        started = await self._ready()
        pooler, now = Pooler(started.frontend, self.config.model), time.monotonic()

        def collect() -> list[Collector]:
            pooler.check_dimensions(dimensions)
            return [
                pooler.embedding_collector(prompt, arrival_s=now, truncate=truncate_prompt_tokens)
                for prompt in list_prompts(prompts)
            ]

        collectors = await asyncio.to_thread(collect)
        await _run_to_end(started.engine, collectors)
        return [pooler.embedding_output(collector, dimensions) for collector in collectors]

    async def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[float]:
        """See `LLM.score`. Cancelling the task ends the requests."""
        started = await self._ready()
        pooler, now = Pooler(started.frontend, self.config.model), time.monotonic()

        def collect() -> PendingScores:
            return pooler.score_request(
                query, documents, arrival_s=now, instruction=instruction, truncate=truncate_prompt_tokens
            )

        scoring = await asyncio.to_thread(collect)
        await _run_to_end(started.engine, scoring.collectors)
        return scoring.scores()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests. Their iterations yield the answer so far, with finish_reason "abort". Ignores unknown ids."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        collectors = [self._running[name] for name in names if name in self._running]
        if collectors:
            self._started.engine.abort([request.id for collector in collectors for request in collector.requests])

    async def layout(self) -> list[dict[str, Any]]:
        """See `LLM.layout`."""
        return memory_rows(await (await self._ready()).engine.call_each(RankStats(reset=False)))

    async def rank_stats(self) -> list[dict[str, Any]]:
        """See `LLM.rank_stats`."""
        return stat_rows(await (await self._ready()).engine.call_each(RankStats()))

    async def sleep(self, level: int = 1) -> None:
        """See `LLM.sleep`."""
        await self._call(Sleep(level))

    async def wake_up(self) -> None:
        """See `LLM.wake_up`."""
        await self._call(Wake())

    async def is_sleeping(self) -> bool:
        """Return True between `sleep` and `wake_up`."""
        return bool((await self._ready()).engine.stats.sleep_level)

    async def swap_weights(self, checkpoint: str | os.PathLike[str]) -> None:
        """See `LLM.swap_weights`."""
        plan = (await self._ready()).engine.plan
        await self._call(await asyncio.to_thread(swap_command, checkpoint, self.config, plan))

    async def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`."""
        await self._call(ResetPrefixCache())
        return True

    async def profile(self, steps: int, directory: str | os.PathLike[str]) -> list[str]:
        """See `LLM.profile`."""
        return self._traces.begin(steps, await self._call(profile_command(steps, directory)))

    async def _call(self, command: Command | ResetPrefixCache) -> Replies:
        """Start the engine if need be, and have its ranks execute a command."""
        return await (await self._ready()).engine.call(command)

    async def shutdown(self) -> None:
        """End the engine and free its memory. May be called twice, and from any thread's event loop."""
        self._ended = True
        if self._loop is None or self._start is None:
            return
        if asyncio.get_running_loop() is not self._loop:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._close(self._start), self._loop))
        else:
            await self._close(self._start)

    def __repr__(self) -> str:
        state: Plan | str = "shut down" if self._ended else "not started"
        if not self._ended and self._start and self._start.done() and not self._start.exception():
            engine = self._start.result().engine
            state = str(engine.failure) if engine.failure else engine.plan
        return describe_engine("AsyncLLM", self.config.model, state)

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    @property
    def _started(self) -> StartedEngine:
        if self._start is None or not self._start.done():
            raise RequestError(
                "this AsyncLLM has not started; use `async with`, or `await llm.start()`", code="not-started"
            )
        return self._start.result()

    async def _ready(self) -> StartedEngine:
        """Wait until the engine has started. The first caller starts it, and may be cancelled without harm."""
        loop = asyncio.get_running_loop()
        if self._ended:
            raise RequestError(SHUT_DOWN, code="engine-closed")
        if self._start is None:
            self._loop, self._start = loop, loop.create_task(self._open())
        if loop is not self._loop:
            raise RequestError(
                "this AsyncLLM belongs to another event loop; make one in each, or share the loop",
                code="other-event-loop",
            )
        try:
            return await asyncio.shield(self._start)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._start.cancelled() and task and not task.cancelling():
                raise RequestError(SHUT_DOWN, code="engine-closed") from None
            raise

    async def _open(self) -> StartedEngine:
        checkpoint, text_tools = await asyncio.to_thread(open_model, self.config)
        host = probe_host()
        assembly = await asyncio.to_thread(assemble, self.config, checkpoint, host)
        planned = await asyncio.to_thread(plan_engines, self.config, checkpoint, host, assembly)
        asyncio.get_running_loop().run_in_executor(None, text_tools.prepare_vocabulary)
        nodes = EngineNodes(self.config, checkpoint, assembly, planned) if assembly else None
        self._traces = OpenTraces(elsewhere=nodes is not None)
        engine = await start_engine(planned, self.config, nodes=nodes)
        frontend = Frontend.for_engine(self.config, checkpoint, text_tools, max_model_len=engine.plan.max_model_len)
        return StartedEngine(engine, frontend)

    async def _close(self, start: asyncio.Task[StartedEngine]) -> None:
        start.cancel()
        (result,) = await asyncio.gather(start, return_exceptions=True)
        if isinstance(result, StartedEngine):
            if self._traces:
                with suppress(EngineError):  # it has died
                    await asyncio.to_thread(self._traces.end, await result.engine.call(END))
            await result.engine.close()
            result.frontend.close()

    async def _answer(
        self,
        make_prompt: MakePrompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
    ) -> AsyncGenerator[RequestOutput, None]:
        started = await self._ready()
        engine, frontend = started.engine, started.frontend
        params = frontend.sampling_params({}) if sampling_params is None else sampling_params
        check_params(params)
        # In a thread: a long text takes a while to tokenize, and the event loop has other answers to pass on.
        prompt, grammar = await asyncio.to_thread(lambda: run_blocking(_prepare(frontend, make_prompt, params)))
        collector = frontend.create_collector(
            prompt, params, arrival_s=time.monotonic(), priority=priority, grammar=grammar
        )
        name = collector.output.request_id if request_id is None else request_id
        if name in self._running:
            raise duplicate_id_error(name)
        collector.output.request_id = name
        self._running[name] = collector
        try:
            async with aclosing(engine.submit(collector.requests)) as stream:
                async for output in stream:
                    delta = collector.add(output, time.monotonic())
                    if delta is None:
                        continue
                    if delta.cut:
                        engine.abort([output.id])
                    collector.raise_failure()
                    yield collector.output
            if not collector.output.finished:
                yield _mark_aborted(collector.output)
        finally:
            del self._running[name]


async def _prepare(frontend: Frontend, make_prompt: MakePrompt, params: SamplingParams) -> tuple[Prompt, str]:
    """Return a prompt, and the grammar of its answer."""
    return await make_prompt(frontend), await frontend.answer_grammar(params)


async def _run_to_end(engine: AsyncEngine | ReplicaSet, collectors: Sequence[Collector]) -> None:
    """Run the one request of each collector until all have ended."""
    if not collectors:
        return
    owners = {collector.requests[0].id: collector for collector in collectors}
    async with aclosing(engine.submit([collector.requests[0] for collector in collectors])) as stream:
        async for output in stream:
            owners[output.id].add(output, time.monotonic())


def _mark_aborted(output: RequestOutput) -> RequestOutput:
    """Finish all choices that have not finished, with finish_reason "abort"."""
    for choice in output.outputs:
        choice.finish_reason = choice.finish_reason or "abort"
    output.finished = True
    output.metrics.finished_s = time.monotonic()
    return output
