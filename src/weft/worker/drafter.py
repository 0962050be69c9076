"""Drafter: a small model beside the output rank, which guesses the tokens that the large one then confirms."""

from __future__ import annotations

from dataclasses import dataclass

from weft.comm import Links
from weft.comm.base import Solo
from weft.core.step import StepPlan
from weft.kernels.batch import Batch
from weft.planner.memory import Capacity
from weft.planner.plan import Plan
from weft.planner.speculation import draft_plan
from weft.worker.rows import Rows
from weft.worker.sampler import Sampler


@dataclass
class Text:
    """A row that is to be continued: its last token, and where that stands."""

    slot: int
    token: int
    position: int


class Drafter:
    """The draft model of a plan. It shares the large one's blocks: a token's KV lies in the same block of both caches,
    so one table serves both, and a prefix that is found is found by both."""

    def __init__(self, plan: Plan) -> None:
        # Here, since the worker makes a drafter.
        from weft.worker.worker import Worker

        self._worker = Worker(draft_plan(plan), 0, Links(tensor=Solo(), pipeline=Solo()))

    def load(self) -> Capacity:
        return self._worker.load()

    @property
    def graph_bytes(self) -> int:
        """What its graphs keep, of the activations that it reported."""
        return self._worker.graph_bytes

    def allocate(self, num_blocks: int) -> None:
        self._worker.allocate(num_blocks)

    def follow(self, batch: Batch) -> None:
        """Read what the large model reads."""
        self._worker.hidden(batch)

    def guess(self, step: StepPlan, tokens: list[int], rows: Rows, sampler: Sampler) -> dict[int, list[int]]:
        """By slot what comes after `tokens`, which the large model sampled in this step: as far as the slot's blocks
        reach, and at most `step.guess`. Every token is drawn from the stream that the large model will draw it from.
        """
        texts = self._texts(step, tokens)
        found: dict[int, list[int]] = {text.slot: [] for text in texts}
        for _ in range(step.guess):
            texts = [text for text in texts if text.position < rows.reach(text.slot)]
            if not texts:
                break
            order = sampler.order([text.slot for text in texts], [text.position + 1 for text in texts])
            batch, there = rows.batch(one_token_each(texts), more=order.arrays)
            logits = self._worker.model.logits(self._worker.hidden(batch))
            assert logits is not None
            # Their result is not taken: nothing is sampled for good.
            for text, token in zip(texts, sampler.sample(logits, order, there).tokens.tolist(), strict=True):
                found[text.slot].append(token)
                text.token, text.position = token, text.position + 1
        return found

    @staticmethod
    def _texts(step: StepPlan, tokens: list[int]) -> list[Text]:
        """The rows that sampled, each after its last confirmed token."""
        texts, at, drawn = [], 0, 0
        for slot, start, count, samples, guessed in zip(
            step.slots, step.starts, step.counts, step.samples, step.guesses, strict=True
        ):
            at += count
            if samples:
                guesses, sampled = step.tokens[at - guessed : at], tokens[drawn : drawn + guessed + 1]
                right = next((n for n, guess in enumerate(guesses) if guess != sampled[n]), guessed)
                texts.append(Text(slot, sampled[right], start + count - guessed + right))
                drawn += guessed + 1
        return texts

    def close(self) -> None:
        self._worker.close()


def one_token_each(texts: list[Text]) -> StepPlan:
    """A step that continues every text by its last token."""
    count = len(texts)
    return StepPlan(
        id=-1,
        released=[],
        admitted=[],
        slots=[text.slot for text in texts],
        starts=[text.position for text in texts],
        counts=[1] * count,
        tokens=[text.token for text in texts],
        blocks=[[] for _ in texts],
        samples=[True] * count,
        guesses=[0] * count,
    )
