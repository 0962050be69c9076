"""BlockTables: the KV blocks of each running sequence, the blocks promised to it, and its part of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

from weft.core.blocks import BlockPool
from weft.core.sequence import Sequence

# Tokens of growth that are reserved per running sequence. With room for only one token, growing sequences preempt the
# latest arrivals again and again; with too much, memory lies idle. docs/benchmarks.md has the figures for 16 to 256.
GROWTH = 64


class BlockTables:
    """The block tables of the running sequences, over one pool.

    `promised` is the number of blocks that running sequences still need for what they have not prefilled yet.
    `growth` is the number of tokens that each running sequence is kept room for before another is admitted.
    """

    __slots__ = ("block_size", "growth", "pool", "promised")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.growth = GROWTH
        self.promised = 0

    def count_blocks(self, tokens: int) -> int:
        """Number of blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def may_reuse(self, sequence: Sequence) -> bool:
        """Return True if the sequence may begin with cached prefix blocks."""
        # Logprobs of the prompt need the logits of all its positions.
        return self.pool.caching and (
            sequence.request.params.prompt_logprobs is None or len(sequence.tokens) > sequence.prompt_length
        )

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks of a sequence's prefix, never with its last token, whose logits are needed."""
        if not self.may_reuse(sequence):
            return []
        return self.pool.match(sequence.digests((len(sequence.tokens) - 1) // self.block_size, self.block_size))

    def has_room(self, new: int, cached: list[int], running: int) -> bool:
        """Return True if a prompt fits that has `cached` blocks in the cache and needs `new` ones.

        All of the prompt must fit, beside what is promised and the growth of the `running` sequences. Otherwise the
        new sequence would soon be preempted, or preempt another.
        """
        revived = self.pool.count_free(cached)
        return new + revived + self.promised + running * self.count_blocks(self.growth) <= self.pool.free

    def spare_tokens(self, running: int) -> int:
        """Tokens that fit in the blocks beyond those promised and one for each running sequence."""
        return max(0, self.pool.free - running - self.promised) * self.block_size

    def blocks_of_rounds(self, running: Iterable[Sequence], rounds: int) -> int:
        """Number of blocks that `rounds` more tokens of each running sequence need."""
        return sum(self.count_blocks(max(0, row.computed + rounds - row.room)) for row in running)

    def open_table(self, sequence: Sequence, cached: list[int], new: int) -> None:
        """Begin a block table with the `cached` blocks of the sequence's prefix, and promise it `new` more."""
        self.pool.hold(cached)
        sequence.blocks = list(cached)
        sequence.registered = len(cached)
        sequence.room = sequence.computed = len(cached) * self.block_size
        sequence.promised = new
        self.promised += new

    def grow_table(self, sequence: Sequence, end: int) -> list[int]:
        """Allocate blocks for a sequence's tokens up to `end`. Returns the new blocks."""
        new = self.pool.allocate(self.count_blocks(end - sequence.room))
        sequence.blocks += new
        sequence.room += len(new) * self.block_size
        if sequence.promised:
            # Draft tokens after a prompt's last token take more than the sequence was promised.
            kept = min(sequence.promised, len(new))
            sequence.promised -= kept
            self.promised -= kept
        return new

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Add the blocks that the scheduled tokens fill to the prefix cache."""
        # A token that is still being sampled has no digest yet.
        full = min(sequence.computed, len(sequence.tokens)) // self.block_size
        digests = sequence.digests(full, self.block_size)
        for index in range(sequence.registered, full):
            self.pool.register(sequence.blocks[index], digests[index])
        sequence.registered = full

    def close_table(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence."""
        if self.pool.caching and sequence.computed // self.block_size > sequence.registered:
            # A block may have been filled by a token that was not known then.
            self.register_full_blocks(sequence)
        self.pool.release(sequence.blocks)
        self.promised -= sequence.promised
        sequence.blocks = []
        sequence.room = sequence.computed = sequence.promised = 0
