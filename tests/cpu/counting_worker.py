"""A worker whose answers count on from the prompt's last token, so that they do not depend on the other rows."""

from __future__ import annotations

import time
from itertools import accumulate

from fake_worker import SHAPE, FakeWorker

from weft.engine.core.step import StepPlan, StepResult

COUNTING = "counting_worker:CountingWorker"
STEP_S = 0.005  # so that requests run long enough for something to happen to them


class CountingWorker(FakeWorker):
    def execute(self, step: StepPlan) -> StepResult | None:
        super().execute(step)
        time.sleep(STEP_S)
        if not self.place.samples:
            return None
        ends = accumulate(step.counts)
        sampled = [
            (step.tokens[end - 1] + 1) % SHAPE.vocab for end, samples in zip(ends, step.samples, strict=True) if samples
        ]
        return StepResult(step.id, sampled, [None] * len(sampled), {})
