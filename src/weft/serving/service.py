"""Service: one model as the endpoints see it. What goes to the engine and comes back is counted and watched here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from weft.client.collector import Collector, Delta
from weft.client.frontend import Frontend, Prompt
from weft.client.memory import Trimmer
from weft.core.params import SamplingParams
from weft.core.request import Output, Request, Stats
from weft.errors import EngineError, ModelError, OutputError, RequestError
from weft.serving import body
from weft.serving.errors import HttpError
from weft.serving.foreseen import Foreseen
from weft.serving.metrics import Metrics
from weft.serving.openai_types import PromptTokensDetails, Rendering, Usage
from weft.serving.options import ServeOptions
from weft.serving.progress import Progress
from weft.serving.sampling import KNOWN, check_lengths, refuse_unsupported
from weft.serving.threads import LoopShare, WorkThreads
from weft.text.limits import LIMITS

log = logging.getLogger("weft.serving")

T = TypeVar("T", bound=msgspec.Struct)
P = TypeVar("P")  # what an endpoint prepares

LARGE_TOKENS = 2**16  # of a request's prompts, whose memory is given back to the system after the answer


class Engine(Protocol):
    """What serving needs of `client.remote.AsyncEngine`."""

    stats: Stats  # as of the last step that is known of
    failure: EngineError | None  # why the engine has died

    def submit(self, requests: Sequence[Request]) -> AsyncGenerator[Output, None]:
        """The requests' outputs as they come; closing it aborts those that are unfinished. Raises
        QueueFullError and EngineError at once."""
        ...

    def abort(self, ids: Sequence[str]) -> None:
        """Nothing more comes for these; a stream that is left with none ends."""
        ...


class Service:
    """The engine, its frontend, and what the endpoints share. The first of `names` is the one in metrics."""

    def __init__(self, engine: Engine, frontend: Frontend, options: ServeOptions, *, model: str, capacity: int) -> None:
        """`model` as the user typed it; `capacity` the requests that can run and wait, together."""
        self.engine = engine
        self.frontend = frontend
        self.options = options
        self.model = model
        self.names = options.served_model_name or (model,)
        self.capacity = capacity
        self.created = int(time.time())
        self.metrics = Metrics(self.names[0], frontend.max_model_len, lambda: engine.stats)
        self.draining = False
        self.answers: set[Answer] = set()  # being made now
        self.idle = asyncio.Event()
        self.idle.set()
        self.foreseen: Foreseen | None = None
        self._progress = Progress(options.progress_timeout, time.monotonic)
        usual_bytes = max(LIMITS.body_bytes, LIMITS.bytes_per_token * frontend.max_model_len)
        self.body_bytes = options.max_body_bytes or usual_bytes  # of the longest body that is read
        self._trimmer = Trimmer()
        self._intake = body.Intake(self.body_bytes, self._trimmer.trim_later)
        self._unknown = body.Unknown()
        self._threads = {False: WorkThreads(LIMITS.small_threads), True: WorkThreads(LIMITS.large_threads)}
        self._loop_share = LoopShare(time.monotonic)

    async def prepared(self, request: HttpRequest, work: Callable[[Service, bytes], P]) -> P:
        """Result of `work` on a request's body. It runs in a thread: a small body may ask for much, and a template is a
        stranger's. Large bodies have threads of their own, which small ones do not wait for. What is tiny, and of a
        kind that is quick here, runs in the event loop, where it costs less than the way to a thread."""
        content = await self._intake.receive(request)
        large = len(content) > LIMITS.small_bytes
        run = partial(work, self, content)
        tiny = len(content) <= LIMITS.tiny_bytes
        if tiny:
            run = partial(self._loop_share.timed, work, run)
        try:
            if tiny and self._loop_share.allows(work):
                return run()
            return await self._threads[large].result(run)
        except ModelError as error:
            log.error("%s", error)
            raise
        finally:
            if large:
                self._trimmer.trim_later()

    def wire(self, content: bytes, target: type[T]) -> T:
        """A body as `target`; what is wrong with it is raised, what is unknown is logged."""
        if len(content) > LIMITS.small_bytes:
            body.check_structure(content, max(LIMITS.json_values, 2 * self.frontend.max_model_len))
        raw = body.parse(content)
        refuse_unsupported(raw)
        check_lengths(raw, vocab=self.frontend.vocab, max_model_len=self.frontend.max_model_len)
        wire = body.convert(raw, target)
        self._unknown.note(raw, target, KNOWN)
        return wire

    def named(self, model: str | None) -> str:
        """The name to answer under: the one that was asked for."""
        if model is None or model in self.names:
            return model or self.names[0]
        known = ", ".join(map(repr, self.names))
        raise HttpError(
            404, f"the model {model!r:.200} does not exist here; known: {known}", code="model_not_found", param="model"
        )

    def render(self, messages: Sequence[Mapping[str, Any]], how: Rendering) -> str:
        """The messages of a request as text, with the server's defaults for the template."""
        return self.frontend.render_chat(
            messages,
            add_generation_prompt=how.add_generation_prompt is not False,
            continue_final_message=bool(how.continue_final_message),
            template_variables={**self.options.default_chat_template_kwargs, **(how.chat_template_kwargs or {})},
        )

    def check_places(self, prompts: int, params: SamplingParams) -> None:
        """Raise RequestError for more prompts and choices than can run and wait here, before work goes into them."""
        if params.n * prompts > self.capacity:
            raise RequestError(
                f"{prompts} prompts with n {params.n} are more than the {self.capacity} requests that can run "
                "and wait here; send fewer at once",
                param="n",
            )

    def jobs(self, prompts: Iterable[Prompt], params: SamplingParams, *, priority: int | None) -> list[Collector]:
        """The engine's requests for prompts, within what may be sent to the engine at once."""
        now = time.monotonic()
        most = max(LIMITS.prompt_tokens, 4 * self.frontend.max_model_len)
        jobs: list[Collector] = []
        tokens = ids = 0
        for prompt in prompts:
            tokens += params.n * len(prompt.ids)
            if tokens > most:
                raise RequestError(
                    f"the prompts of one request have more than {most:,} tokens, each counted n = {params.n} times; "
                    "send several requests",
                    param="n" if params.n > 1 else "prompt",
                )
            job = self.frontend.create_collector(prompt, params, arrival_s=now, priority=priority or 0)
            ids += params.n * job.requests[0].params.id_count
            if ids > LIMITS.sampling_ids:
                raise RequestError(
                    "stop_token_ids, logit_bias, allowed_token_ids and bad_words have more than "
                    f"{LIMITS.sampling_ids:,} token ids, counted once per prompt and choice; send several requests",
                    param="n",
                )
            jobs.append(job)
        return jobs

    def answer(self, jobs: Sequence[Collector]) -> Answer:
        """Hand requests to the engine. Whatever speaks against it is raised here, before anything is answered."""
        if self.draining:
            raise shut_down()
        return Answer(self, jobs)

    def opened(self, answer: Answer) -> None:
        if not self.answers:
            self._progress.begin()
        self.answers.add(answer)
        self.idle.clear()
        if self.foreseen:
            self.foreseen.opened(len(self.answers))

    def closed(self, answer: Answer) -> None:
        self.answers.discard(answer)
        if not self.answers:
            self.idle.set()
        if sum(len(job.output.prompt_token_ids) for job in answer.jobs) > LARGE_TOKENS:
            self._trimmer.trim_later()  # they were held until now
        if self.foreseen:
            self.foreseen.closed([job.output for job in answer.jobs], len(self.answers))
            if self.foreseen.told:
                self.foreseen = None

    def count(self, job: Collector, delta: Delta, last_s: float | None, now_s: float) -> None:
        """Observe what a Delta says of time and tokens; `last_s` is when its choice had one before."""
        metrics, times = self.metrics, job.output.metrics
        if last_s is not None:
            metrics.itl.observe(now_s - last_s)
        else:
            metrics.ttft.observe(now_s - times.arrival_s)
            began_s = times.scheduled_s or now_s
            metrics.queue.observe(max(0.0, began_s - times.arrival_s))
            metrics.prefill.observe(now_s - began_s)
            metrics.prompt_tokens.observe(len(job.output.prompt_token_ids))
        if delta.finish_reason is not None:
            metrics.finished(delta.finish_reason)
            metrics.e2e.observe(now_s - times.arrival_s)
            metrics.decode.observe(now_s - (times.first_token_s or now_s))
            metrics.inference.observe(now_s - (times.scheduled_s or now_s))
            metrics.generation_tokens.observe(len(job.output.outputs[delta.index].token_ids))

    def trouble(self) -> str | None:
        """What is wrong with the engine, if anything."""
        if self.engine.failure is not None:
            return str(self.engine.failure)
        still = self._progress.stalled_s(self.engine.stats.steps) if self.answers else 0.0
        return f"requests run, and no step has finished for {still:.0f} s" if still else None


class Answer:
    """What the engine says to one HTTP request: (prompt number, Delta) as they come, until every choice has
    ended. `aclose` must be called; it aborts what has not."""

    def __init__(self, service: Service, jobs: Sequence[Collector]) -> None:
        self.jobs = jobs
        self._service = service
        self._homes = {request.id: (at, job) for at, job in enumerate(jobs) for request in job.requests}
        self._outputs = service.engine.submit([request for job in jobs for request in job.requests])
        service.opened(self)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        running = len(self._homes)
        last_s: dict[str, float] = {}
        async for output in self._outputs:
            now = time.monotonic()
            at, job = self._homes[output.id]
            if output.prompt_logprobs and len(output.prompt_logprobs) > LIMITS.loop_positions:
                delta = await asyncio.to_thread(job.add, output, now)
            else:
                delta = job.add(output, now)
            if delta is None:
                continue
            if job.error:
                raise OutputError(job.error)
            self._service.count(job, delta, last_s.get(output.id), now)
            last_s[output.id] = now
            if delta.cut:
                self._service.engine.abort([output.id])
            yield at, delta
            running -= delta.finish_reason is not None
            if not running:
                return
        raise shut_down()

    def cut_off(self) -> None:
        """Fail whoever waits for the rest."""
        self._service.engine.abort(list(self._homes))

    async def finish(self) -> None:
        """Wait for all of it."""
        async for _ in self:
            pass

    async def aclose(self) -> None:
        await self._outputs.aclose()
        self._service.closed(self)

    @property
    def usage(self) -> Usage:
        """So far, over all prompts and choices."""
        prompt = sum(len(job.output.prompt_token_ids) for job in self.jobs)
        made = sum(len(choice.token_ids) for job in self.jobs for choice in job.output.outputs)
        cached = sum(job.output.num_cached_tokens for job in self.jobs)
        return Usage(prompt, made, prompt + made, PromptTokensDetails(cached))


def shut_down() -> HttpError:
    return HttpError(503, "the server is shutting down; ask another", code="shutting_down", retry_after_s=1)
