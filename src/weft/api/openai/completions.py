"""/v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import cast

from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from weft.api.openai.stream import OpenAIStream
from weft.api.service.continuation import answered_ids, check_continuation_key
from weft.api.service.engine_stream import EngineStream
from weft.api.service.logprobs import completion_logprobs
from weft.api.service.openai_types import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from weft.api.service.sampling import sampling_fields
from weft.api.service.service import Service
from weft.api.service.structured import wanted_output
from weft.engine.frontend.collector import Collector, Delta
from weft.engine.frontend.frontend import Frontend
from weft.engine.frontend.outputs import CompletionOutput, Logprob
from weft.engine.frontend.prompt import Prompt, PromptLike
from weft.errors import RequestError


@dataclass(frozen=True)
class PreparedCompletion:
    """A checked and tokenized completion request. `scoring`: the caller wants only the prompt's logprobs."""

    body: CompletionRequest
    model: str
    collectors: list[Collector]
    scoring: bool


async def completions(request: Request) -> Response:
    """Answer a completion request."""
    service: Service = request.app.state.service
    prepared = await service.prepare_in_steps(request, prepare_completion)
    check_continuation_key(request, prepared.body)
    report = service.prefix_report(request, prepared.collectors[0])
    stream = service.open_stream(prepared.collectors)
    return await CompletionStream(service, stream, prepared).reply(request, report)


async def prepare_completion(service: Service, content: bytes) -> PreparedCompletion:
    """Check a body and tokenize its prompts. Raises RequestError and HttpError."""
    body = service.decode_body(content, CompletionRequest)
    model = service.resolve_model(body.model)
    fields = sampling_fields(body) | {"logprobs": body.logprobs, "structured_outputs": wanted_output(body)[0]}
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise RequestError(
                "echo with logprobs cannot be streamed; leave one of the three out",
                param="echo",
                code="echo-logprobs-streamed",
            )
        fields["prompt_logprobs"] = body.logprobs
    scoring = bool(body.echo) and body.max_tokens == 0
    if scoring:
        fields["max_tokens"] = 1  # the engine samples one token; the response omits it
    sampling_params = service.frontend.sampling_params(fields)
    parts = split_prompts(body.prompt)
    service.check_capacity(len(parts), sampling_params)
    answered = answered_ids(body, service.frontend.vocab, len(parts))
    prompts = (replace(tokenize_prompt(service.frontend, part, body), answered=answered) for part in parts)
    grammar = await service.frontend.answer_grammar(sampling_params)
    collectors = service.create_collectors(
        prompts, sampling_params, priority=body.priority, grammar=grammar, wanted_tokens=fields["max_tokens"]
    )
    return PreparedCompletion(body, model, collectors, scoring)


def tokenize_prompt(frontend: Frontend, source: PromptLike, body: CompletionRequest) -> Prompt:
    """Tokenize one prompt. With echo, add its text: decoding it here keeps that work out of the event loop."""
    prompt = frontend.parse_prompt(source, special=body.add_special_tokens is not False)
    prompt = replace(prompt, cache_salt=body.cache_salt)
    if body.echo and prompt.text is None and frontend.tokenizer is not None:
        return replace(prompt, text=frontend.decode(list(prompt.ids)))
    return prompt


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[PromptLike]:
    """List of prompts in the field `prompt`: one text or one list of ids is one prompt, a list of either is several."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token", param="prompt", code="empty-prompt")
    kinds = {type(part) for part in prompt}
    if len(kinds) > 1:
        raise RequestError(
            "prompt is a text, token ids, or a list of only one of the two", param="prompt", code="mixed-prompts"
        )
    return [cast(list[int], prompt)] if kinds == {int} else cast(list[PromptLike], prompt)


class CompletionStream(OpenAIStream[CompletionChoice]):
    """Response to one completion request, built from the engine's stream: one JSON object, or events.

    The index of a choice is prompt number * n + number of the choice within its prompt.
    """

    def __init__(self, service: Service, stream: EngineStream, prepared: PreparedCompletion) -> None:
        super().__init__(service, stream, prepared.model, prepared.body, "cmpl")
        self._stream = stream
        self._echo = bool(prepared.body.echo)
        self._scoring = prepared.scoring
        self._top_logprobs = prepared.body.logprobs
        self._sends_ids = bool(prepared.body.return_token_ids)
        self._sends_prompt_ids = self._sends_ids and prepared.body.continue_token_ids is None
        self._sent_characters: dict[int, int] = {}  # by choice, while streaming
        self._continue_offsets()

    def _continue_offsets(self) -> None:
        """Count the characters of an answer that another server began as sent."""
        collector = self._stream.collectors[0]
        if collector.requests[0].answered:
            sent = len(collector.output.outputs[0].text)
            self._sent_characters[0] = sent + (len(self._prompt_text(collector)) if self._echo else 0)
            self._echo = False

    def _whole(self) -> Completion:
        choices = [
            self._choice(number, collector, output)
            for number, collector in enumerate(self._stream.collectors)
            for output in collector.output.outputs
        ]
        return self._chunk(choices, self._usage())

    def _outputs(self) -> AsyncIterator[tuple[int, Delta]]:
        return aiter(self._stream)

    def _opening_choices(self) -> list[CompletionChoice]:
        if not self._echo:
            return []
        return [
            self._chunk_choice(number, Delta(output.index, self._prompt_text(collector), []))
            for number, collector in enumerate(self._stream.collectors)
            for output in collector.output.outputs
        ]

    def _new_choices(self, number: int, delta: Delta) -> list[CompletionChoice]:
        if self._scoring:
            delta = Delta(delta.index, "", [], finish_reason="length")
        if delta.text or delta.finish_reason or self._top_logprobs is not None or self._sends_ids:
            return [self._chunk_choice(number, delta)]
        return []

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _usage(self) -> Usage:
        usage = self._stream.usage
        if self._scoring:
            usage.total_tokens, usage.completion_tokens = usage.prompt_tokens, 0
        return usage

    def _choice(self, number: int, collector: Collector, output: CompletionOutput) -> CompletionChoice:
        """A whole choice of prompt `number`."""
        ids: Sequence[int] = output.token_ids
        positions: Sequence[dict[int, Logprob] | None] = output.logprobs or []
        text, reason, stop_reason = output.text, output.finish_reason, output.stop_reason
        if self._scoring:
            ids, positions, text, reason, stop_reason = [], [], "", "length", None
        if self._echo:
            ids = [*collector.output.prompt_token_ids, *ids]
            positions = [*(collector.output.prompt_logprobs or []), *positions]
            text = self._prompt_text(collector) + text
        return CompletionChoice(
            index=self._choice_index(number, output.index),
            text=text,
            logprobs=self._logprobs(ids, positions, 0),
            finish_reason=reason,
            stop_reason=stop_reason,
            token_ids=[*output.token_ids] if self._sends_ids else UNSET,
            prompt_token_ids=collector.output.prompt_token_ids if self._sends_prompt_ids else UNSET,
        )

    def _chunk_choice(self, number: int, delta: Delta) -> CompletionChoice:
        """A chunk's choice of prompt `number`."""
        index = self._choice_index(number, delta.index)
        offset = self._sent_characters.get(index, 0)
        begins = self._sends_prompt_ids and index not in self._sent_characters
        self._sent_characters[index] = offset + len(delta.text)
        return CompletionChoice(
            index=index,
            text=delta.text,
            logprobs=self._logprobs(delta.token_ids, delta.logprobs or [], offset) if delta.token_ids else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._sends_ids else UNSET,
            prompt_token_ids=self._stream.collectors[number].output.prompt_token_ids if begins else UNSET,
        )

    def _logprobs(
        self, ids: Sequence[int], positions: Sequence[dict[int, Logprob] | None], offset: int
    ) -> CompletionLogprobs | None:
        if self._top_logprobs is None:
            return None
        tokens = [self._frontend.token_text(id) for id in ids]
        return completion_logprobs(tokens, positions, self._top_logprobs, offset)

    def _choice_index(self, number: int, index: int) -> int:
        return number * self._stream.collectors[0].params.n + index

    def _prompt_text(self, collector: Collector) -> str:
        return self._frontend.prompt_text(collector.output)
