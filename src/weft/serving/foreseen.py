"""Foreseen: what the first requests took, beside what the planner expected of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.client.outputs import RequestOutput

if TYPE_CHECKING:
    from weft.planner.forecast import Forecast

log = logging.getLogger("weft.serving")

ENOUGH = 8  # tokens after the first that make a rate, and requests that make a crowd
MANY = 256  # requests after which a crowd that never ends is told of


class Foreseen:
    """Watches until it has told once of a request that was alone, and once of a crowd. `opened` and `closed` are
    called once per answer."""

    def __init__(self, expected: Forecast) -> None:
        self._expected = expected
        self._alone_told = self._crowd_told = False
        self._most = 0  # answers that were open at once since there was none
        self._done: list[RequestOutput] = []

    @property
    def told(self) -> bool:
        """Whether there is nothing more to watch for."""
        return self._alone_told and self._crowd_told

    def opened(self, count: int) -> None:
        """So many answers are open now."""
        self._most = max(self._most, count)

    def closed(self, outputs: Sequence[RequestOutput], still_open: int) -> None:
        """One of them has ended, with these outputs."""
        self._done += [output for output in outputs if output.finished]
        if still_open and len(self._done) < MANY:
            return
        done, most = self._done, self._most
        self._done, self._most = [], still_open
        if most == 1 and len(done) == 1 and not self._alone_told:
            self._alone_told = self._tell_alone(done[0])
        elif not self._crowd_told:
            self._crowd_told = self._tell_crowd(done)

    def _tell_alone(self, output: RequestOutput) -> bool:
        from weft.planner.forecast import request_report  # not for a server's start

        times, tokens = output.metrics, sum(len(choice.token_ids) for choice in output.outputs)
        if times.first_token_s is None or times.finished_s is None or len(output.outputs) > 1:
            return False
        # A prompt that was in the cache already says nothing of how long one takes to read.
        if tokens <= ENOUGH or output.num_cached_tokens or times.finished_s <= times.first_token_s:
            return False
        line = request_report(
            self._expected,
            input_len=len(output.prompt_token_ids),
            output_len=tokens,
            ttft_s=times.first_token_s - times.arrival_s,
            tok_s=(tokens - 1) / (times.finished_s - times.first_token_s),
        )
        log.info(line)
        return True

    def _tell_crowd(self, done: Sequence[RequestOutput]) -> bool:
        from weft.planner.forecast import load_report

        requests = sum(len(output.outputs) for output in done)
        ends = [output.metrics.finished_s for output in done if output.metrics.finished_s is not None]
        if requests < ENOUGH or len(ends) < len(done):
            return False
        took_s = max(ends) - min(output.metrics.arrival_s for output in done)
        busy_s = sum(
            len(output.outputs) * (end - (output.metrics.scheduled_s or output.metrics.arrival_s))
            for output, end in zip(done, ends, strict=True)
        )
        tokens = sum(len(choice.token_ids) for output in done for choice in output.outputs)
        if took_s <= 0 or busy_s < 2 * took_s or tokens <= ENOUGH * requests:
            return False
        read = sum(len(output.prompt_token_ids) - output.num_cached_tokens for output in done)
        line = load_report(
            self._expected,
            requests=requests,
            input_len=read / requests,
            output_len=tokens / requests,
            concurrency=busy_s / took_s,
            tok_s=tokens / took_s,
        )
        log.info(line)
        return True
