"""Collector: one prompt's growing answer, from the core's Outputs to the caller's RequestOutput."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Output, Request
from weft.engine.core.step import SlotFailure, TokenLogprobs
from weft.engine.core.token_ids import TokenIds
from weft.engine.frontend.outputs import CompletionOutput, Logprob, Metrics, RequestOutput
from weft.engine.text.stream import TextStream
from weft.errors import OutputError, RequestError

if TYPE_CHECKING:
    from weft.engine.text.tokenizer import Tokenizer


class Delta(msgspec.Struct):
    """New text of one choice (never half a character), its token ids, and the reason if the choice ended.

    `cut` is True if a stop string ended the choice. The core does not know that, so the request must be aborted.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cut: bool = False

    @property
    def interrupted(self) -> bool:
        """True if the choice has ended, and not by its model: by a limit, a stop string or an error."""
        return self.finish_reason is not None and (self.finish_reason != "stop" or isinstance(self.stop_reason, str))


@dataclass(slots=True)
class Choice:
    output: CompletionOutput
    stream: TextStream | None


class Collector:
    """The answer to one prompt: `requests` go to the core, and the core's Outputs come to `add`.

    If an answer has begun elsewhere (`Request.answered`), `output` has its tokens and text from the first, and no delta
    has them; the text is that which a stream would have shown until then. `begun` is the text of each of these tokens.

    `shown` are special tokens that the text has even if the parameters skip special tokens.

    `output` is the answer so far. `error` says why the engine could not go on with a choice, whose finish_reason is
    "error" then.
    """

    def __init__(
        self,
        name: str,
        text: str | None,
        params: SamplingParams,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        arrival_s: float,
        shown: Collection[int] = (),
    ) -> None:
        self.params = params
        self.error: SlotFailure | None = None
        self.requests = requests
        self._tokenizer = tokenizer
        prompt = requests[0].prompt
        self._choices: dict[str, Choice] = {}
        first = None if tokenizer is None else TextStream(tokenizer, params, list(prompt), shown)
        for index, request in enumerate(requests):
            stream = first.fork() if first is not None and index else first
            self._choices[request.id] = Choice(CompletionOutput(index), stream)
        self.begun = self._begin(requests[0].answered)
        outputs = [choice.output for choice in self._choices.values()]
        self.output = RequestOutput(name, text, prompt, outputs, Metrics(arrival_s))

    def _begin(self, answered: TokenIds) -> list[str]:
        """Add what is answered already to the only choice. Raises RequestError if it has a stop string."""
        choice = self._choices[self.requests[0].id]
        if not answered:
            return []
        choice.output.token_ids += answered
        if choice.stream is None:
            return [""] * len(answered)
        texts = [choice.stream.push([token]) for token in answered]
        if choice.stream.stopped is not None:
            raise RequestError(
                f"continue_token_ids ends with the stop string {choice.stream.stopped!r:.60}",
                param="continue_token_ids",
                code="nothing-to-continue",
            )
        choice.output.text = "".join(texts)
        return texts

    def add(self, output: Output, now_s: float) -> Delta | None:
        """Add an Output of a choice. Returns the delta, or None if the choice has ended already.

        Outputs can come after the end, because a stop string ends a choice while steps are in flight.
        """
        choice = self._choices[output.id]
        completion = choice.output
        if completion.finish_reason is not None:
            return None
        answer = self.output
        if output.pooled is not None:
            answer.pooled = output.pooled
        if answer.metrics.first_token_s is None and (output.tokens or output.pooled is not None):
            answer.metrics.first_token_s = now_s
            answer.metrics.scheduled_s = output.scheduled_s
            answer.num_cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None and answer.prompt_logprobs is None:
            self._add_prompt_logprobs(output.prompt_logprobs)
        delta = Delta(
            completion.index, "", output.tokens, finish_reason=output.finish_reason, stop_reason=output.stop_reason
        )
        if choice.stream is not None:
            self._add_text(choice.stream, output, delta)
        if self.params.logprobs is not None:
            self._add_logprobs(completion, output, delta)
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.finish_reason == "error":
            self.error = self.error or output.error
        if delta.finish_reason is not None and all(c.output.finish_reason for c in self._choices.values()):
            answer.finished = True
            answer.metrics.finished_s = now_s
        return delta

    def raise_failure(self) -> None:
        """Raise the error of a choice that could not go on: RequestError if the request is at fault, or OutputError."""
        if (failure := self.error) is None:
            return
        if failure.param:
            raise RequestError(failure.reason, param=failure.param, code=failure.code)
        raise OutputError(failure.reason, code=failure.code)

    def _add_prompt_logprobs(self, prompt_logprobs: list[TokenLogprobs]) -> None:
        """Set the answer's prompt logprobs; the first prompt token has none."""
        ids = self.output.prompt_token_ids[1:]
        entries = zip(ids, prompt_logprobs, strict=True)
        self.output.prompt_logprobs = [None, *(self._logprobs(token, entry) for token, entry in entries)]

    def _add_logprobs(self, completion: CompletionOutput, output: Output, delta: Delta) -> None:
        """Add the logprobs of the delta's tokens to the delta and the choice."""
        delta.logprobs = []
        cumulative = completion.cumulative_logprob or 0.0
        # A stop string may have cut the delta's tokens.
        for token, entry in zip(delta.token_ids, output.logprobs, strict=False):
            if entry is not None:
                delta.logprobs.append(self._logprobs(token, entry))
                cumulative += entry.logprob
        if completion.logprobs is None:
            completion.logprobs = []
        completion.logprobs += delta.logprobs
        completion.cumulative_logprob = cumulative

    def _add_text(self, stream: TextStream, output: Output, delta: Delta) -> None:
        """Add the text of the new tokens to the delta.

        The token that completes a stop string is the last of the answer: with accepted draft tokens an Output has
        others behind it, which a step without drafts would not have sampled.
        """
        shown = output.tokens
        ended = output.finish_reason == "stop" and output.tokens[-1] in self.requests[0].stop_ids
        if ended and not self.params.include_stop_str_in_output:
            shown = shown[:-1]  # the token that ended the choice is no part of the text; a grammar's last token is
        if self.params.stop:
            delta.text, read = _push_until_stop(stream, shown)
            if stream.stopped is not None:
                delta.token_ids = output.tokens[:read]
        else:
            delta.text = stream.push(shown)
        if output.finish_reason is not None:
            delta.text += stream.finish()
        # An engine that could not go on behind the stop string does not matter, one that failed before it does.
        failed = output.finish_reason == "error" and len(delta.token_ids) == len(output.tokens)
        if stream.stopped is not None and not failed:
            delta.cut = output.finish_reason is None
            delta.finish_reason, delta.stop_reason = "stop", stream.stopped

    def _logprobs(self, token: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Logprobs by token id: the chosen token first, then the likeliest."""
        logprobs = {token: Logprob(entry.logprob, entry.rank, self._token_text(token))}
        for rank, (other, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
            if other not in logprobs:
                logprobs[other] = Logprob(logprob, rank, self._token_text(other))
        return logprobs

    def _token_text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)


def _push_until_stop(stream: TextStream, tokens: Sequence[int]) -> tuple[str, int]:
    """Push tokens up to the token that completes a stop string; return the text, and the number of these tokens."""
    text = ""
    for count, token in enumerate(tokens, start=1):
        text += stream.push([token])
        if stream.stopped is not None:
            return text, count
    return text, len(tokens)
