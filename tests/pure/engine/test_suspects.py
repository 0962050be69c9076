"""Suspects: which requests are refused after deaths of engines."""

from __future__ import annotations

from weft.engine.replicas.suspects import ALONE_S, LOST, LOST_IN_COMPANY, REFUSED_S, REMEMBERED, Suspects


def die(suspects: Suspects, digest: bytes, engine: str, now: float) -> bool:
    """One request that an engine dies with, one second after it came."""
    return suspects.note_death(suspects.begin(digest, engine, now), now + 1)


def test_a_request_is_refused_after_two_deaths_and_only_for_a_while() -> None:
    suspects = Suspects()
    assert LOST == 2 and not suspects
    assert not die(suspects, b"a", "1", 0)
    assert suspects and suspects.refused_s(b"a", 1) == 0
    assert die(suspects, b"a", "2", 10)
    assert suspects.refused_s(b"a", 11) == REFUSED_S and suspects.refused_s(b"b", 11) == 0
    assert suspects.refused_s(b"a", 11 + REFUSED_S) == 0 and not suspects


def test_an_answer_between_two_deaths_forgives() -> None:
    suspects = Suspects()
    die(suspects, b"a", "1", 0)
    suspects.note_answer(b"a")
    assert not suspects
    assert not die(suspects, b"a", "2", 10)
    assert suspects.refused_s(b"a", 11) == 0


def test_one_death_counts_once_for_several_requests_of_a_digest() -> None:
    suspects = Suspects()
    trials = [suspects.begin(b"a", "1", now) for now in (0.0, 1.0, 2.0)]
    assert [suspects.note_death(trial, 3 + n / 10) for n, trial in enumerate(trials)] == [False] * 3
    assert die(suspects, b"a", "2", 5)  # the second


def test_suspects_of_one_engine_are_asked_one_after_the_other_and_only_the_killer_is_refused() -> None:
    suspects = Suspects()
    trials = [suspects.begin(digest, "1", 0) for digest in (b"a", b"killer", b"b")]
    for trial in trials:
        assert not suspects.note_death(trial, 1)
    first = suspects.begin(b"a", "2", 1)
    assert not suspects.may_begin(b"killer", "2", 1) and suspects.may_begin(b"killer", "3", 1)
    assert suspects.may_begin(b"new", "2", 1)  # one that nobody suspects
    bystander = suspects.begin(b"new", "2", 1)
    suspects.end(first)
    suspects.note_answer(b"a")
    assert suspects.may_begin(b"killer", "2", 2)
    killer = suspects.begin(b"killer", "2", 2)
    assert not suspects.may_begin(b"b", "2", 2)
    assert suspects.note_death(killer, 3)
    assert not suspects.note_death(bystander, 3)
    assert [suspects.refused_s(digest, 3) > 0 for digest in (b"a", b"killer", b"b", b"new")] == [
        False,
        True,
        False,
        False,
    ]


def test_a_death_in_the_company_of_other_suspects_refuses_nobody() -> None:
    suspects = Suspects()
    for digest in (b"a", b"b"):
        die(suspects, digest, "1", 0)
    first = suspects.begin(b"a", "2", 2)
    assert not suspects.may_begin(b"b", "2", 2 + ALONE_S / 2)
    assert suspects.may_begin(b"b", "2", 2 + ALONE_S)
    second = suspects.begin(b"b", "2", 2 + ALONE_S)
    assert not suspects.note_death(first, 15) and not suspects.note_death(second, 15)
    assert die(suspects, b"a", "3", 20)  # alone at last


def test_after_many_deaths_in_company_all_are_refused() -> None:
    suspects = Suspects()
    for engine in range(LOST_IN_COMPANY):
        now = float(100 * engine)
        trials = [suspects.begin(digest, engine, now) for digest in (b"a", b"b")]
        refused = [suspects.note_death(trial, now + 1) for trial in trials]
        assert refused == [engine == LOST_IN_COMPANY - 1] * 2


def test_the_same_request_is_not_asked_at_two_engines_at_once() -> None:
    suspects = Suspects()
    die(suspects, b"a", "1", 0)
    trial = suspects.begin(b"a", "2", 2)
    assert not suspects.may_begin(b"a", "3", 2)
    suspects.end(trial)
    suspects.end(trial)
    assert suspects.may_begin(b"a", "3", 2)


def test_the_memory_of_digests_is_bounded() -> None:
    suspects = Suspects()
    for number in range(REMEMBERED + 10):
        die(suspects, b"%d" % number, "1", 0)
    assert len(suspects._deaths) == REMEMBERED
    assert not suspects.note_death(suspects.begin(b"0", "2", 5), 6)  # its first death is forgotten
