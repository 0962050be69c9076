"""weft plan [MODEL]: the best layout of a model on some hardware, its speed, and the reasons."""

from __future__ import annotations

from argparse import Namespace

from weft.cli.flags import plan_flags
from weft.cli.plan import emit, outputs
from weft.cli.plan_question import NOTHING_FITS, build_question, find_model, planned_cluster
from weft.errors import ModelError
from weft.planner.search.search import search


def main(arguments: Namespace) -> int:
    """Print the plan, the verdict on a claim, or without a model the models that fit.

    Returns 3 if nothing fits, the claim is impossible or the promise is not kept.
    """
    promised = any(hasattr(arguments, flag.dest) for flag in plan_flags.PROMISE)
    if promised:
        from weft.cli.plan import promise  # imports the simulation, which other plans do not need

        promise.check_promise_flags(arguments)
    emit.check_emit_flags(arguments)
    status = _answer_other_question(arguments)
    return _plan_model(arguments, promised=promised) if status is None else status


def _answer_other_question(arguments: Namespace) -> int | None:
    """Answer a question that is not about the best layout of one model, and return the exit status; else None."""
    if hasattr(arguments, "check"):
        from weft.cli.plan import check

        return check.main(arguments)
    if hasattr(arguments, "config"):
        from weft.cli.plan import model_set
        from weft.cli.serve import set_file

        models = set_file.read_model_set(arguments.config)
        if models is not None:
            return model_set.main(arguments, models)
    if hasattr(arguments, "emit"):
        return _emit(arguments)
    if hasattr(arguments, "infernet_config"):
        from weft.cli.plan import emit_set

        return emit_set.plan_configured(arguments)
    if not getattr(arguments, "model", ""):
        from weft.cli.plan import known_models

        return known_models.main(arguments)
    return None


def _emit(arguments: Namespace) -> int:
    if not getattr(arguments, "model", "") and not hasattr(arguments, "infernet_config"):
        from weft.cli.plan import known_models

        known_models.check_model_flags(arguments)  # raises
    return emit.main(arguments)


def _plan_model(arguments: Namespace, *, promised: bool) -> int:
    """Print the plan of one model. `promised`: with a promise of times, which a simulation checks."""
    outputs.check_outputs(arguments)
    try:
        model = find_model(arguments)
    except ModelError as error:
        from weft.cli.plan import outline

        if error.code not in outline.NOT_RUN or promised:
            raise
        return outline.main(arguments, planned_cluster(vars(arguments)), error)
    if promised:
        from weft.cli.plan import promise

        return promise.main(arguments, model)
    answer = search(build_question(arguments, model))
    outputs.write_outputs(arguments, answer, model)
    return 0 if answer.best else NOTHING_FITS
