"""Breaker: the circuit breaker of a replica, driven by the outcomes of requests and checks."""

from __future__ import annotations

FAILURES = 3  # consecutive failures after which the breaker opens
SHORTEST_S = 1.0  # pause before the first probe
CHECK_LONGEST_S = 5.0  # longest pause after failed probes: a check costs little, and a replica may have recovered
LONGEST_S = 30.0  # longest pause after failures of requests soon after a recovery, each of which costs a client
SLOW_START_S = 10.0  # time in which the share of a recovered replica grows from SLOW_START_SHARE to all
SLOW_START_SHARE = 0.1


class Breaker:
    """The circuit breaker of one replica. All times are seconds of one clock, which the caller reads.

    While it is closed, all requests pass. After FAILURES consecutive failures it opens, and nothing passes for a pause.
    Then exactly one check passes, the probe: its success closes the breaker, its failure doubles the pause, up to
    CHECK_LONGEST_S. A failure soon after it has closed also doubles the pause, up to LONGEST_S, since a replica may
    answer checks but not requests.
    """

    def __init__(self) -> None:
        self.failures = 0  # consecutive
        self.last_failure = ""
        self._open_until: float | None = None  # None if closed
        self._pause_s = SHORTEST_S
        self._probing = False
        self._recovered_at: float | None = None

    @property
    def closed(self) -> bool:
        return self._open_until is None

    def admits(self, now: float, *, urgent: bool = False) -> bool:
        """Return True if a request may be sent: the breaker is closed, or a probe is due and none runs.

        If it is `urgent`, a probe is due at any time.
        """
        return self._open_until is None or ((urgent or now >= self._open_until) and not self._probing)

    def begin(self) -> bool:
        """Note that a request or check that `admits` allowed is sent. Return True if it is the probe."""
        if self._open_until is None:
            return False
        self._probing = True
        return True

    def end(self, probe: bool) -> None:
        """Note the end of a request or check, after its outcome. Another probe may follow if there was no outcome."""
        if probe:
            self._probing = False

    def succeed(self, now: float, *, probe: bool) -> None:
        """Count a success: any response but a fault of the replica. In an open breaker only the probe counts."""
        if self._open_until is not None:
            if not probe:
                return
            self._open_until, self._recovered_at = None, now
        self.failures, self.last_failure = 0, ""

    def fail(self, now: float, reason: str, *, probe: bool) -> None:
        """Count a failure: no connection, a response of 5xx, or a stall."""
        self.failures += 1
        self.last_failure = reason
        if self._open_until is not None:
            if probe:
                self._open(now, min(2 * self._pause_s, CHECK_LONGEST_S))
        elif self.failures >= FAILURES:
            self._open(now, SHORTEST_S if self.share(now) == 1 else 2 * self._pause_s)

    def _open(self, now: float, pause_s: float) -> None:
        self._pause_s = min(pause_s, LONGEST_S)
        self._open_until = now + self._pause_s

    def share(self, now: float) -> float:
        """Factor for the replica's weight: below 1 for SLOW_START_S after it has recovered."""
        if self._recovered_at is None:
            return 1.0
        past = (now - self._recovered_at) / SLOW_START_S
        if past >= 1:
            self._recovered_at = None
            return 1.0
        return SLOW_START_SHARE + (1 - SLOW_START_SHARE) * past

    def state(self, now: float) -> str:
        """closed, open, or half-open if a probe is due or runs."""
        if self._open_until is None:
            return "closed"
        return "half-open" if self._probing or now >= self._open_until else "open"


class RetryBudget:
    """Bounds the retries of requests that a failing replica had received, so that retries cannot double the load.

    PRICE requests earn one retry, and at most SAVED retries accumulate.
    """

    PRICE = 5
    SAVED = 20

    def __init__(self) -> None:
        self._saved = self.SAVED * self.PRICE  # in requests

    def earn(self) -> None:
        """Count a request."""
        self._saved = min(self.SAVED * self.PRICE, self._saved + 1)

    def spend(self) -> bool:
        """Take one retry. Return False if there is none left."""
        if self._saved < self.PRICE:
            return False
        self._saved -= self.PRICE
        return True
