"""LLM: a model to call from Python."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast, overload

from weft.engine.client.answer_stream import AnswerStream
from weft.engine.client.arguments import engine_config
from weft.engine.client.control import memory_rows, profile_command, stat_rows, swap_command
from weft.engine.client.progress import Bar, ProgressBar
from weft.engine.client.traces import END, OpenTraces
from weft.engine.cluster.assembly import assemble
from weft.engine.core.commands import RankStats, ResetPrefixCache, Sleep, Wake
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Stats
from weft.engine.frontend.collector import Collector
from weft.engine.frontend.frontend import Frontend
from weft.engine.frontend.outputs import EmbeddingOutput, RequestOutput
from weft.engine.frontend.pooling import Pooler
from weft.engine.frontend.prompt import Prompt, PromptLike
from weft.engine.frontend.turns import SYSTEM, History, copy_history, read_turn, turn_messages, turn_params
from weft.engine.replicas.engine_nodes import EngineNodes
from weft.engine.replicas.local import LocalEngine
from weft.engine.replicas.opening import (
    Message,
    check_params,
    describe_engine,
    list_prompts,
    open_model,
    parse_prompt_or_chat,
    plan_engines,
)
from weft.engine.replicas.running import RunningReplica
from weft.engine.sandbox.isolated import run_blocking
from weft.engine.text.tokenizer import Tokenizer
from weft.errors import ConfigError, EngineError, RequestError
from weft.machine.hardware.host import probe_host
from weft.plan.memory import Capacity
from weft.plan.plan import Plan
from weft.planner.execution.replicas import ReplicaPlan

if TYPE_CHECKING:
    from weft.config import EngineConfig
    from weft.engine.replicas.replica_thread import ReplicaThread
    from weft.engine.structured.compiler import GrammarCompiler
    from weft.planner.execution.forecast import Forecast


class LLM:
    """An engine and its model. `model` is a directory, a GGUF file, a name on the hub, or "demo".

    Keywords are the flags' names: tensor_parallel_size, tensor_split=[2, 1], pipeline_parallel_size,
    pipeline_split=[1, 3, 1], dtype, max_model_len, seed, ...; `weft.config.EngineConfig` has them all, with
    their defaults. Use an LLM as a context manager, or call `shutdown` when done.

    Any number of threads may call it at once: their requests share the engine's steps. `shutdown` may be called from
    any thread, and callers in flight get an EngineError. In an asyncio program, use `weft.AsyncLLM`.

    With data_parallel_size=N there are N engines, each with processes of its own. Requests are dealt out by load; if an
    engine dies, the others go on with its requests while it starts again.

    Raises ConfigError, ModelError, PlanError and EngineError, each in one line with the way out.
    """

    _engine: LocalEngine | ReplicaThread | None = None

    def __init__(self, model: str | os.PathLike[str], **engine: Any) -> None:
        self._start(engine_config(model, engine))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """Create an LLM with a config that has been built before."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        self.config = config
        checkpoint, text_tools = open_model(self.config)
        host = probe_host()
        assembly = assemble(self.config, checkpoint, host)
        planned = plan_engines(self.config, checkpoint, host, assembly)
        grammars = text_tools.create_grammars(checkpoint.shape.vocab, checkpoint.shape.eos)
        nodes = EngineNodes(self.config, checkpoint, assembly, planned) if assembly else None
        self._engine = start_replicas(planned, self.config, nodes, grammars)
        # When this object is collected, or else at exit, before the interpreter takes its modules apart.
        self._traces = OpenTraces(elsewhere=nodes is not None)
        self._finalizer = weakref.finalize(self, close_engine, self._engine, self._traces)
        self._frontend = Frontend.for_engine(self.config, checkpoint, text_tools, self._engine.plan.max_model_len)
        self._pooler = Pooler(self._frontend, self.config.model)

    @property
    def plan(self) -> Plan:
        """The executed plan: each rank's share of the model, and the limits. With several replicas, the plan of one."""
        return self._running.plan

    @property
    def replicas(self) -> list[RunningReplica]:
        """The engines that run, with their plans: one, or data_parallel_size of them."""
        return self._running.replicas

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks on every rank."""
        return self._running.num_blocks

    def forecast(self) -> Forecast:
        """Return the planner's prediction for this plan on this machine.

        A CPU is measured for a second the first time. Raises ConfigError for hardware without known figures, and for
        several replicas.
        """
        from weft.planner.execution.execution import measured_speeds
        from weft.planner.execution.forecast import forecast_plan

        engine = self._running
        if not isinstance(engine, LocalEngine):
            raise ConfigError("the forecast is of one engine, and several replicas run", code="forecast-of-replicas")
        return forecast_plan(engine.plan, engine.host, measured_speeds(engine.plan, engine.host))

    @property
    def capacities(self) -> list[Capacity]:
        """Memory and load time of each rank, as reported at the start."""
        return self._running.capacities

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Bar] = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Return the answers to one prompt or several, in their order.

        A prompt is a text, a list of token ids, or a dict with "prompt_token_ids" or "prompt". Prompts share cached KV
        only with prompts of the same "cache_salt" in their dict. `sampling_params` is one for all prompts or one for
        each; None takes the model's own defaults. Raises RequestError before anything runs.
        """
        parsed = [self._frontend.parse_prompt(prompt) for prompt in list_prompts(prompts)]
        return self._answer_all(parsed, sampling_params, use_tqdm, priority)

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Bar] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        query: str,
        history: Sequence[tuple[str, str]] | None = None,
        system: str = SYSTEM,
        generation_config: object = None,
        **sampling: Any,
    ) -> tuple[str, History]: ...

    def chat(self, *arguments: Any, **options: Any) -> list[RequestOutput] | tuple[str, History]:
        """Return the answers to one conversation or several, as `generate` does, through the model's chat template.

        With a text instead of messages, or `query=`, return the text of the answer to it, and a new list of all turns:
        `history`, pairs of query and response, and this one. A tokenizer before the text, as Transformers' guides have
        it, is left aside for the engine's own. `sampling` are fields of SamplingParams; `generation_config` has
        Transformers' names of them.
        """
        if (turn := read_turn(arguments, options)) is not None:
            return self._answer_turn(*turn[0], **turn[1])
        return self._answer_messages(*arguments, **options)

    def _answer_turn(
        self,
        query: str,
        history: Sequence[tuple[str, str]] | None = None,
        system: str = SYSTEM,
        generation_config: object = None,
        **sampling: Any,
    ) -> tuple[str, History]:
        turns = copy_history(history)
        params = turn_params(self._frontend, generation_config, sampling)
        prompt = run_blocking(self._frontend.chat_prompt(turn_messages(query, turns, system)))
        [output] = self._answer_all([prompt], params, False, None)
        response = output.outputs[0].text
        return response, [*turns, (query, response)]

    def _answer_messages(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Bar] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if is_one else messages)
        prompts = [
            run_blocking(
                self._frontend.chat_prompt(
                    conversation,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    template_variables=chat_template_kwargs,
                )
            )
            for conversation in conversations
        ]
        return self._answer_all(prompts, sampling_params, use_tqdm, None)

    def stream(
        self, prompt: PromptLike | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield one answer while it grows: the same object each time, with everything generated so far.

        A list of messages goes through the chat template. Closing the iterator, or leaving it, ends the request.
        """
        params = self.sampling_params() if sampling_params is None else sampling_params
        check_params(params)
        parsed = run_blocking(parse_prompt_or_chat(self._frontend, prompt))
        grammar = run_blocking(self._frontend.answer_grammar(params))
        collector = self._frontend.create_collector(parsed, params, arrival_s=time.monotonic(), grammar=grammar)
        return AnswerStream(self._stream_answer(collector))

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Bar] = True,
    ) -> list[EmbeddingOutput]:
        """Return the embeddings of one prompt or several, in their order, each in `embedding`.

        Prompts are as in `generate`. `dimensions` cuts the embeddings, `truncate_prompt_tokens` the prompts (-1: to the
        model's length). Raises RequestError before anything runs, also for a model that does not embed.
        """
        self._pooler.check_dimensions(dimensions)
        now = time.monotonic()
        collectors = [
            self._pooler.embedding_collector(prompt, arrival_s=now, truncate=truncate_prompt_tokens)
            for prompt in list_prompts(prompts)
        ]
        self._run_to_end(collectors, use_tqdm)
        return [self._pooler.embedding_output(collector, dimensions) for collector in collectors]

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Bar] = True,
    ) -> list[float]:
        """Return how well each document answers the query, or the query of its own if there are as many.

        A reranker gives the probability of "yes", under the `instruction` if there is one; a model that embeds gives
        the cosine of both embeddings. Raises RequestError before anything runs, also for a model that does neither.
        """
        scoring = self._pooler.score_request(
            query,
            documents,
            arrival_s=time.monotonic(),
            instruction=instruction,
            truncate=truncate_prompt_tokens,
        )
        self._run_to_end(scoring.collectors, use_tqdm)
        return scoring.scores()

    def sampling_params(self, **fields: Any) -> SamplingParams:
        """Return SamplingParams with these fields, and the model's own defaults (generation_config.json) for others."""
        return self._frontend.sampling_params({}, **fields)

    def stats(self) -> Stats:
        """Return the current numbers of requests and KV blocks, and the engine's counters."""
        return self._running.stats()

    def layout(self) -> list[dict[str, Any]]:
        """Return one row per rank: its place, its share of the model, and the memory that it takes now.

        The last three fields are measured in bytes. On a CPU `allocated_bytes` is the resident memory of the rank's
        process, and the others are None.
        """
        return memory_rows(self._running.call_each(RankStats(reset=False)))

    def rank_stats(self) -> list[dict[str, Any]]:
        """Return one row per rank: steps, seconds and bytes since the last call, see
        `engine.core.commands.RankReport`."""
        return stat_rows(self._running.call_each(RankStats()))

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the KV cache and of the weights back, once the steps in flight are done.

        At level 1 the weights move to the host's memory (a CPU's weights are not moved); at level 2 they are dropped.
        Requests wait until `wake_up`; running requests lose no token. Raises RequestError if the engine sleeps already.
        """
        self._running.call(Sleep(level))

    def wake_up(self) -> None:
        """Undo `sleep`; weights that were dropped are read from the checkpoint. Raises RequestError if it is awake."""
        self._running.call(Wake())

    @property
    def is_sleeping(self) -> bool:
        """True between `sleep` and `wake_up`."""
        return bool(self._running.stats().sleep_level)

    def swap_weights(self, checkpoint: str | os.PathLike[str]) -> None:
        """Read the weights of another checkpoint of the same shapes into the same memory, between two steps.

        The prefix cache is reset. Requests that run go on with the new weights. An engine that sleeps reads them when
        it wakes. All ranks hold the new weights in the host's memory before the first one takes them. Raises
        ModelError, and RequestError for a checkpoint of other shapes or that a rank cannot read; all keep their
        weights then.
        """
        engine = self._running
        engine.call(swap_command(checkpoint, self.config, engine.plan))

    def reset_prefix_cache(self) -> bool:
        """Let no request reuse KV that was computed before. Returns True, as vLLM's does if it succeeds."""
        self._running.call(ResetPrefixCache())
        return True

    def profile(self, steps: int, directory: str | os.PathLike[str]) -> list[str]:
        """Trace the next `steps` steps of all ranks; return at once the files that are written when these are over.

        A file is there once it is complete, some time after its last step; an engine that is shut down before ends the
        trace, waits for its files, and logs how many steps they have. There is one file per process; chrome://tracing
        and Perfetto open it. A trace that runs ends before; `steps` 0 only ends it. Raises RequestError if nothing can
        be written into `directory`.
        """
        return self._traces.begin(steps, self._running.call(profile_command(steps, directory)))

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises RequestError with skip_tokenizer_init."""
        if self._frontend.tokenizer is None:
            raise RequestError("this engine runs without a tokenizer (skip_tokenizer_init)", code="tokenizer-missing")
        return self._frontend.tokenizer

    def shutdown(self) -> None:
        """End the engine and free its memory; may be called twice."""
        if self._engine is not None:
            self._engine = None
            self._finalizer()
            self._frontend.close()

    def __repr__(self) -> str:
        engine = self._engine
        state = "shut down" if engine is None else str(engine.failure) if engine.failure else engine.plan
        return describe_engine("LLM", self.config.model, state)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def _running(self) -> LocalEngine | ReplicaThread:
        engine = self._engine  # read once: another thread may shut it down in between
        if engine is None:
            raise RequestError("this LLM has been shut down; make another", code="engine-closed")
        return engine

    def _answer_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Bar],
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        count = len(prompts)
        each = list(params) if isinstance(params, Iterable) else [params or self.sampling_params()] * count
        priorities = [0] * count if priority is None else priority
        for name, values in (("sampling_params", each), ("priority", priorities)):
            if len(values) != count:
                raise RequestError(
                    f"{len(values)} {name} for {count} prompts; give one each", param=name, code="not-one-per-prompt"
                )
        for one in each:
            check_params(one)
        grammars = [run_blocking(self._frontend.answer_grammar(one)) for one in each]
        now = time.monotonic()
        collectors = [
            self._frontend.create_collector(prompt, one, arrival_s=now, priority=level, grammar=grammar)
            for prompt, one, level, grammar in zip(prompts, each, priorities, grammars, strict=True)
        ]
        self._run_to_end(collectors, use_tqdm)
        return [collector.output for collector in collectors]

    def _run_to_end(self, collectors: Sequence[Collector], use_tqdm: bool | Callable[..., Bar]) -> None:
        """Run the collectors' requests until all have ended."""
        with ProgressBar(len(collectors), use_tqdm) as progress, closing(self._run_requests(collectors)) as updates:
            for collector in updates:
                if collector.output.finished:
                    progress.advance()

    def _stream_answer(self, collector: Collector) -> Generator[RequestOutput, None, None]:
        with closing(self._run_requests([collector])) as updates:
            for updated in updates:
                updated.raise_failure()
                yield updated.output

    def _run_requests(self, collectors: Sequence[Collector]) -> Generator[Collector, None, None]:
        """Run the collectors' requests. Yields a collector each time its answer has grown."""
        owners = {request.id: collector for collector in collectors for request in collector.requests}
        requests = [request for collector in collectors for request in collector.requests]
        # Closed, whatever happens: Ctrl-C must not leave requests behind whose results are not wanted.
        with closing(self._running.submit(requests)) as submission:
            for output in submission:
                collector = owners[output.id]
                delta = collector.add(output, time.monotonic())
                if delta is None:
                    continue
                if delta.cut:
                    submission.abort([output.id])
                yield collector


def close_engine(engine: LocalEngine | ReplicaThread, traces: OpenTraces) -> None:
    """End an engine, after the trace that it writes. The garbage collector may call this from the engine's own thread,
    which cannot wait for itself: a trace is lost then."""
    if traces and threading.current_thread() is threading.main_thread():
        with suppress(EngineError):  # it has died
            traces.end(engine.call(END))
    engine.close()


def start_replicas(
    planned: Sequence[ReplicaPlan], config: EngineConfig, nodes: EngineNodes | None, grammars: GrammarCompiler
) -> LocalEngine | ReplicaThread:
    """Start one engine in a thread of this process, or several in processes of their own. Raises EngineError.

    `nodes` are the nodes that hold the ranks, if there are several.
    """
    if len(planned) == 1:
        return LocalEngine(config, planned[0], nodes, grammars)
    from weft.engine.replicas.replica_thread import ReplicaThread  # imports asyncio, which one engine does not need

    return ReplicaThread(planned, config, nodes)
