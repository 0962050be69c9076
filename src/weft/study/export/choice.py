"""Choice of a plan that a target can run, with its deviations from the plan that the user asked for."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.checkpoint.architectures.kv import number_bytes
from weft.errors import PlanError
from weft.formatting import weft_command
from weft.plan.parallelism import Parallelism
from weft.planner.note import Note, create_note
from weft.planner.question import Question
from weft.planner.search.objections import unsupported_reasons
from weft.planner.search.ranking import Candidate
from weft.planner.search.search import SearchResult, closest_miss, search
from weft.study.export import engines
from weft.study.export.header import describe_plan, is_uneven
from weft.study.export.target import ExportTarget, cut_distance


class NothingFits(PlanError):
    """No plan exists that the target can run."""


class ExportChoice(msgspec.Struct, frozen=True):
    """A plan for a target's engine. `gaps` are its differences from the plan that the user asked for."""

    question: Question
    candidate: Candidate
    gaps: tuple[Note, ...]


def choose_plan(question: Question, target: ExportTarget) -> ExportChoice:
    """Choose the best plan that `target` can run, or the nearest to the plan that the user's settings ask for.

    Raises NothingFits.
    """
    translated, gaps = translate_question(question, target)
    answer = search(translated)
    best = answer.best
    problem = obstacle(target, translated, best) if best else ""
    if best and not problem:
        return ExportChoice(
            translated, best, (*gaps, *uneven_plan_of_weft(question, target), *not_run_yet(translated, best))
        )
    wanted = best or search(msgspec.structs.replace(translated, engine="weft")).best
    if wanted is None:
        why = rejection_reason(answer, None)
        raise NothingFits(
            f"nothing fits, so nothing is written: {why}; {weft_command('plan', question.flags)} tells what would help",
            code="nothing-fits-to-export",
        )
    problem = problem or rejection_reason(answer, wanted)
    rule, (own_question, chosen) = _alternative(answer, target, wanted, problem)
    gap = create_note(
        "plan_replaced",
        target=target.title,
        wanted=describe_plan(wanted),
        reason=problem,
        rule=rule,
        chosen=describe_plan(chosen),
    )
    return ExportChoice(own_question, chosen, (*gaps, gap, *not_run_yet(own_question, chosen)))


def obstacle(target: ExportTarget, question: Question, candidate: Candidate) -> str:
    """The reason why a target cannot run a plan; "" if it can."""
    layout = candidate.layout
    if layout.gpu_count(question.cluster) < len(set(layout.gpus)):
        return "it has layers on the CPU as well as on GPUs, which only Weft's plan files have (weft plan --json)"
    return target.unsupported(question, layout)


def _alternative(
    answer: SearchResult, target: ExportTarget, wanted: Candidate, problem: str
) -> tuple[str, tuple[Question, Candidate]]:
    """A plan in place of `wanted` with its question: the best one, or the nearest if the user has given settings."""
    possible = [plan for plan in alternatives(answer) if not obstacle(target, *plan)]
    if not possible:
        raise NothingFits(
            f"{target.title} cannot run {describe_plan(wanted)}: {problem}; no other plan for it fits either",
            code="target-cannot-run-plan",
        )
    if answer.question.constraints == Parallelism():
        return "best", possible[0]  # in the order of the objective
    return "nearest", min(possible, key=lambda plan: cut_distance(wanted.cut, plan[1].cut))


def translate_question(question: Question, target: ExportTarget) -> tuple[Question, list[Note]]:
    """The question for the target's engine, in precisions that it reads, and the differences from `question`."""
    engine = question.engine if question.engine in target.engines else target.engines[0]
    precisions = tuple(dict.fromkeys(target.substitutes.get(name, name) for name in question.precisions))
    gaps = [
        create_note(
            "precision_substituted",
            target=target.title,
            precision=precision,
            substitute=target.substitutes[precision],
        )
        for precision in question.precisions
        if precision in target.substitutes
    ]
    translated = msgspec.structs.replace(question, engine=engine, precisions=precisions)
    if question.kv_dtype and number_bytes(question.kv_dtype) < 2 and not engines.narrow_cache(translated):
        gaps.append(create_note("kv_cache_widened", target=target.title, kv_dtype=question.kv_dtype))
        translated = msgspec.structs.replace(translated, kv_dtype=None)
    if engine != "weft":
        gaps += _weft_features(question, engine)
        translated = msgspec.structs.replace(translated, speculation=None, deterministic=False)
    return translated, gaps


def _weft_features(question: Question, engine: str) -> Iterator[Note]:
    """Notes on what a question asks for and other engines do not have here."""
    if question.speculation:
        yield create_note("speculation_left_out", engine=engine)
    if question.deterministic:
        yield create_note("deterministic_left_out", engine=engine)


def alternatives(answer: SearchResult) -> Iterator[tuple[Question, Candidate]]:
    """Yield the other plans with their questions; plans within the user's settings come first."""
    question = answer.question
    yield from ((question, candidate) for candidate in answer.candidates)
    if question.constraints != Parallelism():
        free = msgspec.structs.replace(question, constraints=Parallelism())
        yield from ((free, candidate) for candidate in search(free).candidates)


def rejection_reason(answer: SearchResult, wanted: Candidate | None) -> str:
    """The reason why the engine cannot run `wanted`, or why nothing fits: for the plan that lacks least memory."""
    of_wanted = [rejected for rejected in answer.rejected if wanted and rejected.cut == wanted.cut]
    nearest = closest_miss(of_wanted or answer.rejected)
    return str(nearest.reason) if nearest else "these GPUs allow no such layout"


def uneven_plan_of_weft(question: Question, target: ExportTarget) -> list[Note]:
    """Note on Weft's own plan for these GPUs if its cut is uneven, which the target's engine does not have."""
    if "weft" in target.engines or len(question.cluster.gpus) == 1:
        return []
    ours = search(msgspec.structs.replace(question, engine="weft")).best
    if ours is None or not is_uneven(ours.layout):
        return []
    return [create_note("uneven_cut_left_out", cut=describe_plan(ours), target=target.title)]


def not_run_yet(question: Question, chosen: Candidate) -> list[Note]:
    """Notes on the features that Weft's own engine lacks to run its plan."""
    if question.engine != "weft":
        return []
    missing = unsupported_reasons(question.shape, chosen.layout.precision)
    return [create_note("planned_only", missing=str(feature)) for feature in missing]
