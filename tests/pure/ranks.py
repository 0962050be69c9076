"""Ranks that do what a StepPlan says, to the letter, on a KV store that remembers what lies where.

The "model" is a hash of the whole context, so that a wrong token anywhere changes everything after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from weft.engine.core.request import Request
from weft.engine.core.step import UNKNOWN, Admission, StepPlan, StepResult, TokenLogprobs

VOCAB = 13


def digests(context: Sequence[int], known: list[int]) -> list[int]:
    """known[p] stands for the context up to position p; extended to the context's length."""
    for token in context[len(known) :]:
        known.append(((known[-1] if known else 7) * 1000003 + token + 1) % (2**61 - 1))
    return known


def next_token(digest: int) -> int:
    return (digest >> 7) % VOCAB


def pooled(context: Sequence[int]) -> bytes:
    """The result of a request with pooling."""
    return digests(context, [])[-1].to_bytes(8)


def logprob(value: float) -> TokenLogprobs:
    return TokenLogprobs(value, 1, [], [])


def expected(request: Request, longest: int) -> tuple[list[int], str]:
    """The tokens and the reason that a request must end with, whatever happens around it."""
    params = request.params
    context, known = list(request.prompt), list[int]()
    while True:
        context.append(next_token(digests(context, known)[-1]))
        answer = context[len(request.prompt) :]
        if answer[-1] in request.stop_ids and len(answer) > params.min_tokens:
            return answer, "stop"
        if len(answer) == params.max_tokens or len(context) == longest:
            return answer, "length"


@dataclass
class Row:
    """State of a slot on a rank."""

    admission: Admission
    context: list[int]
    tables: list[list[int]] = field(default_factory=list)
    end: int | None = None
    reach: int = 0
    known: list[int] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)


class Ranks:
    """Executes StepPlans, and asserts that each can be what was meant."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        windows: Sequence[int | None] = (None,),
        states: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.live: dict[int, Row] = {}
        # By group its window; then come the groups of states.
        self.windows, self.states = windows, states
        # What lies at a block's offsets: the group and the context of a token. By group and number, a state's context.
        self.kv: dict[int, list[tuple[int, int] | None]] = defaultdict(lambda: [None] * block_size)
        self.kept: dict[tuple[int, int], int] = {}
        self.steps = 0
        self.computed = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.id == self.steps
        self.steps += 1
        for slot in plan.released:
            del self.live[slot]
        for admission in plan.admitted:
            assert admission.slot not in self.live and 0 <= admission.slot < self.max_num_seqs
            tables: list[list[int]] = [[] for _ in range(len(self.windows) + self.states)]
            self.live[admission.slot] = Row(admission, [*admission.prompt, *admission.output], tables)
        assert plan.slots and len(set(plan.slots)) == len(plan.slots)
        assert {a.slot for a in plan.admitted} <= set(plan.slots)
        assert sum(plan.counts) == len(plan.tokens) <= self.max_num_batched_tokens
        assert len(plan.slots) == len(plan.starts) == len(plan.counts) == len(plan.samples)
        assert [len(blocks) for blocks in plan.blocks] == [len(plan.slots)] * (len(self.windows) + self.states)
        self.computed += len(plan.tokens)

        written: set[tuple[int, int]] = set()
        tokens = iter(plan.tokens)
        rows = zip(plan.slots, plan.starts, plan.counts, zip(*plan.blocks, strict=True), plan.draft_counts, strict=True)
        for slot, start, count, blocks, guessed in rows:
            row = self.live[slot]
            fresh = row.end is None
            assert fresh or start == row.end
            row.end = start + count
            row.reach = max(row.reach, row.end)
            for table, new in zip(row.tables, blocks, strict=True):
                table += new
                assert len(table) == -(-row.reach // self.block_size), "a block too many or too few"
            assert all(0 <= block < self.num_blocks for new in blocks[: len(self.windows)] for block in new)
            computed = [next(tokens) for _ in range(count)]
            assert 0 <= guessed < count and (not guessed or count == guessed + 1)
            for position, token in enumerate(computed[: count - guessed], start):
                sampled = position == len(row.context) - 1 >= len(row.admission.prompt) + len(row.admission.output)
                assert token == row.context[position] or (token == UNKNOWN and sampled)
            row.guesses = computed[count - guessed :]
            known = row.known = digests(row.context + row.guesses, row.known[: len(row.context)])
            for group in range(len(self.windows)):
                for position in range(start, row.end):
                    place = self.place(row, group, position)
                    assert place not in written, "two rows write to one place"
                    written.add(place)
                    block, offset = place
                    self.kv[block][offset] = group, known[position]
            if row.admission.params.prompt_logprobs is not None and fresh and not row.admission.output:
                assert start == 0
        assert next(tokens, None) is None

        self.step_states(plan)

        result = StepResult(plan.id, [], [], {})
        asked = plan.draft_requests or [0] * len(plan.slots)
        for slot, start, samples, asks in zip(plan.slots, plan.starts, plan.samples, asked, strict=True):
            row = self.live[slot]
            assert row.end is not None
            for group, window in enumerate(self.windows):
                table, first = row.tables[group], max(0, start + 1 - window) if window else 0
                before = first - first % self.block_size
                read = table[before // self.block_size : -(-row.end // self.block_size)]
                kept = list(chain.from_iterable(map(self.kv.__getitem__, read)))[first - before : row.end - before]
                known = [(group, digest) for digest in row.known[first : row.end]]
                assert kept == known, "attention would read another context"
            params = row.admission.params
            if params.prompt_logprobs is not None and not row.admission.output:
                ends = min(row.end, len(row.admission.prompt) - 1)
                result.prompt_logprobs[slot] = [logprob(row.context[p + 1]) for p in range(start, ends)]
            ends = row.end == len(row.context) + len(row.guesses)
            if row.admission.pooling is not None:
                assert not samples and not row.guesses
                if ends:
                    result.pooled[slot] = pooled(row.context)
                continue
            assert samples == ends
            if samples:
                after = [next_token(digest) for digest in row.known[len(row.known) - 1 - len(row.guesses) :]]
                result.tokens += after
                result.logprobs += [None if params.logprobs is None else logprob(token) for token in after]
                right = next((n for n, guess in enumerate(row.guesses) if guess != after[n]), len(row.guesses))
                del row.known[len(row.context) + right :]
                row.context += after[: right + 1]
                if row.guesses:
                    row.end = len(row.context) - 1
                if asks and (guesses := self.guess(row, asks)) is not None:
                    result.drafts[slot] = guesses
        return result

    def place(self, row: Row, group: int, position: int) -> tuple[int, int]:
        """Block and offset of a position in a group."""
        block, offset = divmod(position, self.block_size)
        return row.tables[group][block], offset

    def step_states(self, plan: StepPlan) -> None:
        """Every row goes on from the state of the token before its first one. Rows come in any order: no state that one
        writes is another's."""
        for group in range(len(self.windows), len(self.windows) + self.states):
            read, written = list[int](), list[int]()
            for slot, start in zip(plan.slots, plan.starts, strict=True):
                row = self.live[slot]
                assert row.end is not None
                if start:
                    before = row.tables[group][(start - 1) // self.block_size]
                    assert self.kept[group, before] == row.known[start - 1], "the state of another text"
                    read.append(before)
                after = row.tables[group][(row.end - 1) // self.block_size]
                assert after, "no state"
                written.append(after)
                if start and before == after:
                    read.pop()  # in place
                self.kept[group, after] = row.known[row.end - 1]
            assert len({*written}) == len(written) and not {*written} & {*read}, "two rows share a state"

    def guess(self, row: Row, count: int) -> list[int] | None:
        """Tokens of a draft model, right for a while; none while it still has to read."""
        if self.steps % 7 == 6:
            return None
        context, known = list(row.context), list[int]()
        for _ in range(count):
            context.append(next_token(digests(context, known)[-1]))
        guesses = context[len(row.context) :]
        if self.steps % 3:
            guesses[self.steps % count] += 1
        return guesses
