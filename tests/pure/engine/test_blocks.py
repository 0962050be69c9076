"""NumberedBlocks: references, prefixes, and which block goes out next."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.engine.core.blocks import NumberedBlocks, block_digest


def chain(*blocks: list[int]) -> list[bytes]:
    digests: list[bytes] = []
    for block in blocks:
        digests.append(block_digest(digests[-1] if digests else b"", block))
    return digests


def test_a_digest_stands_for_a_block_and_all_before_it() -> None:
    a, b = [1, 2], [3, 4]
    assert chain(a, b) == chain(a, b)
    assert chain(a, b)[1] != chain(b, b)[1] != chain(b)[0]
    # Ids are not run together: 1, 256 is not 1 + 256 * k.
    assert block_digest(b"", [1, 256]) != block_digest(b"", [256, 1]) != block_digest(b"", [257, 0])
    assert len(chain(a)[0]) == 32


def test_free_blocks_go_out_last_in_first_out_and_untouched_ones_last() -> None:
    pool = NumberedBlocks(6, caching=True)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first == [0, 1] and second == [2, 3]
    pool.release(first)
    assert pool.allocate(1) == [0]
    pool.release(second)
    assert pool.allocate(4) == [2, 3, 1, 4]
    assert pool.free == 1


def test_a_registered_block_outlives_its_request() -> None:
    pool = NumberedBlocks(4, caching=True)
    digests = chain([1, 2], [3, 4])
    blocks = pool.allocate(2)
    for block, digest in zip(blocks, digests, strict=True):
        pool.register(0, block, digest)
    pool.release(blocks)
    assert pool.free == 4
    assert pool.match(0, digests) == blocks
    # A chain is found from its beginning only.
    assert pool.match(0, chain([1, 2], [9, 9])) == blocks[:1]
    assert pool.match(0, chain([9, 9], [3, 4])) == []
    pool.hold(blocks)
    assert pool.free == 2 and pool.references[:2] == [1, 1]


def test_the_least_recently_used_is_evicted_ends_before_beginnings() -> None:
    pool = NumberedBlocks(4, caching=True)
    old, new = chain([1], [2]), chain([3], [4])
    tables = []
    for digests in (old, new):
        table = pool.allocate(2)
        for block, digest in zip(table, digests, strict=True):
            pool.register(0, block, digest)
        tables.append(table)
    pool.release(tables[0])
    pool.release(tables[1])
    pool.hold(tables[0])
    pool.release(tables[0])
    # `old` was used last: `new` goes first, its end first.
    assert pool.allocate(1) == [tables[1][1]]
    assert pool.match(0, new) == [tables[1][0]]
    assert pool.allocate(1) == [tables[1][0]]
    assert pool.match(0, new) == [] and pool.match(0, old) == tables[0]
    assert pool.allocate(1) == [tables[0][1]]


def test_blocks_that_hold_nothing_go_before_those_that_do() -> None:
    pool = NumberedBlocks(3, caching=True)
    (a,), (b,) = pool.allocate(1), pool.allocate(1)
    pool.register(0, a, chain([1])[0])
    pool.release([a])
    pool.release([b])
    assert pool.allocate(2) == [b, 2]
    assert pool.match(0, chain([1])) == [a]


def test_the_first_of_two_equal_blocks_is_the_one_that_is_found() -> None:
    pool = NumberedBlocks(2, caching=True)
    (a,), (b,) = pool.allocate(1), pool.allocate(1)
    for block in (a, b):
        pool.register(0, block, chain([1])[0])
    pool.release([a])
    pool.release([b])
    assert pool.match(0, chain([1])) == [a]
    assert pool.allocate(1) == [b]


def test_without_caching_nothing_is_found() -> None:
    pool = NumberedBlocks(2, caching=False)
    blocks = pool.allocate(1)
    pool.register(0, blocks[0], chain([1])[0])
    assert pool.match(0, chain([1])) == []


def test_freeing_twice_is_a_bug_that_shows() -> None:
    pool = NumberedBlocks(2, caching=True)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="free already"):
        pool.release(blocks)


class PoolMachine(RuleBasedStateMachine):
    """Tables that allocate, share, register and leave, against what a pool must never get wrong."""

    SIZE = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = NumberedBlocks(self.SIZE, caching=True)
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def take(self, tokens: list[int]) -> None:
        digests = chain(*([token] for token in tokens))
        found = self.pool.match(0, digests)
        # What is found holds what was asked for.
        assert [self.contents[block] for block in found] == digests[: len(found)]
        self.pool.hold(found)
        missing = len(tokens) - len(found)
        if missing > self.pool.free:
            self.pool.release(found)
            return
        fresh = self.pool.allocate(missing)
        for block, digest in zip(fresh, digests[len(found) :], strict=True):
            self.contents[block] = digest
            self.pool.register(0, block, digest)
        self.tables.append(found + fresh)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        if self.pool.free:
            (block,) = self.pool.allocate(1)
            self.contents.pop(block, None)
            table.append(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def counted(self) -> None:
        held = Counter(block for table in self.tables for block in table)
        assert self.pool.references == [held[block] for block in range(self.SIZE)]
        assert self.pool.free == self.SIZE - len(held)

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        assert self.pool.free == self.SIZE
        assert sorted(self.pool.allocate(self.SIZE)) == list(range(self.SIZE))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=30)
