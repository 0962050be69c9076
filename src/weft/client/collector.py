"""Collector: one prompt's answer while it grows, from the core's Outputs to the caller's RequestOutput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.client.outputs import CompletionOutput, Logprob, Metrics, RequestOutput
from weft.core.params import SamplingParams
from weft.core.request import Output, Request
from weft.core.step import TokenLogprobs
from weft.text.stream import TextStream

if TYPE_CHECKING:
    from weft.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """What one Output brought to the caller: the choice's new text (never half a character) and ids.

    `cut`: a stop string ended the choice here, and the core does not know: the request is to be aborted.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cut: bool = False


@dataclass(slots=True)
class Choice:
    output: CompletionOutput
    stream: TextStream | None


class Collector:
    """`requests` go to the core, its Outputs come to `add`; `output` is the answer so far, and `error` why the engine
    could not answer a choice, whose finish_reason is "error" then."""

    def __init__(
        self,
        name: str,
        text: str | None,
        params: SamplingParams,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        arrival_s: float,
    ) -> None:
        self.params = params
        self.error: str | None = None
        self.requests = requests
        self._tokenizer = tokenizer
        prompt = requests[0].prompt
        self._choices: dict[str, Choice] = {}
        first = None if tokenizer is None else TextStream(tokenizer, params, prompt)
        for index, request in enumerate(requests):
            stream = first.fork() if first is not None and index else first
            self._choices[request.id] = Choice(CompletionOutput(index), stream)
        outputs = [choice.output for choice in self._choices.values()]
        self.output = RequestOutput(name, text, prompt, outputs, Metrics(arrival_s))

    def add(self, output: Output, now_s: float) -> Delta | None:
        """The news of `output`; None where its choice has ended already (steps in flight go on a little)."""
        choice = self._choices[output.id]
        made = choice.output
        if made.finish_reason is not None:
            return None
        whole = self.output
        if whole.metrics.first_token_s is None and output.tokens:
            whole.metrics.first_token_s = now_s
            whole.metrics.scheduled_s = output.scheduled_s
            whole.num_cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None and whole.prompt_logprobs is None:
            ids = whole.prompt_token_ids[1:]
            entries = zip(ids, output.prompt_logprobs, strict=True)
            whole.prompt_logprobs = [None, *(self._logprobs(token, entry) for token, entry in entries)]
        delta = Delta(made.index, "", output.tokens, finish_reason=output.finish_reason, stop_reason=output.stop_reason)
        if self.params.logprobs is not None:
            delta.logprobs = [
                self._logprobs(token, entry)
                for token, entry in zip(output.tokens, output.logprobs, strict=True)
                if entry is not None
            ]
            if made.logprobs is None:
                made.logprobs = []
            made.logprobs += delta.logprobs
            made.cumulative_logprob = (made.cumulative_logprob or 0.0) + sum(
                entry.logprob for entry in output.logprobs if entry is not None
            )
        if choice.stream is not None:
            self._read(choice.stream, output, delta)
        made.text += delta.text
        made.token_ids += output.tokens
        made.finish_reason, made.stop_reason = delta.finish_reason, delta.stop_reason
        self.error = self.error or output.error
        if delta.finish_reason is not None and all(c.output.finish_reason for c in self._choices.values()):
            whole.finished = True
            whole.metrics.finished_s = now_s
        return delta

    def _read(self, stream: TextStream, output: Output, delta: Delta) -> None:
        """Text of the new tokens, and stop strings in it."""
        shown = output.tokens
        if output.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            shown = shown[:-1]  # the token that ended it is no part of the text
        delta.text = stream.push(shown)
        if output.finish_reason is not None:
            delta.text += stream.finish()
        if stream.stopped is not None:
            delta.cut = output.finish_reason is None
            delta.finish_reason, delta.stop_reason = "stop", stream.stopped

    def _logprobs(self, token: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token first, then the likeliest."""
        found = {token: Logprob(entry.logprob, entry.rank, self._text(token))}
        for rank, (other, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
            if other not in found:
                found[other] = Logprob(logprob, rank, self._text(other))
        return found

    def _text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)
