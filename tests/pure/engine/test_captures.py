"""When ranks capture CUDA graphs that their start has left."""

from __future__ import annotations

from weft.engine.executors.ranks import BUSY_SHARE, CapturePace


def test_captures_take_a_small_share_of_the_time_of_a_busy_server() -> None:
    now = 0.0
    pace = CapturePace(lambda: now)
    captures = 0
    while now < 100.0:
        if pace.is_due(idle=False):
            pace.begin()
            now += 0.4  # of the capture
            pace.end()
            captures += 1
        else:
            now += 0.01  # of a step
    assert captures == 25, "one every 4 seconds"
    assert 0.4 * captures <= BUSY_SHARE * now


def test_an_idle_server_captures_at_once() -> None:
    now = 0.0
    pace = CapturePace(lambda: now)
    assert pace.is_due(idle=False), "the first one"
    pace.begin()
    now += 1.0
    pace.end()
    assert not pace.is_due(idle=False)
    assert pace.is_due(idle=True)
