"""weft plan [MODEL]: the best layout of a model on some hardware, its speed, and the reasons."""

from __future__ import annotations

from weft.cli.flags.plan_flags import PlanArguments, Promise
from weft.cli.plan import emit, outputs
from weft.cli.plan_question import NOTHING_FITS, build_question, find_model, planned_cluster
from weft.errors import ModelError
from weft.planner.search.search import search


def main(arguments: PlanArguments) -> int:
    """Print the plan, the verdict on a claim, or without a model the models that fit.

    Returns 3 if nothing fits, the claim is impossible or the promise is not kept.
    """
    promised = arguments.promise != Promise()
    if promised:
        from weft.cli.plan import promise  # imports the simulation, which other plans do not need

        promise.check_promise_flags(arguments)
    emit.check_emit_flags(arguments)
    other = _answer_other_question(arguments)
    return other if isinstance(other, int) else _plan_model(other, promised=promised)


def _answer_other_question(arguments: PlanArguments) -> int | PlanArguments:
    """Answer a question that is not about the best layout of one model, and return the exit status.

    For another question, return the arguments with the model to plan.
    """
    if arguments.answer.check is not None:
        from weft.cli.plan import check

        return check.main(arguments, arguments.answer.check)
    if arguments.config is not None:
        from weft.cli.plan import model_set
        from weft.cli.serve import set_file

        models = set_file.read_model_set(arguments.config)
        if models is not None:
            return model_set.main(arguments, models)
    if arguments.export.emit is not None:
        return _emit(arguments, arguments.export.emit)
    if arguments.export.infernet_config is not None:
        from weft.cli.plan import emit_set

        return emit_set.plan_configured(arguments, arguments.export.infernet_config)
    if not arguments.model:
        from weft.cli.plan import known_models

        return known_models.main(arguments)
    return arguments


def _emit(arguments: PlanArguments, target: str) -> int:
    if not arguments.model and arguments.export.infernet_config is None:
        from weft.cli.plan import known_models

        known_models.check_model_flags(arguments)  # raises
    return emit.main(arguments, target)


def _plan_model(arguments: PlanArguments, *, promised: bool) -> int:
    """Print the plan of one model. `promised`: with a promise of times, which a simulation checks."""
    subject, answer = arguments.subject, arguments.answer
    outputs.check_outputs(answer)
    try:
        model = find_model(arguments.model, subject.source)
    except ModelError as error:
        from weft.cli.plan import outline

        if error.code not in outline.NOT_RUN or promised:
            raise
        return outline.main(subject, planned_cluster(subject), error, as_json=answer.json)
    if promised:
        from weft.cli.plan import promise

        return promise.main(arguments, model)
    result = search(build_question(subject, model))
    outputs.write_outputs(answer, result, model)
    return 0 if result.best else NOTHING_FITS
