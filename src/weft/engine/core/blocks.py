"""BlockPool: allocation of KV blocks, and the prefix cache that reuses them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Protocol


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """SHA-256 digest (32 bytes) of a full block's tokens and of all tokens before them.

    `parent` is the digest of the block before; for the first block, it is the digest of the request's identity.
    SHA-256, so that no two prompts can be made to share a block by mistake.
    """
    return sha256(parent + array("q", tokens).tobytes()).digest()


class BlockPool(Protocol):
    """A number of KV blocks; full blocks of a KV group can be found by their digest."""

    @property
    def free(self) -> int:
        """Number of blocks that can be allocated."""
        ...

    def match(self, group: int, digests: Iterable[bytes]) -> list[int]:
        """Return the cached blocks of the longest known prefix of a chain of digests. Takes no references."""
        ...

    def find(self, group: int, digest: bytes) -> int | None:
        """Return the cached block with a digest, or None. Takes no reference."""
        ...

    def count_free(self, blocks: Iterable[int]) -> int:
        """Number of these blocks that are free."""
        ...

    def count_shared(self, blocks: Iterable[int]) -> int:
        """Number of these blocks that have more than one reference."""
        ...

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these matched blocks, free or not."""
        ...

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each; `count` is at most `free`."""
        ...

    def register(self, group: int, block: int, digest: bytes) -> None:
        """Let later prompts match a block of a group that is in use, and full before any later step reads it."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block of a request's table, given in the table's order."""
        ...

    def forget(self, group: int, digests: Iterable[bytes]) -> None:
        """Forget these digests, so that no later prompt matches their blocks; blocks in use stay in use."""
        ...

    def forget_content(self) -> None:
        """Forget the digests of all blocks, so that no later prompt matches them; blocks in use stay in use."""
        ...


class NumberedBlocks:
    """Blocks numbered from 0, with a reference count each. Without `caching` no block is found.

    A block without references is free. A free block that is registered under a digest keeps its content: it can be
    reused until the pool evicts it, least recently used first, because no other free block is left. Other free blocks
    are allocated last in, first out, so that memory that was never touched stays untouched as long as possible. Each
    operation takes constant time per block.
    """

    def __init__(self, num_blocks: int, *, caching: bool) -> None:
        self._caching = caching
        self.references = [0] * num_blocks
        # Free blocks without a digest. The end is the top; block 0 is allocated first.
        self._plain = list(range(num_blocks - 1, -1, -1))
        # Free blocks with a digest, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        # By block, its group and digest; and by group and digest, the block.
        self._keys: list[tuple[int, bytes] | None] = [None] * num_blocks
        self._blocks: dict[tuple[int, bytes], int] = {}

    @property
    def free(self) -> int:
        return len(self._plain) + len(self._cached)

    def match(self, group: int, digests: Iterable[bytes]) -> list[int]:
        matched: list[int] = []
        for digest in digests:
            block = self._blocks.get((group, digest))
            if block is None:
                break
            matched.append(block)
        return matched

    def find(self, group: int, digest: bytes) -> int | None:
        return self._blocks.get((group, digest))

    def count_free(self, blocks: Iterable[int]) -> int:
        return sum(self.references[block] == 0 for block in blocks)

    def count_shared(self, blocks: Iterable[int]) -> int:
        return sum(self.references[block] > 1 for block in blocks) if self._caching else 0

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

    def register(self, group: int, block: int, digest: bytes) -> None:
        # If two blocks have the same content, the first one registered is matched.
        key = group, digest
        if self._caching and key not in self._blocks:
            assert self.references[block] > 0 and self._keys[block] is None
            self._blocks[key] = block
            self._keys[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        # The end of a prefix is useful only with its beginning, so it is evicted first.
        for block in reversed(blocks):
            assert self.references[block] > 0, f"block {block} is free already"
            self.references[block] -= 1
            if self.references[block] == 0:
                if self._keys[block] is None:
                    self._plain.append(block)
                else:
                    self._cached[block] = None

    def forget(self, group: int, digests: Iterable[bytes]) -> None:
        for digest in digests:
            block = self._blocks.pop((group, digest), None)
            if block is None:
                continue
            self._keys[block] = None
            if self.references[block] == 0:
                del self._cached[block]
                self._plain.append(block)

    def forget_content(self) -> None:
        self._plain += self._cached
        self._cached.clear()
        self._blocks.clear()
        self._keys = [None] * len(self._keys)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._blocks[key]
        self._keys[block] = None
        return block


class CountedBlocks:
    """Blocks that are only counted, for simulations: they are interchangeable and have the number 0.

    There is no prefix cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.free = num_blocks

    def match(self, group: int, digests: Iterable[bytes]) -> list[int]:
        return []

    def find(self, group: int, digest: bytes) -> int | None:
        return None

    def count_free(self, blocks: Iterable[int]) -> int:
        return 0

    def count_shared(self, blocks: Iterable[int]) -> int:
        return 0

    def hold(self, blocks: Iterable[int]) -> None:
        assert not list(blocks), "nothing is cached"

    def allocate(self, count: int) -> list[int]:
        assert count <= self.free
        self.free -= count
        return [0] * count

    def register(self, group: int, block: int, digest: bytes) -> None:
        """Do nothing: there is no prefix cache."""

    def forget(self, group: int, digests: Iterable[bytes]) -> None:
        """Do nothing: there is no prefix cache."""

    def forget_content(self) -> None:
        """Do nothing: there is no prefix cache."""

    def release(self, blocks: Sequence[int]) -> None:
        self.free += len(blocks)
        assert self.free <= self._num_blocks, "more blocks are free than there are"
