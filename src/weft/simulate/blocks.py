"""CountedBlocks: a pool of KV blocks that only counts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.core.blocks import BlockPool


class CountedBlocks(BlockPool):
    """A block pool without a prefix cache. Blocks are interchangeable, so all have the number 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(0, block_size, caching=False)
        self.num_blocks = num_blocks
        self._left = num_blocks

    @property
    def free(self) -> int:
        return self._left

    def match(self, digests: Iterable[bytes]) -> list[int]:
        return []

    def allocate(self, count: int) -> list[int]:
        assert count <= self._left
        self._left -= count
        return [0] * count

    def release(self, blocks: Sequence[int]) -> None:
        self._left += len(blocks)
