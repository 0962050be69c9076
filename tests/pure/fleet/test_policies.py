"""Routing policies and the map of prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from weft.cli.flags.simulate_flags import USUAL_POLICY, policy
from weft.fleet.upstreams.policy import (
    OLD_NAMES,
    PIECE_TOKENS,
    POLICIES,
    Fingerprint,
    LeastConnections,
    Prefix,
    PrefixMap,
    ReplicaViews,
    RoundRobin,
    SessionAffinity,
)

ANY = Fingerprint()
NAMES = ("a", "b", "c")


def idle(weights: Sequence[float] = (), names: Sequence[str] = NAMES) -> ReplicaViews:
    return ReplicaViews([0] * len(names), weights, names)


def busy(*connections: int) -> ReplicaViews:
    return ReplicaViews(connections)


def prompt(*contents: int) -> Fingerprint:
    """A prompt of a piece for each content."""
    digests = tuple(hash(contents[: end + 1]) for end in range(len(contents)))
    return Fingerprint(digests, len(contents) * PIECE_TOKENS)


def test_least_connections_take_the_least_busy_and_equal_ones_in_turn() -> None:
    least = LeastConnections()
    assert [least.choose_replica(ANY, busy(0, 0, 0)) for _ in range(4)] == [0, 1, 2, 0]
    assert least.choose_replica(ANY, busy(2, 1, 5)) == 1
    assert least.choose_replica(ANY, busy(1, 1, 1)) == 2
    assert least.choose_replica(ANY, busy(3)) == 0


def test_least_connections_count_per_weight() -> None:
    least, connections = LeastConnections(), [0, 0, 0]
    for _ in range(60):
        connections[least.choose_replica(ANY, ReplicaViews(connections, (3.0, 2.0, 1.0)))] += 1
    assert connections == [30, 20, 10]


def test_round_robin_ignores_load() -> None:
    turns = RoundRobin()
    assert [turns.choose_replica(ANY, busy(9, 0, 0)) for _ in range(4)] == [0, 1, 2, 0]


def test_round_robin_spreads_weighted_turns_evenly() -> None:
    turns = RoundRobin()
    chosen = [turns.choose_replica(ANY, idle((3.0, 1.0, 1.0))) for _ in range(10)]
    assert Counter(chosen) == {0: 6, 1: 2, 2: 2}
    assert chosen[:5] == [0, 1, 0, 2, 0]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_deterministic_and_stays_in_range(name: str) -> None:
    one, other = POLICIES[name](), POLICIES[name]()
    for number in range(200):
        count = 1 + number % 3
        asked = prompt(number % 5, number)._replace(session=str(number % 7))
        views = ReplicaViews([number % (at + 2) for at in range(count)], (2.0, 1.0, 0.5)[:count], NAMES[:count])
        chosen = one.choose_replica(asked, views)
        assert 0 <= chosen < count and other.choose_replica(asked, views) == chosen


@pytest.mark.parametrize("name", ["random", "power_of_two", "session", "prefix"])
def test_weights_are_shares(name: str) -> None:
    chooser, connections = POLICIES[name](), [0, 0, 0]
    for number in range(3000):
        asked = Fingerprint(session=str(number))
        connections[chooser.choose_replica(asked, ReplicaViews(connections, (1.0, 2.0, 3.0), NAMES))] += 1
    assert [count / 500 for count in connections] == pytest.approx([1, 2, 3], rel=0.15)


def test_power_of_two_avoids_the_busiest() -> None:
    two = POLICIES["power_of_two"]()
    chosen = Counter(two.choose_replica(ANY, busy(9, 0, 0)) for _ in range(900))
    assert chosen[0] < 200  # only if it is drawn twice


def test_a_session_stays_unless_its_replica_goes() -> None:
    by_session = SessionAffinity()
    sessions = [Fingerprint(session=f"s{number}") for number in range(300)]
    before = [NAMES[by_session.choose_replica(each, idle())] for each in sessions]
    without_b = ("a", "c")
    after = [without_b[by_session.choose_replica(each, idle(names=without_b))] for each in sessions]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "b")
    assert set(after) == {"a", "c"} and 60 < before.count("b") < 140


def test_requests_without_a_session_go_to_the_least_busy() -> None:
    assert SessionAffinity().choose_replica(ANY, busy(2, 0, 1)) == 1


def test_a_prefix_goes_where_it_is_known_until_that_replica_is_too_busy() -> None:
    by_prefix = Prefix()
    first = by_prefix.choose_replica(prompt(1, 2, 3, 4), idle())
    assert by_prefix.choose_replica(prompt(1, 2, 3, 5), idle()) == first
    load = [0, 0, 0]
    load[first] = 2  # a quarter of the work, three times the load
    assert by_prefix.choose_replica(prompt(1, 2, 3, 6), ReplicaViews(load, names=NAMES)) == first
    load[first] = 4
    assert by_prefix.choose_replica(prompt(1, 2, 3, 7), ReplicaViews(load, names=NAMES)) != first
    assert by_prefix.choose_replica(prompt(8, 9), ReplicaViews(load, names=NAMES)) != first


def test_prefixes_are_remembered_by_name_not_by_index() -> None:
    by_prefix = Prefix()
    name = NAMES[by_prefix.choose_replica(prompt(1, 2, 3), idle())]
    turned = NAMES[::-1]
    assert turned[by_prefix.choose_replica(prompt(1, 2, 3), idle(names=turned))] == name


def test_the_map_counts_leading_pieces_per_replica() -> None:
    known = PrefixMap()
    known.insert((1, 2, 3), "a")
    known.insert((1, 2, 4, 5), "b")
    assert known.match((1, 2, 3, 9), ("a", "b", "c")) == [3, 2, 0]
    assert known.match((7, 2, 3), ("a", "b")) == [0, 0]
    assert known.match((), ("a",)) == [0]


def test_the_map_is_bounded_and_forgets_the_oldest_and_the_longest_first() -> None:
    known = PrefixMap(capacity=6)
    known.insert((1, 2, 3), "a")
    known.insert((11, 12, 13), "b")
    known.insert((1, 2), "a")
    known.insert((21, 22), "c")
    assert len(known) == 6
    assert known.match((1, 2, 3), ("a",)) == [2]
    assert known.match((11, 12, 13), ("b",)) == [2]
    known.insert(range(100, 200), "a")
    assert len(known) == 6 and known.match(range(100, 200), ("a",)) == [6]


def test_old_names_are_understood() -> None:
    assert {policy(old) for old in OLD_NAMES} <= set(POLICIES) and next(iter(POLICIES)) == USUAL_POLICY
    assert policy("prefix") == "prefix"
