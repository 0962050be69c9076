"""BlockPool: which KV blocks are in use, which are free, and which still hold a prefix worth having."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """32 bytes that stand for a full block's tokens and all before them. `parent` is the digest of the block
    before, empty for the first. SHA-256: nobody can make two prompts that share a block by mistake."""
    return sha256(parent + array("q", tokens).tobytes()).digest()


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, numbered from 0, with a reference count each.

    A block without references is free. If it is registered under a digest it keeps its content, and can be
    held again, until it is the least recently used one and no other is left to allocate. Other free blocks go
    out last in, first out, so memory that was never touched stays so for as long as possible. Each operation
    takes constant time per block.
    """

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.references = [0] * num_blocks
        # Its top is the end; block 0 is the first to go out.
        self._plain = list(range(num_blocks - 1, -1, -1))
        # Free blocks with a digest, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._digests: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """How many blocks can be allocated."""
        return len(self._plain) + len(self._cached)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known beginning of a chain of digests. Takes no references."""
        found: list[int] = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference on each of these matched blocks, free or not."""
        for block in blocks:
            if self.references[block] == 0:
                del self._cached[block]
            self.references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; at most `free`."""
        assert count <= self.free
        blocks = []
        for _ in range(count):
            block = self._plain.pop() if self._plain else self._evict()
            self.references[block] = 1
            blocks.append(block)
        return blocks

    def register(self, block: int, digest: bytes) -> None:
        """A held block is full, or will be before any later step reads it: others may find it from now on.
        Of two blocks with the same content the first is the one that is found."""
        if self.caching and digest not in self._blocks:
            assert self.references[block] > 0 and self._digests[block] is None
            self._blocks[digest] = block
            self._digests[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each block of a request's table, given in the table's order."""
        # The end of a prefix is of use only with its beginning: it is the first to be evicted.
        for block in reversed(blocks):
            assert self.references[block] > 0, f"block {block} is free already"
            self.references[block] -= 1
            if self.references[block] == 0:
                if self._digests[block] is None:
                    self._plain.append(block)
                else:
                    self._cached[block] = None

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._digests[block]
        assert digest is not None
        del self._blocks[digest]
        self._digests[block] = None
        return block
