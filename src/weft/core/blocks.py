"""BlockPool: allocation of KV blocks, and the prefix cache that reuses them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Protocol


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """SHA-256 digest (32 bytes) of a full block's tokens and of all tokens before them.

    `parent` is the digest of the block before, empty for the first. SHA-256, so that no two prompts can be made to
    share a block by mistake.
    """
    return sha256(parent + array("q", tokens).tobytes()).digest()


class BlockPool(Protocol):
    """`num_blocks` KV blocks of `block_size` tokens; with `caching`, full blocks can be found by their digest."""

    num_blocks: int
    block_size: int
    caching: bool

    @property
    def free(self) -> int:
        """Number of blocks that can be allocated."""
        ...

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Return the cached blocks of the longest known prefix of a chain of digests. Takes no references."""
        ...

    def count_free(self, blocks: Iterable[int]) -> int:
        """Number of these blocks that are free."""
        ...

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these matched blocks, free or not."""
        ...

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each; `count` is at most `free`."""
        ...

    def register(self, block: int, digest: bytes) -> None:
        """Let later prompts match a held block, which is full or will be before any later step reads it."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block of a request's table, given in the table's order."""
        ...

    def forget_content(self) -> None:
        """Forget the digests of all blocks, so that none is matched; held blocks stay held."""
        ...


class NumberedBlocks:
    """Blocks numbered from 0, with a reference count each.

    A block without references is free. A free block that is registered under a digest keeps its content: it can be
    held again until the pool evicts it, least recently used first, because no other free block is left. Other free
    blocks go out last in, first out, so that memory that was never touched stays untouched for as long as possible.
    Each operation takes constant time per block.
    """

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.references = [0] * num_blocks
        # Free blocks without a digest. The end is the top; block 0 is the first to go out.
        self._plain = list(range(num_blocks - 1, -1, -1))
        # Free blocks with a digest, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._digests: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        return len(self._plain) + len(self._cached)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        matched: list[int] = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            matched.append(block)
        return matched

    def count_free(self, blocks: Iterable[int]) -> int:
        return sum(self.references[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self.references[block] == 0:
                del self._cached[block]
            self.references[block] += 1

    def allocate(self, count: int) -> list[int]:
        assert count <= self.free
        blocks = []
        for _ in range(count):
            block = self._plain.pop() if self._plain else self._evict()
            self.references[block] = 1
            blocks.append(block)
        return blocks

    def register(self, block: int, digest: bytes) -> None:
        # Of two blocks with the same content, the first one registered is matched.
        if self.caching and digest not in self._blocks:
            assert self.references[block] > 0 and self._digests[block] is None
            self._blocks[digest] = block
            self._digests[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        # The end of a prefix is of use only with its beginning: it is the first to be evicted.
        for block in reversed(blocks):
            assert self.references[block] > 0, f"block {block} is free already"
            self.references[block] -= 1
            if self.references[block] == 0:
                if self._digests[block] is None:
                    self._plain.append(block)
                else:
                    self._cached[block] = None

    def forget_content(self) -> None:
        self._plain += self._cached
        self._cached.clear()
        self._blocks.clear()
        self._digests = [None] * self.num_blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._digests[block]
        assert digest is not None
        del self._blocks[digest]
        self._digests[block] = None
        return block


class CountedBlocks:
    """Blocks that are only counted, for simulations: they are interchangeable, and all have the number 0.

    There is no prefix cache.
    """

    caching = False

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free = num_blocks

    def match(self, digests: Iterable[bytes]) -> list[int]:
        return []

    def count_free(self, blocks: Iterable[int]) -> int:
        return 0

    def hold(self, blocks: Iterable[int]) -> None:
        assert not list(blocks), "nothing is cached"

    def allocate(self, count: int) -> list[int]:
        assert count <= self.free
        self.free -= count
        return [0] * count

    def register(self, block: int, digest: bytes) -> None:
        """Do nothing: there is no prefix cache."""

    def forget_content(self) -> None:
        """Do nothing: there is no prefix cache."""

    def release(self, blocks: Sequence[int]) -> None:
        self.free += len(blocks)
        assert self.free <= self.num_blocks, "more blocks are free than there are"
