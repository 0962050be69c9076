"""KVManager: which prefix all groups can serve, what is freed behind a window, and what is kept for growth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.pure.scheduling import LIMITS, Engine, layout, request
from weft.engine.core.kv import KVManager
from weft.engine.core.sequence import Sequence
from weft.engine.core.waiting import Owner

WINDOWS = st.lists(st.sampled_from([None, 1, 2, 5, 9, 16]), min_size=1, max_size=3)


def sequence(prompt: list[int]) -> Sequence:
    made = Sequence(request("a", prompt), Owner(), (0, 0), 1000)
    made.unpack_prompt()
    return made


@given(windows=WINDOWS, states=st.integers(0, 1), size=st.integers(1, 4), length=st.integers(1, 40), data=st.data())
def test_a_prefix_is_the_longest_that_every_group_serves(
    windows: list[int | None], states: int, size: int, length: int, data: st.DataObject
) -> None:
    kv = KVManager(layout(windows, block_size=size, states=states), 200, max_num_seqs=50, caching=True)
    text = sequence(list(range(length)))
    blocks = (length - 1) // size
    digests = text.digests(blocks, size)
    cached: list[dict[int, int]] = []
    for group in kv.groups:
        kept = data.draw(st.sets(st.integers(0, blocks - 1))) if blocks else set()
        cached.append({index: group.pool.allocate(1)[0] for index in kept})
        for index, block in cached[-1].items():
            group.pool.register(group.number, block, digests[index])

    def needed(number: int, count: int) -> range:
        """Blocks of a group that the token after `count` blocks reads."""
        if number >= len(windows):
            return range(count - 1, count)
        window = windows[number]
        return range(0 if window is None else max(0, count * size - window + 1) // size, count)

    served = [
        count
        for count in range(1, blocks + 1)
        if all(index in cached[group.number] for group in kv.groups for index in needed(group.number, count))
    ]
    prefix = kv.match_prefix(text)
    longest = max(served, default=0)
    assert [len(table) for table in prefix] == [longest] * len(kv.groups)
    for group in kv.groups if longest else ():
        for index in needed(group.number, longest):
            assert prefix[group.number][index] == cached[group.number][index]


def test_a_window_frees_what_no_later_token_reads() -> None:
    engine = Engine(LIMITS | {"windows": (6, None), "max_num_batched_tokens": 8, "prefix_caching": False})
    engine.scheduler.add(request("a", list(range(20)), max_tokens=30))
    held = []
    while engine.scheduler.table.unfinished:
        engine.schedule()
        (running,) = engine.scheduler.table.running.values()
        held.append([len(table) - freed for table, freed in zip(running.blocks, running.freed, strict=True)])
        engine.apply()
    # A window of 6 lies in 2 or 3 blocks of 4; a chunk of 8 fills 2 more.
    assert max(window for window, _ in held) == 4 and {window for window, _ in held[4:]} == {2, 3}
    assert held[-1][1] == 49 // 4 + 1


def test_growth_is_reserved_where_a_sequence_still_grows() -> None:
    """One that is longer than its window takes as many blocks as it frees."""
    engine = Engine(LIMITS | {"windows": (8, None), "num_blocks": 64})
    kv = engine.scheduler.kv
    kv.growth = 8
    engine.scheduler.add(request("short", [1, 2], max_tokens=2))
    engine.schedule()
    assert kv.reserved == 2 + 2
    engine.scheduler.add(request("long", [3] * 30, max_tokens=2))
    engine.apply()
    engine.schedule()
    assert kv.reserved == 2 + 2 + 2
    engine.run()
    assert kv.reserved == kv.promised == kv.used == 0


def test_blocks_freed_behind_a_window_can_be_found_again() -> None:
    engine = Engine(LIMITS | {"windows": (5,), "max_num_batched_tokens": 8})
    engine.run(request("a", list(range(30)), max_tokens=1))
    # The end of the prompt, and a text that leaves it in the middle: the blocks before both are cached still.
    engine.run(request("b", list(range(30)), max_tokens=1))
    engine.run(request("c", [*range(17), 50, 51, 52], max_tokens=1))
    assert [engine.outputs[id][0].cached_tokens for id in "bc"] == [28, 16]
    engine.scheduler.reset_prefix_cache()
    engine.run(request("d", list(range(30)), max_tokens=1))
    assert engine.outputs["d"][0].cached_tokens == 0


def test_a_state_is_restored_from_the_snapshot_at_the_end_of_a_block() -> None:
    """Prompts are read to the end of a block first: 12 of 14 tokens, and then the others."""
    engine = Engine(LIMITS | {"windows": (None,), "states": 1})
    engine.scheduler.add(request("a", list(range(14)), max_tokens=1))
    plan = engine.schedule()
    assert plan and plan.counts == [12] and plan.samples == [False]
    engine.run()
    engine.run(request("b", [*range(12), 50, 51], max_tokens=6))
    assert engine.outputs["b"][0].cached_tokens == 12
    # Its answer goes on for a block: the state there is a snapshot too.
    text = [*range(12), 50, 51, *engine.tokens("b")]
    engine.run(request("c", text, max_tokens=1))
    assert engine.outputs["c"][0].cached_tokens == 16
    # Without a cache nothing is aligned.
    plain = Engine(LIMITS | {"states": 1, "prefix_caching": False})
    plain.scheduler.add(request("a", list(range(14)), max_tokens=1))
    assert (plan := plain.schedule()) and plan.counts == [14]
