"""/v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from weft.client.collector import Collector, Delta
from weft.client.frontend import Frontend, Prompt, PromptLike
from weft.client.outputs import CompletionOutput, Logprob
from weft.errors import RequestError
from weft.serving.logprobs import completion_logprobs
from weft.serving.openai_answer import OpenAIAnswer
from weft.serving.openai_types import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from weft.serving.sampling import said
from weft.serving.service import Answer, Service


@dataclass(frozen=True)
class AskedCompletion:
    """A completion request that is ready for the engine. `scoring`: the caller wants the prompt's logprobs only."""

    wire: CompletionRequest
    model: str
    jobs: list[Collector]
    scoring: bool


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    asked = await service.prepared(request, prepare_completion)
    answer = service.answer(asked.jobs)
    return await Writing(service, answer, asked.model, asked.wire, asked.scoring).reply(request)


def prepare_completion(service: Service, content: bytes) -> AskedCompletion:
    """Check a body and tokenise its prompts. Raises RequestError and HttpError."""
    wire = service.wire(content, CompletionRequest)
    model = service.named(wire.model)
    params = said(wire) | {"logprobs": wire.logprobs}
    if wire.echo and wire.logprobs is not None:
        if wire.stream:
            raise RequestError("echo with logprobs cannot be streamed; leave one of the three out", param="echo")
        params["prompt_logprobs"] = wire.logprobs
    scoring = bool(wire.echo) and wire.max_tokens == 0
    if scoring:
        params["max_tokens"] = 1  # sampled, and kept back
    sampling = service.frontend.sampling_params(params)
    given = split_prompts(wire.prompt)
    service.check_places(len(given), sampling)
    prompts = (read_prompt(service.frontend, prompt, wire) for prompt in given)
    return AskedCompletion(wire, model, service.jobs(prompts, sampling, priority=wire.priority), scoring)


def read_prompt(frontend: Frontend, given: PromptLike, wire: CompletionRequest) -> Prompt:
    """One prompt; with echo its text too, which is decoded here rather than in the event loop."""
    prompt = frontend.parse_prompt(given, special=wire.add_special_tokens is not False)
    if wire.echo and prompt.text is None and frontend.tokenizer is not None:
        return replace(prompt, text=frontend.decode(prompt.ids))
    return prompt


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[PromptLike]:
    """One text or one list of ids is one prompt; a list of either is several."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    kinds = {type(part) for part in prompt}
    if len(kinds) > 1:
        raise RequestError("prompt is a text, token ids, or a list of only one of the two", param="prompt")
    return [cast(list[int], prompt)] if kinds == {int} else cast(list[PromptLike], prompt)


class Writing(OpenAIAnswer[CompletionChoice]):
    """One completion request on its way out: a choice's number is prompt number * n + choice number."""

    def __init__(self, service: Service, answer: Answer, model: str, wire: CompletionRequest, scoring: bool) -> None:
        super().__init__(service, answer, model, wire, "cmpl")
        self._echo = bool(wire.echo)
        self._scoring = scoring
        self._top = wire.logprobs
        self._lengths: dict[int, int] = {}  # characters that each choice has had, while streaming

    def _whole(self) -> Completion:
        choices = [
            self._choice(at, job, made) for at, job in enumerate(self._answer.jobs) for made in job.output.outputs
        ]
        return self._chunk(choices, self._usage())

    async def _pieces(self) -> AsyncGenerator[CompletionChoice, None]:
        if self._echo:
            for at, job in enumerate(self._answer.jobs):
                for made in job.output.outputs:
                    yield self._piece(at, Delta(made.index, self._prompt_text(job), []))
        async for at, news in self._answer:
            if self._scoring:
                news = Delta(news.index, "", [], finish_reason="length")
            if news.text or news.finish_reason or self._top is not None:
                yield self._piece(at, news)

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _usage(self) -> Usage:
        usage = super()._usage()
        if self._scoring:
            usage.total_tokens, usage.completion_tokens = usage.prompt_tokens, 0
        return usage

    def _choice(self, at: int, job: Collector, made: CompletionOutput) -> CompletionChoice:
        ids: Sequence[int] = made.token_ids
        positions: Sequence[dict[int, Logprob] | None] = made.logprobs or []
        text, reason, stop_reason = made.text, made.finish_reason, made.stop_reason
        if self._scoring:
            ids, positions, text, reason, stop_reason = [], [], "", "length", None
        if self._echo:
            ids = [*job.output.prompt_token_ids, *ids]
            positions = [*(job.output.prompt_logprobs or []), *positions]
            text = self._prompt_text(job) + text
        return CompletionChoice(
            index=self._number(at, made.index),
            text=text,
            logprobs=self._logprobs(ids, positions, 0),
            finish_reason=reason,
            stop_reason=stop_reason,
        )

    def _piece(self, at: int, news: Delta) -> CompletionChoice:
        number = self._number(at, news.index)
        offset = self._lengths.get(number, 0)
        self._lengths[number] = offset + len(news.text)
        return CompletionChoice(
            index=number,
            text=news.text,
            logprobs=self._logprobs(news.token_ids, news.logprobs or [], offset) if news.token_ids else None,
            finish_reason=news.finish_reason,
            stop_reason=news.stop_reason,
        )

    def _logprobs(
        self, ids: Sequence[int], positions: Sequence[dict[int, Logprob] | None], offset: int
    ) -> CompletionLogprobs | None:
        if self._top is None:
            return None
        return completion_logprobs([self._frontend.token_text(id) for id in ids], positions, self._top, offset)

    def _number(self, at: int, index: int) -> int:
        return at * self._answer.jobs[0].params.n + index

    def _prompt_text(self, job: Collector) -> str:
        return self._frontend.prompt_text(job.output)
