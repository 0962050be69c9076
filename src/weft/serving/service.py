"""Service: one model as the endpoints see it. What goes to the engine and comes back is counted and watched here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from weft.client.collector import Collector, Delta
from weft.client.frontend import Frontend, Prompt, PromptLike
from weft.core.params import SamplingParams
from weft.core.request import Output, Request, Stats
from weft.errors import EngineError
from weft.serving import body
from weft.serving.errors import HttpError
from weft.serving.health import Progress
from weft.serving.metrics import Metrics
from weft.serving.openai_types import PromptTokensDetails, Usage
from weft.serving.options import ServeOptions
from weft.serving.sampling import KNOWN, refuse_unsupported

T = TypeVar("T", bound=msgspec.Struct)

OFFLOAD_CHARACTERS = 4096  # a longer text is tokenised in a thread: the loop has other streams to feed


class Engine(Protocol):
    """What serving needs of `client.remote.AsyncEngine`."""

    @property
    def failure(self) -> EngineError | None:
        """Why the engine is dead."""
        ...

    @property
    def stats(self) -> Stats:
        """As of the last step that is known of."""
        ...

    def submit(self, requests: Sequence[Request]) -> AsyncGenerator[Output, None]:
        """The requests' outputs as they come; closing it aborts those that are unfinished. Raises
        QueueFullError, RequestError and EngineError at once."""
        ...

    def abort(self, ids: Sequence[str]) -> None: ...


class Service:
    """The engine, its frontend, and what the endpoints share. The first of `names` is the one in metrics."""

    def __init__(
        self, engine: Engine, frontend: Frontend, options: ServeOptions, *, model: str, capacity: int
    ) -> None:
        """`model` as the user typed it; `capacity` the requests that can run and wait, together."""
        self.engine = engine
        self.frontend = frontend
        self.options = options
        self.model = model
        self.names = options.served_model_name or (model,)
        self.capacity = capacity
        self.created = int(time.time())
        self.metrics = Metrics(self.names[0], frontend.max_model_len, lambda: engine.stats)
        self.progress = Progress(options.progress_timeout, time.monotonic)
        self.draining = False
        self.answers = 0  # being made now
        self._unknown = body.Unknown()

    async def read(self, request: HttpRequest, target: type[T]) -> T:
        """The body of a request as `target`; what is wrong with it is raised, what is unknown is logged."""
        raw = body.parse(await body.read(request, self.options.max_body_bytes))
        refuse_unsupported(raw)
        wire = body.convert(raw, target)
        self._unknown.note(raw, target, KNOWN)
        return wire

    def named(self, model: str | None) -> str:
        """The name to answer under: the one that was asked for."""
        if model is None or model in self.names:
            return model or self.names[0]
        known = ", ".join(map(repr, self.names))
        raise HttpError(
            404, f"the model {model!r} does not exist here; known: {known}", code="model_not_found", param="model"
        )

    async def prompt(self, prompt: PromptLike, *, special: bool = True) -> Prompt:
        """As `Frontend.prompt`, without holding up the loop."""
        if isinstance(prompt, str) and len(prompt) > OFFLOAD_CHARACTERS:
            return await asyncio.to_thread(self.frontend.prompt, prompt, special=special)
        return self.frontend.prompt(prompt, special=special)

    async def conversation(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] | None, **how: bool
    ) -> Prompt:
        """As `Frontend.conversation`, with the server's defaults for the template."""
        said = {**self.options.default_chat_template_kwargs, **(template_kwargs or {})}
        # Rendering takes its time too, and a template is the model's own program.
        return await asyncio.to_thread(self.frontend.conversation, messages, template_kwargs=said, **how)

    def answer(self, prompts: Sequence[Prompt], params: SamplingParams, *, priority: int | None) -> Answer:
        """Hand prompts to the engine; QueueFullError, RequestError and EngineError come now or never."""
        if self.draining:
            raise HttpError(503, "the server is shutting down; ask another", code="shutting_down", retry_after_s=1)
        if params.n * len(prompts) > self.capacity:
            raise HttpError(
                400,
                f"{len(prompts)} prompts with n {params.n} are more than the {self.capacity} requests that can run "
                "and wait here; send fewer at once",
                code="invalid_value",
                param="n",
            )
        now = time.monotonic()
        jobs = [self.frontend.collect(p, params, arrival_s=now, priority=priority or 0) for p in prompts]
        outputs = self.engine.submit([request for job in jobs for request in job.requests])
        if not self.answers:
            self.progress.see(-1, busy=False)
        self.answers += 1
        return Answer(self, jobs, outputs)

    def count(self, job: Collector, delta: Delta, last_s: float | None, now_s: float) -> None:
        """Observe what a Delta says of time and tokens; `last_s` is when its choice had one before."""
        metrics, times = self.metrics, job.output.metrics
        if last_s is not None:
            metrics.itl.observe(now_s - last_s)
        else:
            metrics.ttft.observe(now_s - times.arrival_s)
            metrics.prompt_tokens.observe(len(job.output.prompt_token_ids))
        if delta.finish_reason is not None:
            metrics.finished(delta.finish_reason)
            metrics.e2e.observe(now_s - times.arrival_s)
            metrics.decode.observe(now_s - (times.first_token_s or now_s))
            metrics.generation_tokens.observe(len(job.output.outputs[delta.index].token_ids))

    def trouble(self) -> str | None:
        """What is wrong with the engine, if anything."""
        if self.engine.failure is not None:
            return str(self.engine.failure)
        self.progress.see(self.engine.stats.steps, busy=self.answers > 0)
        if self.progress.stalled_s:
            return f"requests run, and no step has finished for {self.progress.stalled_s:.0f} s"
        return None


class Answer:
    """What the engine says to one HTTP request: (prompt number, Delta) as they come, until every choice has
    ended. `aclose` must be called; it aborts what has not."""

    def __init__(self, service: Service, jobs: Sequence[Collector], outputs: AsyncGenerator[Output, None]) -> None:
        self.jobs = jobs
        self._service = service
        self._outputs = outputs
        self._homes = {request.id: (at, job) for at, job in enumerate(jobs) for request in job.requests}
        self._open = True

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        running = len(self._homes)
        last_s: dict[str, float] = {}
        async for output in self._outputs:
            now = time.monotonic()
            at, job = self._homes[output.id]
            delta = job.add(output, now)
            if delta is None:
                continue
            self._service.count(job, delta, last_s.get(output.id), now)
            last_s[output.id] = now
            if delta.cut:
                self._service.engine.abort([output.id])
            yield at, delta
            running -= delta.finish_reason is not None
            if not running:
                break

    async def finish(self) -> None:
        """Wait for all of it."""
        async for _ in self:
            pass

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            self._service.answers -= 1
            await self._outputs.aclose()

    @property
    def usage(self) -> Usage:
        """So far, over all prompts and choices."""
        prompt = sum(len(job.output.prompt_token_ids) for job in self.jobs)
        made = sum(len(choice.token_ids) for job in self.jobs for choice in job.output.outputs)
        cached = sum(job.output.num_cached_tokens for job in self.jobs)
        return Usage(prompt, made, prompt + made, PromptTokensDetails(cached))
