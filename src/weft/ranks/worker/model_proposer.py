"""The draft model on the output rank: a `Proposer` that has a model runner of its own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from weft.engine.core.params import SamplingParams
from weft.engine.core.speculation import common_prefix_length
from weft.engine.core.step import Admission, StepPlan
from weft.ranks.kernels.streams import NOT_FINITE
from weft.ranks.worker import rehearsal
from weft.ranks.worker.request_slots import RequestSlots
from weft.ranks.worker.runner import ModelRunner
from weft.ranks.worker.sample_arrays import sampled_positions
from weft.ranks.worker.sampler import SampleBatch, SampledTokens, Sampler


@dataclass
class SlotText:
    """Text of the request in a slot, as the draft model knows it.

    The draft has the KV of the first `computed` tokens. Other requests may use the KV of the first `shared_blocks`
    blocks.
    """

    tokens: list[int]
    computed: int = 0
    shared_blocks: int = 0

    def replace_from(self, position: int, tokens: list[int]) -> None:
        """Replace everything from `position` on by `tokens`. KV is kept as far as the tokens stay the same."""
        same = common_prefix_length(self.tokens[position : position + len(tokens)], tokens)
        self.computed = min(self.computed, position + same)
        self.tokens[position:] = tokens


@dataclass
class DraftRow:
    """A row of a step of the draft model: tokens of a slot's text from position `start` on.

    After it, `drafts` draft tokens are still wanted, the first of them sampled from this row.
    """

    slot: int
    start: int
    tokens: list[int]
    drafts: int

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class ModelProposer:
    """Proposes the tokens of a draft model, which `runner` runs.

    It shares the large model's `slots` and blocks: a token's KV lies in the same block of both caches. So one block
    table serves both, and a cached prefix is reused by both, as far as the draft has computed it. `sampler` is the
    large model's as well.

    The draft computes a text when draft tokens are wanted for it, with everything that it has missed since the last
    time. In one step it computes no more tokens than a step may have, texts that miss the least first.
    """

    def __init__(self, runner: ModelRunner, slots: RequestSlots, sampler: Sampler) -> None:
        self._runner, self._slots, self._sampler = runner, slots, sampler
        self._texts: dict[int, SlotText] = {}

    @property
    def runners(self) -> tuple[ModelRunner]:
        return (self._runner,)

    def load(self) -> None:
        """Load the draft model, and measure the peak memory of its steps."""
        self._runner.load()
        self._runner.measure(self._rehearse)

    def allocate(self, num_blocks: int) -> None:
        """Allocate the draft's KV cache, see `ModelRunner.allocate`."""
        self._runner.allocate(num_blocks, self._rehearse)
        # True for blocks of which the draft has the KV of all tokens.
        self._computed_blocks = np.zeros(num_blocks, dtype=np.bool_)

    def wake(self) -> None:
        """Read the draft's weights again, and allocate as before."""
        self._runner.wake(self._rehearse)
        self._computed_blocks[:] = False

    def admit(self, admission: Admission) -> None:
        """Give a slot to a request."""
        self._texts[admission.slot] = SlotText([*admission.prompt, *admission.output])

    def note(self, step: StepPlan, hidden: torch.Tensor) -> None:
        """Note the tokens of a step's rows, and that the draft has computed nothing of their new blocks. It computes
        states of its own, not from `hidden`."""
        tokens, slots = iter(step.tokens), self._slots
        for slot, start, count, blocks in zip(step.slots, step.starts, step.counts, step.blocks[0], strict=True):
            self._texts[slot].replace_from(start, list(islice(tokens, count)))
            if blocks:
                # Blocks before the row's first token come from the prefix cache.
                cached = -(-start // slots.block_size) - (slots.lengths[slot] - len(blocks))
                self._computed_blocks[blocks[max(0, cached) :]] = False

    def propose(self, step: StepPlan, sampled: list[int]) -> dict[int, list[int]]:
        """Propose draft tokens by slot, to follow the tokens that the large model `sampled` in this step.

        A slot gets as many as the step asks for at most, and as its blocks have room for; none (no entry) while the
        draft has not computed its text to the end. Each token is drawn from the random stream that the large model
        will draw it from.
        """
        proposed: dict[int, list[int]] = {}
        rows = self._first_rows(self._wanted_drafts(step, sampled), proposed)
        while rows:
            sampling = [row for row in rows if row.drafts]
            tokens = self._run_rows(rows, sampling)
            rows = []
            for row, token in zip(sampling, tokens, strict=True):
                proposed[row.slot].append(token)
                self._texts[row.slot].tokens.append(token)
                if row.drafts > 1 and row.end < self._slots.capacity(row.slot):
                    rows.append(DraftRow(row.slot, row.end, [token], row.drafts - 1))
        return proposed

    def _wanted_drafts(self, step: StepPlan, sampled: list[int]) -> dict[int, int]:
        """Number of draft tokens wanted by slot, 0 if the step has not reached the prompt's end.

        The texts of these slots are made to end with the last token that the large model has accepted or sampled.
        """
        wanted, end, first = {}, 0, 0
        for slot, start, count, samples, drafts, limit in zip(
            step.slots, step.starts, step.counts, step.samples, step.draft_counts, step.draft_requests, strict=True
        ):
            end += count
            if samples:
                tokens = sampled[first : first + drafts + 1]
                first += len(tokens)
                if limit:
                    accepted = common_prefix_length(step.tokens[end - drafts : end], tokens)
                    self._texts[slot].replace_from(start + count - drafts + accepted, [tokens[accepted]])
            if limit:
                wanted[slot] = limit if samples else 0
        return wanted

    def _first_rows(self, wanted: dict[int, int], proposed: dict[int, list[int]]) -> list[DraftRow]:
        """Rows of the first step, which computes what the draft has missed of the texts.

        Slots whose text it computes to the end get an entry in `proposed`.
        """
        rows, left, slots = [], self._runner.plan.max_num_batched_tokens, self._slots
        for slot in sorted(wanted, key=self._missing):
            # Again: a text that begins alike may have been taken into this step since.
            missing = self._missing(slot)
            text, capacity = self._texts[slot], slots.capacity(slot)
            length = len(text.tokens)
            # Draft tokens follow the last token, which is computed again if need be.
            start = length - max(1, missing)
            tokens = text.tokens[start : min(capacity, start + left)]
            left -= len(tokens)
            end = start + len(tokens)
            if wanted[slot] and end == min(capacity, length):
                proposed[slot] = []
            if tokens:
                # By the time that other requests read these blocks, their KV is there.
                full_blocks = end // slots.block_size
                self._computed_blocks[slots.tables[0, slot, text.shared_blocks : full_blocks]] = True
                text.shared_blocks = full_blocks
                rows.append(DraftRow(slot, start, tokens, wanted[slot] if end == length else 0))
        return rows

    def _missing(self, slot: int) -> int:
        """Number of tokens of a slot's text whose KV the draft has neither computed nor finds in shared blocks."""
        text, slots = self._texts[slot], self._slots
        block, offset = divmod(text.computed, slots.block_size)
        while not offset and block < slots.lengths[slot] and self._computed_blocks[slots.tables[0, slot, block]]:
            block += 1
            text.computed += slots.block_size
        return len(text.tokens) - text.computed

    def _run_rows(self, rows: list[DraftRow], sampling: list[DraftRow]) -> list[int]:
        """Run one step of the draft model; return a token that follows each of the rows `sampling`."""
        samples = prepare_samples(rows, sampling, self._sampler) if sampling else None
        sampled = self._run_step(draft_step(rows), samples)
        for row in rows:
            self._texts[row.slot].computed = row.end
        # The result is not taken: no token is sampled for good.
        return sampled.tokens.tolist() if sampled else []

    def _run_step(self, step: StepPlan, samples: SampleBatch | None) -> SampledTokens | None:
        """Run a step through the draft model; return its tokens if it samples any."""
        runner, arrays = self._runner, samples.arrays if samples else None
        staged, tensors = self._slots.stage(
            step, arrays, singly=runner.runs_singly(step), expands_from=runner.expands_from
        )
        hidden = runner.forward(runner.fill_batch(staged))
        if samples is None or tensors is None:
            return None
        if len(tensors.picks) < len(hidden):
            hidden = hidden.index_select(0, tensors.picks)
        logits = runner.logits(hidden)
        assert logits is not None
        return self._sampler.sample(logits, samples, tensors)

    def _rehearse(self, counts: list[int], params: SamplingParams, num_blocks: int | None = None) -> None:
        """Run a `rehearsal_step` through the draft model. Raises ModelError if its logits are not finite."""
        plan, slots, sampler = self._runner.plan, self._slots, self._sampler
        step = rehearsal.rehearsal_step(plan, counts, params, num_blocks)
        for admission in step.admitted:
            slots.admit(admission)
            sampler.admit(admission)
        sampled = self._run_step(step, sampler.prepare_batch(*sampled_positions(step)))
        assert sampled
        tokens, _ = sampled.result()
        for slot in step.slots:
            slots.release(slot)
            sampler.release(slot)
        if NOT_FINITE in tokens:
            raise rehearsal.not_finite(plan)


def prepare_samples(rows: list[DraftRow], sampling: list[DraftRow], sampler: Sampler) -> SampleBatch:
    """Prepare the tokens to sample after the rows of `rows` that are in `sampling`."""
    ends = np.cumsum([len(row.tokens) for row in rows])
    picks = [end - 1 for row, end in zip(rows, ends, strict=True) if row.drafts]
    return sampler.prepare_batch(picks, [row.slot for row in sampling], [row.end for row in sampling])


def draft_step(rows: list[DraftRow]) -> StepPlan:
    """The StepPlan of these rows."""
    count = len(rows)
    return StepPlan(
        id=-1,
        released=[],
        admitted=[],
        slots=[row.slot for row in rows],
        starts=[row.start for row in rows],
        counts=[len(row.tokens) for row in rows],
        tokens=[token for row in rows for token in row.tokens],
        blocks=[[[] for _ in rows]],
        samples=[True] * count,
        draft_counts=[0] * count,
    )
