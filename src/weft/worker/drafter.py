"""Drafter: a small model beside the output rank, which guesses the tokens that the large one then confirms."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from weft.comm import Links
from weft.comm.base import Solo
from weft.core.speculation import common_prefix_length
from weft.core.step import Admission, StepPlan
from weft.plan.memory import Capacity
from weft.plan.plan import Plan
from weft.plan.speculation import draft_plan
from weft.worker.rows import Rows
from weft.worker.sampler import Sampler


@dataclass
class Text:
    """What stands in a slot. Of its first `read` tokens the draft has the KV, and of its first `whole` blocks others
    may use that."""

    tokens: list[int]
    read: int = 0
    whole: int = 0

    def write(self, at: int, tokens: list[int]) -> None:
        """These stand from `at` on, and nothing after them."""
        self.read = min(self.read, at + common_prefix_length(self.tokens[at : at + len(tokens)], tokens))
        self.tokens[at:] = tokens


@dataclass
class Read:
    """Tokens of a slot's text that the draft reads next, from position `start` on; it goes on by `more` guesses."""

    slot: int
    start: int
    tokens: list[int]
    more: int

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Drafter:
    """The draft model of a plan. It shares the large one's blocks: a token's KV lies in the same block of both caches,
    so one table serves both, and a prefix that is found is found by both, as far as the draft has read it.

    It reads a text when it is asked for guesses of what comes next, and then all that it has missed since it was asked
    last: in one step no more tokens than a step may have, those texts first that miss the least.
    """

    def __init__(self, plan: Plan) -> None:
        # Here, since the worker makes a drafter.
        from weft.worker.worker import Worker

        self._plan = draft_plan(plan)
        self._worker = Worker(self._plan, 0, Links(tensor=Solo(), pipeline=Solo()))
        self._texts: dict[int, Text] = {}

    def load(self) -> Capacity:
        return self._worker.load()

    @property
    def graph_bytes(self) -> int:
        """What its graphs keep, of the activations that it reported."""
        return self._worker.graph_bytes

    def allocate(self, num_blocks: int) -> None:
        self._worker.allocate(num_blocks)
        # Blocks of which the draft has the KV of all tokens.
        self._whole = np.zeros(num_blocks, dtype=np.bool_)

    @property
    def uncaptured(self) -> int:
        """Number of its CUDA graphs that are still to be captured."""
        return self._worker.uncaptured

    def capture_graph(self) -> None:
        """Capture one of them."""
        self._worker.capture_graph()

    def admit(self, admission: Admission) -> None:
        self._texts[admission.slot] = Text([*admission.prompt, *admission.output])

    def note(self, step: StepPlan, rows: Rows) -> None:
        """Take down what the step's rows say, and that nothing of the blocks that are new to them has been read. `rows`
        has them already."""
        tokens = iter(step.tokens)
        for slot, start, count, blocks in zip(step.slots, step.starts, step.counts, step.blocks, strict=True):
            self._texts[slot].write(start, list(islice(tokens, count)))
            if blocks:
                # What lies before the row's first token was found in the prefix cache.
                found = -(-start // rows.block_size) - (rows.lengths[slot] - len(blocks))
                self._whole[blocks[max(0, found) :]] = False

    def guess(self, step: StepPlan, sampled: list[int], rows: Rows, sampler: Sampler) -> dict[int, list[int]]:
        """By slot what comes after the tokens that the large model `sampled` in this step: at most what the step asks
        for, and as far as the slot's blocks reach. Slots whose texts are still to be read have no entry. Every token
        is drawn from the stream that the large model will draw it from."""
        found: dict[int, list[int]] = {}
        reads = self._catch_up(self._asked(step, sampled), rows, found)
        while reads:
            go_on = [read for read in reads if read.more]
            tokens = self._run(reads, go_on, rows, sampler)
            reads = []
            for read, token in zip(go_on, tokens, strict=True):
                found[read.slot].append(token)
                self._texts[read.slot].tokens.append(token)
                if read.more > 1 and read.end < rows.reach(read.slot):
                    reads.append(Read(read.slot, read.end, [token], read.more - 1))
        return found

    def close(self) -> None:
        self._worker.close()

    def _asked(self, step: StepPlan, sampled: list[int]) -> dict[int, int]:
        """By slot how many guesses are asked for, 0 where the step has not come to the prompt's end. Afterwards these
        texts end with what is sure by now."""
        asked, at, drawn = {}, 0, 0
        for slot, start, count, samples, guessed, most in zip(
            step.slots, step.starts, step.counts, step.samples, step.draft_counts, step.draft_requests, strict=True
        ):
            at += count
            if samples:
                tokens = sampled[drawn : drawn + guessed + 1]
                drawn += len(tokens)
                if most:
                    right = common_prefix_length(step.tokens[at - guessed : at], tokens)
                    self._texts[slot].write(start + count - guessed + right, [tokens[right]])
            if most:
                asked[slot] = most if samples else 0
        return asked

    def _catch_up(self, asked: dict[int, int], rows: Rows, found: dict[int, list[int]]) -> list[Read]:
        """What is to be read first. Those that will have been read to the end get an entry in `found`."""
        reads, left = [], self._plan.max_num_batched_tokens
        for slot in sorted(asked, key=lambda slot: self._missing(slot, rows)):
            # Another text that begins alike may have been read meanwhile.
            missing = self._missing(slot, rows)
            text, reach = self._texts[slot], rows.reach(slot)
            length = len(text.tokens)
            # Guesses come after the last token: that is read again, if need be.
            start = length - max(1, missing)
            tokens = text.tokens[start : min(reach, start + left)]
            left -= len(tokens)
            end = start + len(tokens)
            if asked[slot] and end == min(reach, length):
                found[slot] = []
            if tokens:
                # By the time that others read what these blocks hold, it is there.
                whole = end // rows.block_size
                self._whole[rows.tables[slot, text.whole : whole]] = True
                text.whole = whole
                reads.append(Read(slot, start, tokens, asked[slot] if end == length else 0))
        return reads

    def _missing(self, slot: int, rows: Rows) -> int:
        """How much of a slot's text the draft has not read, neither here nor in blocks that others have as well."""
        text = self._texts[slot]
        at, aside = divmod(text.read, rows.block_size)
        while not aside and at < rows.lengths[slot] and self._whole[rows.tables[slot, at]]:
            at += 1
            text.read += rows.block_size
        return len(text.tokens) - text.read

    def _run(self, reads: list[Read], go_on: list[Read], rows: Rows, sampler: Sampler) -> list[int]:
        """Read these; returns a token that comes after each of those that `go_on`."""
        # What is ordered has to be sampled.
        order = sampler.order([read.slot for read in go_on], [read.end for read in go_on]) if go_on else None
        ends = np.cumsum([len(read.tokens) for read in reads])
        picks = np.array([end - 1 for read, end in zip(reads, ends, strict=True) if read.more], dtype=np.int64)
        step = reading(reads)
        more = [picks, *(order.arrays if order else ())]
        staged, (last, *there) = rows.stage(step, more, singly=self._worker.is_decode(step))
        hidden = self._worker.hidden(self._worker.lay(staged))
        for read in reads:
            self._texts[read.slot].read = read.end
        if order is None:
            return []
        logits = self._worker.model.logits(hidden if len(go_on) == len(hidden) else hidden.index_select(0, last))
        assert logits is not None
        # Their result is not taken: nothing is sampled for good.
        return sampler.sample(logits, order, there).tokens.tolist()


def reading(reads: list[Read]) -> StepPlan:
    """A step that reads these."""
    count = len(reads)
    return StepPlan(
        id=-1,
        released=[],
        admitted=[],
        slots=[read.slot for read in reads],
        starts=[read.start for read in reads],
        counts=[len(read.tokens) for read in reads],
        tokens=[token for read in reads for token in read.tokens],
        blocks=[[] for _ in reads],
        samples=[True] * count,
        draft_counts=[0] * count,
    )
