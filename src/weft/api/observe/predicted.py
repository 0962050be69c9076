"""PredictionCheck: logs the first requests' measured speed next to the planner's prediction."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.engine.frontend.outputs import RequestOutput

if TYPE_CHECKING:
    from weft.planner.execution.forecast import Forecast

log = logging.getLogger("weft.serving")

MIN_TOKENS = 8  # a rate needs more generated tokens than this; under load, per choice on average
MIN_CHOICES = 8  # finished choices that count as load
MIN_CONCURRENCY = 2  # mean number of choices at once that counts as load
MANY = 256  # requests after which load without a pause is reported


class PredictionCheck:
    """Logs a comparison for a request that ran alone, and another for concurrent requests.

    `on_open` and `on_close` must be called once per stream.
    """

    def __init__(self, expected: Forecast) -> None:
        self._expected = expected
        self._logged_alone = self._logged_load = False
        self._most_open = 0  # most streams open at once since the last window began
        self._finished: list[RequestOutput] = []

    @property
    def done(self) -> bool:
        """True if both comparisons have been logged."""
        return self._logged_alone and self._logged_load

    def on_open(self, count: int) -> None:
        """Count a new stream; `count` streams are open now."""
        self._most_open = max(self._most_open, count)

    def on_close(self, outputs: Sequence[RequestOutput], still_open: int) -> None:
        """Count the end of a stream with these outputs; `still_open` streams are open now."""
        self._finished += [output for output in outputs if output.finished]
        if still_open and len(self._finished) < MANY:
            return
        finished, most_open = self._finished, self._most_open
        self._finished, self._most_open = [], still_open
        if most_open == 1 and len(finished) == 1 and not self._logged_alone:
            self._logged_alone = self._log_alone(finished[0])
        elif not self._logged_load:
            self._logged_load = self._log_load(finished)

    def _log_alone(self, output: RequestOutput) -> bool:
        """Log the speed of a request that ran alone. Return False if the request cannot be compared."""
        from weft.planner.execution.forecast import request_report  # imported late: a server's start does not need it

        times, tokens = output.metrics, _generated_tokens(output)
        if times.first_token_s is None or times.finished_s is None or len(output.outputs) > 1:
            return False
        # A cached prompt gives no prefill time.
        if tokens <= MIN_TOKENS or output.num_cached_tokens or times.finished_s <= times.first_token_s:
            return False
        line = request_report(
            self._expected,
            input_len=len(output.prompt_ids),
            output_len=tokens,
            ttft_s=times.first_token_s - times.arrival_s,
            tok_s=(tokens - 1) / (times.finished_s - times.first_token_s),
        )
        log.info(line)
        return True

    def _log_load(self, finished: Sequence[RequestOutput]) -> bool:
        """Log the speed of concurrent requests.

        Return False if there are too few choices or tokens, the mean concurrency is below MIN_CONCURRENCY, or an end
        time is missing.
        """
        from weft.planner.execution.forecast import load_report

        requests = sum(len(output.outputs) for output in finished)
        tokens = sum(map(_generated_tokens, finished))
        if requests < MIN_CHOICES or tokens <= MIN_TOKENS * requests:
            return False
        took_s, busy_s = _elapsed_s(finished)
        if took_s <= 0 or busy_s < MIN_CONCURRENCY * took_s:
            return False
        prefilled = sum(len(output.prompt_ids) - output.num_cached_tokens for output in finished)
        line = load_report(
            self._expected,
            requests=requests,
            input_len=prefilled / requests,
            output_len=tokens / requests,
            concurrency=busy_s / took_s,
            tok_s=tokens / took_s,
        )
        log.info(line)
        return True


def _generated_tokens(output: RequestOutput) -> int:
    return sum(len(choice.token_ids) for choice in output.outputs)


def _elapsed_s(outputs: Sequence[RequestOutput]) -> tuple[float, float]:
    """Seconds from the first arrival to the last end, and seconds in the engine summed over all choices.

    Both are 0 if an output has no end time.
    """
    ends, busy_s = [], 0.0
    for output in outputs:
        times = output.metrics
        if times.finished_s is None:
            return 0.0, 0.0
        ends.append(times.finished_s)
        busy_s += len(output.outputs) * (times.finished_s - (times.scheduled_s or times.arrival_s))
    return max(ends) - min(output.metrics.arrival_s for output in outputs), busy_s
