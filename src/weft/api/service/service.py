"""Service: the engine and the state that all endpoints share."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from weft.api.observe.device_metrics import DeviceMetrics
from weft.api.observe.metrics import CacheConfig, ServerMetrics
from weft.api.observe.monitoring import ServerMonitor
from weft.api.observe.predicted import PredictionCheck
from weft.api.observe.prefix_debug import PrefixDebug, PrefixReport
from weft.api.observe.profiling import LastProfile
from weft.api.observe.progress import StepProgress
from weft.api.parsers.choose import choose_format
from weft.api.service.engine import ServingEngine, Unloading
from weft.api.service.engine_stream import EngineStream
from weft.api.service.openai_types import TemplateRequest
from weft.api.service.sampling import ACCEPTED_FIELDS, check_lengths, check_supported
from weft.checkpoint.hub import model_names
from weft.engine.core.params import SamplingParams
from weft.engine.frontend.collector import Collector, Delta
from weft.engine.frontend.frontend import Frontend
from weft.engine.frontend.pooling import Pooler
from weft.engine.frontend.prompt import Prompt
from weft.engine.replicas.memory import Trimmer
from weft.engine.sandbox.isolated import Call, Result, advance
from weft.engine.sandbox.pool import Outcome, SandboxBusyError
from weft.engine.templates.limits import LIMITS
from weft.errors import ModelError, RequestError
from weft.http.answer_bytes import AnswerBytes
from weft.http.body import BodyReceiver, Notes, UnknownFields, check_structure, convert_object, parse_object
from weft.http.clients import Clients, current
from weft.http.errors import HttpError, shutting_down_error
from weft.http.options import ServeOptions
from weft.http.threads import LoopGate, WorkSteps, WorkThreads, too_slow_error

if TYPE_CHECKING:
    from weft.api.observe.spans import RequestSpans

log = logging.getLogger("weft.serving")

T = TypeVar("T", bound=msgspec.Struct)
Prepared = TypeVar("Prepared")

LARGE_TOKENS = 2**16  # prompt tokens of an HTTP request above which memory is returned to the system afterwards


class OpenStream(Protocol):
    """One HTTP request that has work in the engine, or will have work."""

    @property
    def collectors(self) -> Sequence[Collector]: ...

    def cut_off(self) -> None:
        """Abort its requests; it ends with a 503 error."""
        ...


class Service:
    """The engine, its frontend, and the state that the endpoints share.

    Endpoints use `frontend` directly for prompts, templates and tokens. Metrics have the first of `names`.
    """

    def __init__(
        self, engine: ServingEngine, frontend: Frontend, options: ServeOptions, *, model: str, capacity: int
    ) -> None:
        """`model` is as the user typed it; `capacity` is the number of requests that can run and wait together."""
        self.engine = engine
        self.frontend = frontend
        self.options = options
        self.clients = Clients(options)
        self.model = model
        self.plan = engine.replicas[0].plan  # of one replica: all replicas run the same checkpoint
        self.names = options.served_model_name or model_names.served_names(model)
        self.pooler = Pooler(frontend, self.names[0])
        self.capacity = capacity
        self.created = int(time.time())
        self.metrics = ServerMetrics(self.names[0], frontend.max_model_len, lambda: engine.replica_stats)
        cache = {"block_size": str(self.plan.block_size), "cache_dtype": self.plan.kv_cache_dtype}
        self.metrics.registry.register(CacheConfig(self.names[0], cache, lambda: engine.replica_stats))
        self.devices = DeviceMetrics([replica.plan for replica in engine.replicas], engine.call_each)
        self.metrics.registry.register(self.devices)
        self.monitor = ServerMonitor(
            self.names[0], lambda: engine.replicas, lambda: engine.replica_stats, self.devices, self.metrics
        )
        self.metrics.registry.register(self.monitor)
        self.last_profile = LastProfile()
        self.draining = False
        self.answer_bytes = AnswerBytes()
        self.streams: set[OpenStream] = set()  # open now
        self.downloads: set[object] = set()  # started by clients, and running
        self.unloading = Unloading(engine, lambda: bool(self.streams) or self.draining, self.note_awake)
        self.idle = asyncio.Event()
        self.idle.set()
        self.spans: RequestSpans | None = None  # with --otlp-traces-endpoint
        self.prediction_check: PredictionCheck | None = None
        self.prefill_tok_s: float | None = None  # by the planner
        self._progress = StepProgress(options.progress_timeout, time.monotonic)
        default_bytes = max(LIMITS.body_bytes, LIMITS.bytes_per_token * frontend.max_model_len)
        self.body_bytes = options.max_body_bytes or default_bytes  # longer bodies are refused
        self.json_values = max(LIMITS.json_values, 2 * frontend.max_model_len)  # of one body
        self._trimmer = Trimmer()
        self._body_receiver = BodyReceiver(self.body_bytes, self._trimmer.trim_later)
        self._unknown_fields = UnknownFields()
        self.notes = Notes()
        self._threads_by_large = {False: WorkThreads(LIMITS.small_threads), True: WorkThreads(LIMITS.large_threads)}
        self._loop_gate = LoopGate(time.monotonic)
        self.prefix_debug = PrefixDebug() if options.enable_prefix_debug else None
        self.answer_format = choose_format(
            frontend.tool_template_source, options.tool_call_parser, options.reasoning_parser
        )

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Absolute paths of the checkpoints that the engine has read: of the model and of the draft model."""
        draft = self.plan.speculation.draft if self.plan.speculation else None
        paths = [self.plan.checkpoint, draft.checkpoint if draft else ""]
        return tuple(os.path.abspath(path) for path in paths if path)

    @property
    def listed_names(self) -> tuple[str, ...]:
        """The names that lists of models have for this client: none while no request would be answered."""
        return () if self.draining or self.engine.outage else tuple(self.visible_names())

    async def prepare(self, request: HttpRequest, work: Callable[[Service, bytes], Prepared]) -> Prepared:
        """Receive a request's body and return the result of `work` on it.

        The work runs in a thread, since a small body may request much work. Large bodies have their own threads, so
        that small bodies do not wait for them. Only work on a tiny body, of a kind that has been quick so far, runs in
        the event loop: that costs less than a thread.
        """
        async with self._received(request) as content:
            steps = self._steps(work, content)
            step = partial(work, self, content)
            return steps.run_here(step) if steps.are_quick else await steps.run_in_thread(step)

    async def prepare_in_steps(
        self, request: HttpRequest, work: Callable[[Service, bytes], Coroutine[Any, Any, Prepared]]
    ) -> Prepared:
        """Like `prepare`, with a coroutine that waits for sandboxed processes (`engine.sandbox.isolated`).

        Chat templates and grammars are untrusted code, which runs there. The steps between run as other work does.
        """
        async with self._received(request) as content:
            steps = self._steps(work, content)
            coroutine = work(self, content)
            arrived: list[Outcome] = []
            step: Callable[[], Call | Result[Prepared]] = partial(advance, coroutine, arrived)
            try:
                while True:
                    reached = steps.run_here(step) if steps.are_quick else await steps.run_in_thread(step)
                    if not isinstance(reached, Call):
                        return reached.value
                    arrived.append(await reached.function.pool.call(reached.data))
            except SandboxBusyError:
                raise too_slow_error() from None
            finally:
                with suppress(ValueError):  # a thread still runs its step
                    coroutine.close()

    @asynccontextmanager
    async def _received(self, request: HttpRequest) -> AsyncIterator[bytes]:
        """Receive a body for the time of its work. Log errors of the model, and free the memory of a large body."""
        content = await self._body_receiver.receive(request)
        try:
            yield content
        except ModelError as error:
            log.error("%s", error)
            raise
        finally:
            if len(content) > LIMITS.small_bytes:
                self._trimmer.trim_later()

    def _steps(self, kind: Callable[..., object], content: bytes) -> WorkSteps:
        gate = self._loop_gate if len(content) <= LIMITS.tiny_bytes else None
        return WorkSteps(kind, self._threads_by_large[len(content) > LIMITS.small_bytes], gate)

    def decode_body(self, content: bytes, target: type[T]) -> T:
        """Decode a body to `target`. Raises RequestError for a wrong field, and on every
        endpoint for a field of an unsupported feature (`api.service.sampling.UNSUPPORTED`). Logs unknown fields."""
        if len(content) > LIMITS.small_bytes:
            check_structure(content, self.json_values)
        raw = parse_object(content)
        check_supported(raw, target.__struct_fields__)
        check_lengths(raw, vocab=self.frontend.vocab, max_model_len=self.frontend.max_model_len)
        decoded = convert_object(raw, target)
        self._unknown_fields.log_new(raw, target, ACCEPTED_FIELDS)
        return decoded

    def visible_names(self) -> list[str]:
        """Names of the model that the client of the request at hand may use."""
        client = current.get()
        return [name for name in self.names if client.may_use(name)]

    def resolve_model(self, model: str | None) -> str:
        """Name of the model for the response: the requested name, or the first. HttpError 404 for an unknown name."""
        return self.check_model(model or self.names[0])

    def check_model(self, name: str) -> str:
        """Return the name of a model that the client may use; its tag `latest` may lack. HttpError 404 for others."""
        visible = self.visible_names()
        if name in visible:
            return name
        if (own := model_names.find_tagged(name, visible)) is not None:
            return own
        known = ", ".join(map(repr, visible))
        raise HttpError(
            404, f"the model {name!r:.100} does not exist here; known: {known}", code="model-not-found", param="model"
        )

    def template_arguments(self, body: TemplateRequest) -> dict[str, Any]:
        """Keyword arguments of `Frontend.render_chat` for a request: its own fields over the server's defaults."""
        if body.add_generation_prompt and body.continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message cannot both be true: the answer either begins after "
                "the last message or continues it; leave one out",
                param="continue_final_message",
                code="contradictory-fields",
            )
        return {
            "add_generation_prompt": body.add_generation_prompt is not False,
            "continue_final_message": bool(body.continue_final_message),
            "template_variables": {**self.options.default_chat_template_kwargs, **(body.chat_template_kwargs or {})},
        }

    def check_capacity(self, prompts: int, params: SamplingParams) -> None:
        """Raise RequestError for more prompts and choices than can run and wait here, before any is tokenized."""
        if params.n * prompts > self.capacity:
            raise RequestError(
                f"{prompts} prompts with n = {params.n} are {params.n * prompts} requests; at most {self.capacity} can "
                "run and wait here; send fewer at once",
                param="n",
                code="too-many-choices",
            )

    def create_collectors(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams,
        *,
        priority: int | None,
        shown: Collection[int] = (),
        grammar: str = "",
        wanted_tokens: int | None = None,
        clips: bool = False,
    ) -> list[Collector]:
        """Create a Collector, with its engine requests, for each prompt.

        `shown` are special tokens that its text has, `grammar` constrains the answers. `wanted_tokens` is the length of
        the answer that the client asks for; `clips`: it may be reduced to fit the context, as with --clip-max-tokens.

        Raises RequestError for more tokens or sampling ids than one HTTP request may send to the engine.
        """
        now = time.monotonic()
        most_tokens = max(LIMITS.prompt_tokens, 4 * self.frontend.max_model_len)
        collectors: list[Collector] = []
        tokens = ids = 0
        for prompt in prompts:
            self._check_room(prompt, wanted_tokens, clips or self.options.clip_max_tokens)
            tokens += params.n * len(prompt.ids)
            if tokens > most_tokens:
                raise RequestError(
                    f"the prompts with n = {params.n} come to more than {most_tokens:,} tokens in one request; "
                    "send several requests",
                    param="n" if params.n > 1 else "prompt",
                    code="too-many-prompt-tokens",
                )
            collector = self.frontend.create_collector(
                prompt, params, arrival_s=now, priority=priority or 0, shown=shown, grammar=grammar
            )
            ids += params.n * collector.requests[0].params.id_count
            if ids > LIMITS.sampling_ids:
                raise RequestError(
                    "stop_token_ids, logit_bias, allowed_token_ids and bad_words have more than "
                    f"{LIMITS.sampling_ids:,} token ids, counted once per prompt and choice; send several requests",
                    param="n",
                    code="too-many-sampling-ids",
                )
            collectors.append(collector)
        return collectors

    def _check_room(self, prompt: Prompt, wanted_tokens: int | None, clips: bool) -> None:
        """Raise RequestError for an answer that exceeds the context, as vLLM does; with `clips`, only log it."""
        context = self.frontend.max_model_len
        room = context - len(prompt.ids)
        if wanted_tokens is None or wanted_tokens <= room:
            return
        if clips:
            self.notes.add(
                "max_tokens",
                f"max_tokens is {wanted_tokens}, more than the context of {context} tokens has room for; "
                "such answers end where the context ends",
            )
            return
        raise RequestError(
            f"max_tokens is too large: {wanted_tokens}. This model's maximum context length is {context} tokens, "
            f"and the prompt has {len(prompt.ids)}: give at most {room}, or leave it out (--clip-max-tokens "
            "lets the server shorten such answers)",
            param="max_tokens",
            code="max-tokens-too-large",
        )

    def open_stream(self, collectors: Sequence[Collector]) -> EngineStream:
        """Submit requests to the engine. Refusals are raised here, before the response begins."""
        self.check_open()
        return EngineStream(self, collectors)

    def check_open(self) -> None:
        """Raise HttpError 503 if no new request may begin."""
        if self.draining:
            raise shutting_down_error()
        wakes = self.unloading.load()
        if self.options.refuse_while_asleep and self.engine.stats.sleep_level and not wakes:
            raise HttpError(503, "the engine sleeps; POST /wake_up wakes it", code="asleep", retry_after_s=1)

    def prefix_report(
        self,
        request: HttpRequest,
        collector: Collector,
        messages: Sequence[Mapping[str, Any]] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> PrefixReport | None:
        """Report for an answer on its prompt's place in the prefix cache; None if reports are off."""
        if self.prefix_debug is None:
            return None
        return PrefixReport(self.prefix_debug, self.frontend, self.plan.block_size, request, collector, messages, tools)

    def stream_opened(self, stream: OpenStream) -> None:
        """Count a stream; called by the stream itself."""
        if not self.streams:
            self._progress.begin()
        self.streams.add(stream)
        self.idle.clear()
        if self.prediction_check:
            self.prediction_check.on_open(len(self.streams))

    def stream_closed(self, stream: OpenStream) -> None:
        """Forget a stream; called by the stream itself."""
        self.streams.discard(stream)
        if not self.streams:
            self.idle.set()
        if sum(len(collector.output.prompt_ids) for collector in stream.collectors) > LARGE_TOKENS:
            self._trimmer.trim_later()  # the prompts were held until now
        if self.prediction_check:
            self.prediction_check.on_close([collector.output for collector in stream.collectors], len(self.streams))
            if self.prediction_check.done:
                self.prediction_check = None

    def observe(self, collector: Collector, delta: Delta, last_s: float | None, now_s: float, replica: int) -> None:
        """Update the metrics of a replica with a delta. `last_s` is the time of its choice's previous delta, if any."""
        metrics, times = self.metrics.replicas[replica], collector.output.metrics
        if last_s is not None:
            metrics.itl.observe(now_s - last_s)
        else:
            metrics.ttft.observe(now_s - times.arrival_s)
            began_s = times.scheduled_s or now_s
            metrics.queue.observe(max(0.0, began_s - times.arrival_s))
            metrics.prefill.observe(now_s - began_s)
            metrics.prompt_tokens.observe(len(collector.output.prompt_ids))
        if delta.finish_reason is not None:
            metrics.finished[delta.finish_reason] += 1
            metrics.e2e.observe(now_s - times.arrival_s)
            metrics.decode.observe(now_s - (times.first_token_s or now_s))
            metrics.inference.observe(now_s - (times.scheduled_s or now_s))
            metrics.generation_tokens.observe(len(collector.output.outputs[delta.index].token_ids))
            if collector.output.finished:
                metrics.longest_answer.observe(max(len(choice.token_ids) for choice in collector.output.outputs))

    def note_awake(self) -> None:
        """Note that the engine has slept, and so made no progress."""
        self._progress.begin()

    def unhealthy_reason(self) -> str | None:
        """The reason why the engine is unhealthy, or None."""
        if outage := self.engine.outage:
            return outage
        if self.engine.computes:
            self._progress.begin()  # a step that takes its time, as of a long prompt on a slow CPU
        busy = self.streams and not self.engine.stats.sleep_level
        stalled_s = self._progress.stalled_s(self.engine.stats.steps) if busy else 0.0
        return f"requests run, and no step has finished for {stalled_s:.0f} s" if stalled_s else None
