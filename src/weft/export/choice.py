"""Choice: the plan that a target can carry out, and what it could not do of the one that was asked for."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.architectures.kv import number_bytes
from weft.errors import PlanError
from weft.export import engines
from weft.export.header import describe_plan, is_uneven
from weft.export.target import ExportTarget, cut_distance
from weft.planner.objections import not_run
from weft.planner.question import Question, Wish
from weft.planner.ranking import Candidate
from weft.planner.search import Answer, closest, search


class NothingFits(PlanError):
    """There is no plan that the target could carry out."""


class ExportChoice(msgspec.Struct, frozen=True):
    """A plan for a target's engine; `gaps` are sentences, each with what is done instead."""

    question: Question
    candidate: Candidate
    gaps: tuple[str, ...]


def choose_plan(question: Question, target: ExportTarget) -> ExportChoice:
    """The best plan that `target` can carry out; of one that the user has decided and it cannot, the nearest. Raises
    NothingFits."""
    asked, gaps = translate_question(question, target)
    answer = search(asked)
    best = answer.best
    problem = target.unsupported(asked, best.layout) if best else ""
    if best and not problem:
        return ExportChoice(asked, best, (*gaps, *uneven_plan_of_weft(question, target), *not_run_yet(asked, best)))
    wanted = best or search(msgspec.structs.replace(asked, engine="weft")).best
    if wanted is None:
        why = rejection_reason(answer, None)
        raise NothingFits(f"nothing fits, so nothing is written: {why}; weft plan without --emit tells what would help")
    problem = problem or rejection_reason(answer, wanted)
    possible = [it for it in alternatives(answer) if not target.unsupported(it[0], it[1].layout)]
    if not possible:
        raise NothingFits(
            f"{target.title} cannot do {describe_plan(wanted)}: {problem}; no other plan for it fits either"
        )
    if asked.wish == Wish():
        how, (asked, chosen) = "best", possible[0]  # they come in the order of the objective
    else:
        distance = cut_distance(wanted.cut)
        how, (asked, chosen) = "nearest", min(possible, key=lambda it: distance(it[1].cut))
    gap = f"{target.title} cannot do {describe_plan(wanted)}: {problem}; the {how} that it can do is {describe_plan(chosen)}"
    return ExportChoice(asked, chosen, (*gaps, gap, *not_run_yet(asked, chosen)))


def translate_question(question: Question, target: ExportTarget) -> tuple[Question, list[str]]:
    """The question for the target's engine, in precisions that it reads."""
    engine = question.engine if question.engine in target.engines else target.engines[0]
    read = tuple(dict.fromkeys(target.substitutes.get(it, it) for it in question.precisions))
    gaps = [
        f"{target.title} does not run {it}; this is {target.substitutes[it]}"
        for it in question.precisions
        if it in target.substitutes
    ]
    asked = msgspec.structs.replace(question, engine=engine, precisions=read)
    if question.kv_dtype and number_bytes(question.kv_dtype) < 2 and not engines.narrow_cache(asked):
        gaps.append(f"{target.title} keeps no {question.kv_dtype} KV cache here; this is with one in 16 bits")
        asked = msgspec.structs.replace(asked, kv_dtype=None)
    if question.speculation and engine != "weft":
        gaps.append(f"what guessing ahead takes is planned for Weft's engine: this is without it, for {engine}")
        asked = msgspec.structs.replace(asked, speculation=None)
    return asked, gaps


def alternatives(answer: Answer) -> Iterator[tuple[Question, Candidate]]:
    """Every other plan with its question, those within what the user has decided first."""
    asked = answer.question
    yield from ((asked, candidate) for candidate in answer.candidates)
    if asked.wish != Wish():
        free = msgspec.structs.replace(asked, wish=Wish())
        yield from ((free, candidate) for candidate in search(free).candidates)


def rejection_reason(answer: Answer, wanted: Candidate | None) -> str:
    """Why a plan is none for the engine, or why none fits: the one that lacks least memory."""
    of_it = [it for it in answer.rejected if wanted and it.cut == wanted.cut]
    found = closest(of_it or answer.rejected)
    return found.reason if found else "these GPUs make no such layout"


def uneven_plan_of_weft(question: Question, target: ExportTarget) -> list[str]:
    """What Weft itself would do with these GPUs, where that is a cut which the target's engine does not have."""
    if "weft" in target.engines or len(question.cluster.gpus) == 1:
        return []
    ours = search(msgspec.structs.replace(question, engine="weft")).best
    if ours is None or not is_uneven(ours.layout):
        return []
    return [f"Weft itself would run {describe_plan(ours)}, a cut that {target.title} does not have"]


def not_run_yet(asked: Question, chosen: Candidate) -> list[str]:
    """What Weft's own engine lacks for its plan."""
    if asked.engine != "weft":
        return []
    lacks = not_run(asked.shape, chosen.layout.precision)
    return [f"Weft plans this but does not run it yet: {lack}" for lack in lacks]
