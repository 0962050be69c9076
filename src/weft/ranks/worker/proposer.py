"""Proposer: the protocol of a proposer of draft tokens on the output rank, such as a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.engine.core.step import Admission, StepPlan
from weft.ranks.worker.runner import ModelRunner


class Proposer(Protocol):
    """Proposes draft tokens, which the model verifies in the next step.

    Call `load`, then `allocate`; then for each step `admit` for each request that takes a slot, `note`, and `propose`
    if the step asks for draft tokens.
    """

    @property
    def runners(self) -> Sequence[ModelRunner]:
        """Runners that belong to the proposer alone: their memory counts as the rank's."""
        ...

    def load(self) -> None: ...

    def allocate(self, num_blocks: int) -> None: ...

    def wake(self) -> None:
        """Load what has been dropped while the rank slept, and allocate as before."""
        ...

    def admit(self, admission: Admission) -> None:
        """Give a slot to a request."""
        ...

    def note(self, step: StepPlan) -> None:
        """Note the rows of a step, whose new blocks the request slots have already."""
        ...

    def propose(self, step: StepPlan, sampled: list[int]) -> dict[int, list[int]]:
        """Propose draft tokens by slot, to follow the tokens that the model `sampled` in this step."""
        ...
