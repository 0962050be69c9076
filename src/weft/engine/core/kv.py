"""KVManager: the KV blocks of the running sequences, the blocks promised to them, and the prefix cache."""

from __future__ import annotations

from typing import NamedTuple

from weft.checkpoint.architectures.kv import STATES, KVGroup, KVLayout
from weft.engine.core.blocks import BlockPool, CountedBlocks, NumberedBlocks
from weft.engine.core.sequence import Sequence

# Tokens of growth that are reserved per running sequence. With room for only one token, growing sequences preempt the
# latest arrivals again and again; with too much, memory lies idle. docs/benchmarks.md has the figures for 16 to 256.
GROWTH = 64
NO_STATE = 0  # number of no state: the entry of a block whose end no step reached

# By group, entries of a block table.
Tables = list[list[int]]


class TableGroup(NamedTuple):
    """A KV group in the scheduler.

    `reach` is the number of earlier tokens that a token reads, None for all. A state is read by the next token only.
    """

    number: int
    layers: KVGroup
    pool: BlockPool
    reach: int | None
    is_state: bool

    def entries(self, entries: list[int]) -> list[int]:
        """Entries of a table that are blocks or states of the pool."""
        return [entry for entry in entries if entry != NO_STATE] if self.is_state else entries


class KVManager:
    """The block tables of the running sequences: one for each KV group, all over one pool of `num_blocks` blocks.

    A sequence's tables have equally many entries, one for `layout.block_size` tokens. A group with a window frees the
    blocks behind it: their entries stay in the table, and are not read again. With `caching`, full blocks can be found
    by their digest after they are freed. A prefix is reused as far as every group has the blocks that a token after it
    reads. With `counted`, blocks have no numbers, and there is no prefix cache.

    In a group of states the entry of a block is the state after the block's last token so far. A step goes on from the
    entry of the token before its first token, and writes its result to the entry of its last token. So the entry of an
    earlier block is a snapshot, which can be found if a step ended with that block. At most `max_num_seqs` sequences
    run.

    `promised` is the number of blocks that running sequences still need for what they have not prefilled yet.
    `reserved` is the number of blocks that they need for `growth` more tokens each: no other sequence may have them.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, *, max_num_seqs: int, caching: bool, counted: bool = False
    ) -> None:
        assert not (caching and counted), "blocks that are only counted cannot be found"
        self.layout = layout
        self.block_size = layout.block_size
        self.num_blocks = num_blocks
        self.caching = caching
        self.growth = GROWTH
        self.promised = 0
        self.reserved = 0

        def create_pool(size: int) -> BlockPool:
            return CountedBlocks(size) if counted else NumberedBlocks(size, caching=caching)

        self.pool = create_pool(num_blocks)
        self.groups = []
        for number, group in enumerate(layout.groups):
            window, is_state, pool = group.spec.window, group.spec.kind == "state", self.pool
            if is_state:
                pool = create_pool(STATES * max_num_seqs + 1)
                pool.allocate(1)  # NO_STATE
            reach = 1 if is_state else None if window is None else window - 1
            self.groups.append(TableGroup(number, group, pool, reach, is_state))
        self.paged = [group for group in self.groups if not group.is_state]
        self._limited = [group for group in self.groups if group.reach is not None]
        # True if blocks are freed while a sequence runs, and if steps should end with a block.
        self.frees = bool(self._limited)
        self.has_states = len(self.paged) < len(self.groups)

    # Sizes

    @property
    def free_columns(self) -> int:
        """Number of columns of tables that can be allocated: a block in each group."""
        return self.pool.free // len(self.paged)

    @property
    def used(self) -> int:
        """Number of blocks in use."""
        return self.num_blocks - self.pool.free

    def count_blocks(self, tokens: int) -> int:
        """Number of entries of a table that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def spare_tokens(self, running: int) -> int:
        """Tokens that fit in the blocks beyond those promised and one column for each running sequence."""
        columns = (self.pool.free - self.promised) // len(self.paged) - running
        return max(0, columns) * self.block_size

    # Admission

    def may_reuse(self, sequence: Sequence) -> bool:
        """Return True if the sequence may begin with cached prefix blocks."""
        # Logprobs of the prompt need the logits of all its positions.
        return self.caching and (
            sequence.request.params.prompt_logprobs is None or len(sequence.tokens) > sequence.prompt_length
        )

    def match_prefix(self, sequence: Sequence) -> Tables:
        """Return tables with the cached blocks of a sequence's longest prefix that all groups can serve.

        The prefix has whole blocks, and never the last token, whose logits are needed. Blocks of the prefix that no
        later token reads have the entry 0.
        """
        tables: Tables = [[] for _ in self.groups]
        if not self.may_reuse(sequence):
            return tables
        digests = sequence.digests((len(sequence.tokens) - 1) // self.block_size, self.block_size)
        length = len(digests)
        for group in self.groups:
            if group.reach is None:
                tables[group.number] = group.pool.match(group.number, digests[:length])
                length = len(tables[group.number])
        if not self.frees:
            return [table[:length] for table in tables]
        while length and (missing := self._first_missing(digests, length)) is not None:
            length = missing
        for group in self._limited:
            behind = self._behind(group, length * self.block_size)
            blocks = (group.pool.find(group.number, digest) for digest in digests[behind:length])
            tables[group.number] = [0] * behind + [block for block in blocks if block is not None]
        return [table[:length] for table in tables]

    def _first_missing(self, digests: list[bytes], length: int) -> int | None:
        """The first block that a token after `length` blocks reads and that is not in the group's cache.

        The group can serve no prefix that is longer than the missing block, up to this length.
        """
        for group in self._limited:
            for index in range(self._behind(group, length * self.block_size), length):
                if group.pool.find(group.number, digests[index]) is None:
                    return index
        return None

    def _behind(self, group: TableGroup, start: int) -> int:
        """Number of leading blocks of a table that no token from position `start` on reads."""
        return 0 if group.reach is None else max(0, start - group.reach) // self.block_size

    def has_room(self, sequence: Sequence, prefix: Tables, *, freed: int = 0) -> bool:
        """Return True if a sequence fits that has the `prefix` in the cache, once `freed` more blocks are free.

        The blocks that its prompt needs at once must fit, in addition to the blocks that are promised to the running
        sequences and reserved for their growth. Otherwise the new sequence would soon be preempted, or preempt another.
        """
        new = 0
        for group in self.paged:
            table = prefix[group.number]
            held = table[self._behind(group, len(table) * self.block_size) :]
            new += max(0, self.layout.group_blocks(group.layers, len(sequence.tokens)) - len(held))
            new += group.pool.count_free(held)
        return new + self.promised + self.reserved <= self.pool.free + freed

    def open_tables(self, sequence: Sequence, prefix: Tables) -> None:
        """Begin a sequence's tables with a cached `prefix`, and promise it the blocks that its other tokens need."""
        length = len(prefix[0])
        sequence.blocks, sequence.freed, sequence.sent = prefix, [], 0
        for group in self.groups:
            behind = self._behind(group, length * self.block_size)
            group.pool.hold(prefix[group.number][behind:])
            sequence.freed.append(behind)
        sequence.registered = length
        sequence.room = sequence.computed = length * self.block_size
        sequence.prefill_blocks = self.count_blocks(len(sequence.tokens))
        self._update_claims(sequence)
        self._update_frees_at(sequence)

    # A step

    def free_behind(self, sequence: Sequence, start: int) -> None:
        """Free the blocks of a sequence that no token from position `start` on reads.

        Steps that were scheduled before still read them: this step may write the freed blocks, an earlier step may not.
        """
        if self.has_states:
            self._register_state(sequence, start)
        if start < sequence.frees_at:
            return
        for group in self._limited:
            behind, freed = self._behind(group, start), sequence.freed[group.number]
            if behind > freed:
                group.pool.release(group.entries(sequence.blocks[group.number][freed:behind]))
                sequence.freed[group.number] = behind
        self._update_claims(sequence)
        self._update_frees_at(sequence)

    def grow_tables(self, sequence: Sequence, end: int) -> Tables:
        """Allocate blocks for a sequence's tokens up to `end`. Returns the entries of its tables that no rank knows."""
        count = self.count_blocks(end - sequence.room)
        for group, table in zip(self.groups, sequence.blocks, strict=True):
            if group.is_state:
                table += [NO_STATE] * (count - 1)
                table += group.pool.allocate(1)
            else:
                table += group.pool.allocate(count)
        sequence.room += count * self.block_size
        if sequence.promised or self.frees:
            self._update_claims(sequence)
        sent, sequence.sent = sequence.sent, sequence.room // self.block_size
        return [table[sent:] for table in sequence.blocks]

    def align_chunk(self, sequence: Sequence, count: int) -> int:
        """Number of the next `count` tokens that a step computes: with states, it ends with a block if it can, so that
        there is a snapshot of the longest prefix."""
        end = (sequence.computed + count) // self.block_size * self.block_size
        return end - sequence.computed if self.has_states and self.caching and end > sequence.computed else count

    def advance(self, orders: list[list[list[Sequence]]], rounds: int, *, unknown: int) -> None:
        """Bring sequences to the state after `rounds` rounds of steps, in which each computes one token.

        Each of the `orders` has the rows of the steps of a round; the rounds alternate between them. When a step is
        scheduled, the last `unknown` of the tokens that it and earlier steps compute are not known.
        """
        if self.caching:
            # The order of steps counts: the first of equal blocks is found again, and blocks freed last stay longest.
            for number in range(rounds):
                for rows in orders[number % len(orders)]:
                    self._take_step(rows, unknown)
        else:
            for rows in orders[0]:
                for sequence in rows:
                    self._take_steps(sequence, sequence.computed + rounds)

    def _take_step(self, rows: list[Sequence], unknown: int) -> None:
        """Bring sequences to the state after a step of one token each."""
        if self.frees:
            for sequence in rows:
                self.free_behind(sequence, sequence.computed)
        for sequence in rows:
            if sequence.computed == sequence.room:
                self.grow_tables(sequence, sequence.room + 1)
            sequence.computed += 1
            if (sequence.computed - unknown) // self.block_size > sequence.registered:
                self.register_full_blocks(sequence, sequence.computed - unknown)

    def _take_steps(self, sequence: Sequence, end: int) -> None:
        """Bring a sequence to the state after steps of one token each, up to position `end`."""
        while sequence.computed < end:
            if self.frees:
                self.free_behind(sequence, sequence.computed)
            if sequence.computed == sequence.room:
                self.grow_tables(sequence, sequence.room + 1 if self.frees else end)
            sequence.computed = min(end, sequence.room)
        if self.frees:
            self.free_behind(sequence, end - 1)

    def register_full_blocks(self, sequence: Sequence, known: int | None = None) -> None:
        """Add the blocks that scheduled tokens fill to the prefix cache, up to `known` tokens, or to all known
        tokens."""
        if not self.caching:
            return
        # A token that is still being sampled has no digest yet.
        known = len(sequence.tokens) if known is None else known
        full = min(sequence.computed, known) // self.block_size
        if full <= sequence.registered:
            return
        digests = sequence.digests(full, self.block_size)
        for group in self.paged:
            table, freed = sequence.blocks[group.number], sequence.freed[group.number]
            for index in range(max(sequence.registered, freed), full):
                group.pool.register(group.number, table[index], digests[index])
        sequence.registered = full

    def forget_text(self, sequence: Sequence) -> None:
        """Let no sequence reuse the blocks of this sequence's text, whichever sequence has filled them.

        Sequences that use such blocks keep them. To be called after this sequence's tables are closed, which registers
        blocks.
        """
        if not self.caching:
            return
        assert not sequence.blocks
        digests = sequence.digests(len(sequence.tokens) // self.block_size, self.block_size)
        for group in self.groups:
            group.pool.forget(group.number, digests)

    def forget_content(self) -> None:
        """Let no sequence reuse what was computed before; running sequences keep their blocks."""
        for group in self.groups:
            group.pool.forget_content()

    def close_tables(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence."""
        # A block may have been filled by a token that was not known then.
        self.register_full_blocks(sequence)
        if self.has_states:
            self._register_state(sequence, sequence.computed)
        for group, table in zip(self.groups, sequence.blocks, strict=True):
            group.pool.release(group.entries(table[sequence.freed[group.number] :]))
        self.promised -= sequence.promised
        self.reserved -= sequence.reserved
        sequence.blocks = []
        sequence.room = sequence.computed = sequence.promised = sequence.reserved = 0

    def _register_state(self, sequence: Sequence, start: int) -> None:
        """Add the state before position `start`, where a step has ended, to the prefix cache if a block ends there.

        Rows of the step that ends there could not read it: a step computes its states in no particular order.
        """
        blocks, rest = divmod(start, self.block_size)
        if not self.caching or rest or not 0 < blocks * self.block_size <= len(sequence.tokens):
            return
        digest = sequence.digests(blocks, self.block_size)[-1]
        for group in self.groups:
            if group.is_state:
                group.pool.register(group.number, sequence.blocks[group.number][blocks - 1], digest)

    def _update_claims(self, sequence: Sequence) -> None:
        """Promise a sequence the blocks that it still needs for its prefill, and reserve the blocks for its growth."""
        columns, growth = sequence.room // self.block_size, self.count_blocks(self.growth)
        promised = reserved = 0
        for group in self.paged:
            if columns < sequence.prefill_blocks:
                most = self.layout.group_blocks(group.layers, sequence.prefill_blocks * self.block_size)
                promised += max(0, most - (columns - sequence.freed[group.number]))
            if group.reach is None:
                reserved += growth
            else:
                # A sequence longer than its window frees as many blocks as it takes.
                prefilled = max(columns, sequence.prefill_blocks)
                reserved += min(growth, max(0, self.count_blocks(group.reach) + 1 - prefilled))
        self.promised += promised - sequence.promised
        self.reserved += reserved - sequence.reserved
        sequence.promised, sequence.reserved = promised, reserved

    def _update_frees_at(self, sequence: Sequence) -> None:
        """Find the position from which on the next block can be freed."""
        if self.frees:
            sequence.frees_at = min(
                (sequence.freed[group.number] + 1) * self.block_size + (group.reach or 0) for group in self._limited
            )
