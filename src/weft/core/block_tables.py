"""BlockTables: which KV blocks each sequence has, which are promised to it, and what of them others may find."""

from __future__ import annotations

from weft.core.blocks import BlockPool
from weft.core.sequence import Sequence

# Where room for one token is kept, those that grow preempt those that came last again and again; where too much is, it
# lies idle. In docs/benchmarks.md is what 16 to 256 give.
GROWTH = 64


class BlockTables:
    """The block tables of the sequences that run, over one pool.

    `promised` are the blocks that they still need for what they have not prefilled yet; `growth` the tokens that each
    of them is kept room for before others are let in.
    """

    __slots__ = ("block_size", "growth", "pool", "promised")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.growth = GROWTH
        self.promised = 0

    def count_blocks(self, tokens: int) -> int:
        """How many hold so many tokens."""
        return -(-tokens // self.block_size)

    def may_reuse(self, sequence: Sequence) -> bool:
        """Whether it may begin with blocks that are there."""
        # Logprobs of the prompt need the logits of all its positions.
        return self.pool.caching and (
            sequence.request.params.prompt_logprobs is None or len(sequence.tokens) > sequence.prompt_length
        )

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """The cached blocks of a sequence's beginning: never its last token, whose logits are wanted."""
        if not self.may_reuse(sequence):
            return []
        return self.pool.match(sequence.digests((len(sequence.tokens) - 1) // self.block_size, self.block_size))

    def has_room(self, new: int, found: list[int], running: int) -> bool:
        """Whether a prompt fits that has `found` blocks in the cache and needs `new` ones: all of it, and what those
        `running` grow by. Else the newcomer would soon be preempted, or preempt."""
        revived = sum(self.pool.references[block] == 0 for block in found)
        return new + revived + self.promised + running * self.count_blocks(self.growth) <= self.pool.free

    def spare_tokens(self, running: int) -> int:
        """Tokens that the blocks hold that nobody is sure of."""
        return max(0, self.pool.free - running - self.promised) * self.block_size

    def open_table(self, sequence: Sequence, found: list[int], new: int) -> None:
        """Begin a table with the blocks that hold the sequence's beginning, and promise it the `new` ones."""
        self.pool.hold(found)
        sequence.blocks = list(found)
        sequence.registered = len(found)
        sequence.room = sequence.computed = len(found) * self.block_size
        sequence.promised = new
        self.promised += new

    def grow_table(self, sequence: Sequence, end: int) -> list[int]:
        """Blocks for a sequence's tokens up to `end`; returns those that are new."""
        new = self.pool.allocate(self.count_blocks(end - sequence.room))
        sequence.blocks += new
        sequence.room += len(new) * self.block_size
        if sequence.promised:
            # Guesses after a prompt's last token take more than it was promised.
            kept = min(sequence.promised, len(new))
            sequence.promised -= kept
            self.promised -= kept
        return new

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Let others find the blocks that the scheduled tokens fill."""
        # A token that is on its way has no digest yet.
        full = min(sequence.computed, len(sequence.tokens)) // self.block_size
        digests = sequence.digests(full, self.block_size)
        for index in range(sequence.registered, full):
            self.pool.register(sequence.blocks[index], digests[index])
        sequence.registered = full

    def close_table(self, sequence: Sequence) -> None:
        """Take all blocks back."""
        if self.pool.caching and sequence.computed // self.block_size > sequence.registered:
            # A block may have been filled by a token that was not known then.
            self.register_full_blocks(sequence)
        self.pool.release(sequence.blocks)
        self.promised -= sequence.promised
        sequence.blocks = []
        sequence.room = sequence.computed = sequence.promised = 0
