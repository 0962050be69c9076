"""KV layout: groups of layers, and the bytes and blocks of a text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.scheduling import layout
from weft.checkpoint.architectures.kv import (
    KVGroup,
    KVLayout,
    KVSpec,
    kv_bytes_per_token,
    kv_groups,
    kv_layout,
    kv_specs,
)
from weft.checkpoint.names.catalogue import find
from weft.plan.places import cut_places

WINDOWS = st.sampled_from([None, 1, 2, 3, 8, 17])


def heads(window: int | None = None, size: int = 4) -> KVSpec:
    return KVSpec(kind="heads", bytes_per_token=size, window=window)


def sizes(groups: Sequence[KVGroup]) -> list[tuple[int | None, int]]:
    return [(group.spec.window, len(group.layers)) for group in groups]


def test_layers_that_remember_alike_are_one_group() -> None:
    assert sizes(kv_groups([heads()] * 5)) == [(None, 5)]
    assert sizes(kv_groups([heads(9)] * 5)) == [(9, 5)]
    assert sizes(kv_groups([heads(4), heads()] * 12)) == [(4, 12), (None, 12)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gemma-3-27b-it", [(1024, 9)] * 4 + [(1024, 8)] * 2 + [(None, 10)]),
        ("gpt-oss-20b", [(128, 12), (None, 12)]),
        ("Mistral-7B-v0.1", [(4096, 32)]),
    ],
)
def test_groups_of_known_models(model: str, expected: list[tuple[int | None, int]]) -> None:
    assert sizes(kv_groups([*kv_specs(find(model).shape).values()])) == expected


def test_few_layers_of_a_kind_do_not_make_many_tables() -> None:
    groups = kv_groups([heads()] * 30 + [heads(7)] * 2)
    assert len(groups) <= 8 and sum(len(group.layers) for group in groups) == 32


@given(st.lists(st.sampled_from([heads(), heads(5), heads(9), KVSpec(kind="state", bytes_per_sequence=7)]), min_size=1))
def test_every_layer_is_in_one_group_of_its_kind(specs: list[KVSpec]) -> None:
    groups = kv_groups([heads(), *specs])
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(specs) + 1))
    for group in groups:
        assert {[heads(), *specs][layer] for layer in group.layers} == {group.spec}
    keep = KVLayout(groups=groups, block_size=4, chunk=8)
    assert all(layer in groups[keep.group_of(layer)].layers for layer in range(len(specs) + 1))


def alive(window: int | None, starts: Sequence[int], block: int) -> int:
    """The most blocks that rows from one of these positions to the next read or write at once."""
    most = 0
    for start, end in pairwise(starts):
        first = 0 if window is None else max(0, start - window + 1)
        most = max(most, (end - 1) // block - first // block + 1)
    return most


@given(
    windows=st.lists(WINDOWS, min_size=1, max_size=4),
    block=st.integers(1, 5),
    chunk=st.integers(1, 20),
    tokens=st.integers(1, 90),
    data=st.data(),
)
def test_a_text_never_holds_more_blocks_than_it_is_counted_with(
    windows: list[int | None], block: int, chunk: int, tokens: int, data: st.DataObject
) -> None:
    keep = layout(windows, block_size=block, chunk=chunk)
    starts = [0]
    while starts[-1] < tokens:
        starts.append(min(tokens, starts[-1] + data.draw(st.integers(1, chunk))))
    for group in keep.groups:
        assert alive(group.spec.window, starts, block) <= keep.group_blocks(group, tokens)
        once = alive(group.spec.window, list(range(tokens + 1)), block)
        assert once <= keep.group_blocks(group, tokens, chunk=1) <= keep.group_blocks(group, tokens)
    assert keep.blocks(tokens) == sum(keep.group_blocks(group, tokens) for group in keep.groups)


@given(windows=st.lists(WINDOWS, min_size=1, max_size=3), num_blocks=st.integers(0, 200), most=st.integers(1, 300))
def test_the_longest_text_fits_and_one_block_more_does_not(
    windows: list[int | None], num_blocks: int, most: int
) -> None:
    keep = layout(windows, block_size=4, chunk=8)
    longest = keep.longest(num_blocks, most)
    assert longest <= most and (longest == 0 or keep.blocks(longest) <= num_blocks)
    assert longest == most or keep.blocks(longest + 1) > num_blocks


def test_windows_leave_room_for_longer_texts_and_for_more_of_them() -> None:
    """Gemma 3 27B, in the memory of 32,768 tokens: the layers with windows hold 1,024 tokens of each text."""
    shape = find("gemma-3-27b-it").shape
    keep, whole = (kv_layout(shape, block_size=16, chunk=512, window_cache=frees) for frees in (True, False))
    (place,) = cut_places(shape, [1.0], [len(shape.layers)])
    blocks = (
        2048 * whole.block_bytes(kv_specs(shape, "bf16", place)) // keep.block_bytes(kv_specs(shape, "bf16", place))
    )
    assert whole.longest(2048, 131_072) == 32_768 and keep.longest(blocks, 131_072) == 131_072
    assert whole.requests(2048, 32_768) == 1 and keep.requests(blocks, 32_768) > 4
    # A short text takes no more than a tenth more: a block has room for ten layers, and 52 layers have windows.
    assert keep.requests(blocks, 512) > 0.88 * whole.requests(2048, 512)
    assert whole.tokens(2048, 100) == 32_768 and keep.tokens(blocks, 32_768) > 4 * 32_768


def test_one_group_is_counted_as_it_always_was() -> None:
    shape = find("Llama-3.1-8B").shape
    keep = kv_layout(shape, block_size=16, chunk=2048)
    assert keep.blocks(100) == 7 and keep.longest(10, 1000) == 160 and keep.requests(21, 100) == 3
    for place in cut_places(shape, [2.0, 1.0, 1.0], [20, 12]):
        assert keep.block_bytes(kv_specs(shape, "bf16", place)) == 16 * kv_bytes_per_token(shape, "bf16", place)


@pytest.mark.parametrize("stages", [[62], [31, 31], [20, 30, 12], [1, 60, 1]])
def test_a_block_has_room_for_the_largest_group_of_a_stage(stages: list[int]) -> None:
    shape = find("gemma-3-27b-it").shape
    keep, each = kv_layout(shape, block_size=16, chunk=512), 2 * 16 * 128 * 2
    for place in cut_places(shape, [1.0], stages):
        layers = set(range(place.layers.start, place.layers.stop))
        largest = max(len(layers & {*group.layers}) for group in keep.groups)
        assert keep.block_bytes(kv_specs(shape, "bf16", place)) == 16 * largest * each
        # Dealt out in turn, no group has many more layers of a stage than its share.
        assert largest <= -(-len(layers) // len(keep.groups)) + 1


def test_layers_of_other_sizes_share_no_memory() -> None:
    groups = (KVGroup(heads(4), (0, 1)), KVGroup(heads(), (2, 3, 4)))
    keep = KVLayout(groups=groups, block_size=16, chunk=8)
    assert keep.block_bytes(dict(enumerate([heads(4), heads(4), *[heads()] * 3]))) == 16 * 3 * 4
    assert keep.block_bytes(dict(enumerate([heads(4), heads(4), *[heads(size=10)] * 3]))) == 16 * (2 * 4 + 3 * 10)
    # A rank that has only some of the layers.
    assert keep.block_bytes({1: heads(4), 2: heads(size=10)}) == 16 * (4 + 10)


def test_a_state_has_bytes_of_its_own_and_takes_no_blocks() -> None:
    state = KVSpec(kind="state", bytes_per_sequence=1000)
    assert state.text_bytes(1) == state.text_bytes(10**6) == 1000
    assert heads(5).text_bytes(3) == 12 and heads(5).text_bytes(30) == 20 and heads().text_bytes(30) == 120
    keep = layout((None,), states=2)
    assert keep.blocks(40) == 10 and len(keep.paged) == 1 and not keep.has_windows
