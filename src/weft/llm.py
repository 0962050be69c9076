"""LLM: a model to call from Python."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from weft.client.arguments import engine_config
from weft.client.collector import Collector
from weft.client.frontend import Frontend, Prompt, PromptLike
from weft.client.local import LocalEngine
from weft.client.opening import Message, check_params, describe, open_model, read_prompt
from weft.client.outputs import RequestOutput
from weft.client.progress import Bar, Progress
from weft.core.params import SamplingParams
from weft.core.request import Stats
from weft.errors import OutputError, RequestError
from weft.plan.memory import Capacity
from weft.plan.plan import Plan
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from weft.planner.forecast import Forecast


class LLM:
    """An engine and its model: `model` is a directory, a GGUF file, a name on the hub, or "demo".

    Keywords are the flags' names: tensor_parallel_size, tensor_split=[2, 1], pipeline_parallel_size,
    pipeline_split=[1, 3, 1], dtype, max_model_len, seed, ...; `weft.config.EngineConfig` has them all, with
    their defaults. Use it as a context manager, or call `shutdown` when done.

    Any number of threads may call it at once: their requests share the engine's steps. `shutdown` may be called from
    any thread, and callers in flight get an EngineError. In an asyncio program take `weft.AsyncLLM`.

    Raises ConfigError, ModelError, PlanError and EngineError, each in one line with the way out.
    """

    _engine: LocalEngine | None = None

    def __init__(self, model: str | os.PathLike[str], **engine: Any) -> None:
        self.config = engine_config(model, engine)
        checkpoint, words = open_model(self.config)
        self._engine = LocalEngine(self.config, checkpoint)
        self._frontend = Frontend.of(self.config, checkpoint, words, max_model_len=self._engine.plan.max_model_len)

    @property
    def plan(self) -> Plan:
        """What is executed: which rank holds what, and the limits."""
        return self._running.plan

    @property
    def num_blocks(self) -> int:
        """KV blocks on every rank."""
        return self._running.num_blocks

    def forecast(self) -> Forecast:
        """What the planner expects of this plan on this machine. Raises ConfigError for hardware of which nothing is
        known; a CPU is measured for a second the first time."""
        from weft.planner.execution import measured_speeds
        from weft.planner.forecast import forecast_plan

        engine = self._running
        return forecast_plan(engine.plan, engine.host, measured_speeds(engine.plan, engine.host))

    @property
    def capacities(self) -> list[Capacity]:
        """What each rank reported once it was ready."""
        return self._running.capacities

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Bar] = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The answers, in the order of the prompts: texts, lists of token ids, or dicts with
        "prompt_token_ids" or "prompt". One SamplingParams for all or one each; None takes the model's own
        defaults. Raises RequestError before anything runs."""
        return self._answers([self._frontend.prompt(p) for p in _each(prompts)], sampling_params, use_tqdm, priority)

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
    ) -> list[RequestOutput]:
        """The same for one conversation or a list of them, through the model's chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        talks = cast(Sequence[Sequence[Message]], [messages] if one or not messages else messages)
        prompts = [
            self._frontend.conversation(
                talk,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                names=chat_template_kwargs,
            )
            for talk in talks
        ]
        return self._answers(prompts, sampling_params, use_tqdm, None)

    def stream(
        self, prompt: PromptLike | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """One answer while it grows: the same object again and again, with all there is so far. A list of
        messages goes through the chat template. Closing the iterator, or leaving it, ends the request."""
        params = self.sampling_params() if sampling_params is None else sampling_params
        check_params(params)
        job = self._frontend.collect(read_prompt(self._frontend, prompt), params, arrival_s=time.monotonic())
        return AnswerStream(self._growing(job))

    def sampling_params(self, **said: Any) -> SamplingParams:
        """SamplingParams with the model's own defaults (generation_config.json) for what is not said."""
        return self._frontend.params({}, **said)

    def stats(self) -> Stats:
        """Requests, KV blocks and counters of this moment."""
        return self._running.stats()

    def get_tokenizer(self) -> Tokenizer:
        """Raises RequestError with skip_tokenizer_init."""
        if self._frontend.tokenizer is None:
            raise RequestError("this engine runs without a tokenizer (skip_tokenizer_init)")
        return self._frontend.tokenizer

    def shutdown(self) -> None:
        """End the engine and free its memory; may be called twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __repr__(self) -> str:
        engine = self._engine
        state = "shut down" if engine is None else str(engine.failure) if engine.failure else engine.plan
        return describe("LLM", self.config.model, state)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        self.shutdown()

    @property
    def _running(self) -> LocalEngine:
        engine = self._engine  # another thread may shut it down meanwhile
        if engine is None:
            raise RequestError("this LLM has been shut down; make another")
        return engine

    def _answers(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Bar],
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        each = [params or self.sampling_params()] * len(prompts) if not isinstance(params, Iterable) else list(params)
        order = [0] * len(prompts) if priority is None else priority
        for name, values in (("sampling_params", each), ("priority", order)):
            if len(values) != len(prompts):
                raise RequestError(f"{len(values)} {name} for {len(prompts)} prompts; give one each", param=name)
        for asked in each:
            check_params(asked)
        now = time.monotonic()
        jobs = [
            self._frontend.collect(prompt, asked, arrival_s=now, priority=first)
            for prompt, asked, first in zip(prompts, each, order, strict=True)
        ]
        with Progress(len(jobs), use_tqdm) as progress, closing(self._run(jobs)) as news:
            for job in news:
                if job.output.finished:
                    progress.advance()
        return [job.output for job in jobs]

    def _growing(self, job: Collector) -> Generator[RequestOutput, None, None]:
        with closing(self._run([job])) as news:
            for one in news:
                if one.error:
                    raise OutputError(one.error)
                yield one.output

    def _run(self, jobs: Sequence[Collector]) -> Generator[Collector, None, None]:
        """Yield a job whenever there is news of it; end with the last."""
        homes = {request.id: job for job in jobs for request in job.requests}
        # Closed, whatever happens: Ctrl-C must not leave requests behind that nobody waits for.
        with closing(self._running.submit([request for job in jobs for request in job.requests])) as run:
            for output in run:
                job = homes[output.id]
                delta = job.add(output, time.monotonic())
                if delta is None:
                    continue
                if delta.cut:
                    run.abort([output.id])
                yield job


class AnswerStream(Generator[RequestOutput, None, None]):
    """An iterator over an answer that grows; for plain `for` loops."""

    def __init__(self, growing: Generator[RequestOutput, None, None]) -> None:
        self._growing = growing

    def send(self, value: None) -> RequestOutput:
        return self._growing.send(value)

    def throw(self, *error: Any) -> RequestOutput:
        return self._growing.throw(*error)

    def __aiter__(self) -> NoReturn:
        raise TypeError(
            "LLM.stream is for plain `for` loops; in asyncio take weft.AsyncLLM: "
            "`async for output in AsyncLLM(model).generate(prompt)`"
        )


def _each(prompts: PromptLike | Sequence[PromptLike]) -> Sequence[PromptLike]:
    """One prompt or several: a text, a dict and a list of ids are one."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    several = list(cast(Iterable[PromptLike], prompts))
    return [cast(Sequence[int], several)] if several and all(isinstance(part, int) for part in several) else several
