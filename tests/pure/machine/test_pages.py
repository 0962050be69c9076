"""Memory of packed weights and caches."""

import gc
import re
import weakref
from pathlib import Path

import pytest

from weft.machine.native.pages import ALIGNMENT, HUGE, SHARED, PagePool, map_pages


def test_pieces_lie_side_by_side_and_never_overlap():
    pool = PagePool()
    taken = [pool.take(size) for size in (1, ALIGNMENT, 100, 3)]
    assert len({id(mapping) for mapping, _ in taken}) == 1
    assert [offset for _, offset in taken] == [0, ALIGNMENT, 2 * ALIGNMENT, 4 * ALIGNMENT]


def test_a_piece_that_does_not_fit_gets_a_mapping_of_its_own():
    pool = PagePool()
    first, _ = pool.take(SHARED - 10)
    second, offset = pool.take(11 + ALIGNMENT)
    assert second is not first and offset == 0
    large, offset = pool.take(SHARED + 1)
    assert (len(large), offset) == (SHARED + 1, 0)


def test_a_mapping_is_freed_with_the_last_buffer_that_uses_it():
    pool = PagePool()
    mapping, _ = pool.take(10)
    gone, view = weakref.ref(mapping), memoryview(mapping)
    del mapping
    gc.collect()
    assert gone() is not None and pool.take(10)[1] == ALIGNMENT
    del view
    gc.collect()
    assert gone() is None
    assert pool.take(10)[1] == 0


@pytest.mark.skipif(
    not (switch := Path("/sys/kernel/mm/transparent_hugepage/enabled")).exists() or "[never]" in switch.read_text(),
    reason="the system has no huge pages",
)
def test_large_mappings_ask_for_huge_pages_and_small_ones_do_not():
    before = advised_bytes()
    large = map_pages(HUGE)
    assert advised_bytes() == before + HUGE
    small = map_pages(HUGE - 1)
    assert advised_bytes() == before + HUGE
    assert small[:1] == large[:1] == b"\0"


def advised_bytes() -> int:
    """Bytes of this process's mappings that were advised to have huge pages: those with the flag "hg"."""
    size = advised = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            size = int(match[2], 16) - int(match[1], 16)
        elif line.startswith("VmFlags:") and "hg" in line.split():
            advised += size
    return advised
