"""weft batch IN OUT: answer the rows of a file."""

from __future__ import annotations

import sys
from dataclasses import replace

from weft.checkpoint.hub import model_names
from weft.cli.flags.batch_flags import BatchArguments
from weft.cli.flags.flags import engine_config, sampling_options
from weft.cli.parser import UsageError


def main(arguments: BatchArguments) -> int:
    """Answer the rows, and print how many have answers; return 1 if none has."""
    if len(arguments.argument) != 2:
        raise UsageError(
            "weft batch takes an input and an output file, as in: weft batch rows.jsonl answers.jsonl --model demo",
            code="batch-arguments",
        )
    from weft.api.offline.job import BatchJob, answer_here, open_job, run_job, summary

    source, out = arguments.argument
    defaults = sampling_options(arguments)
    rows, name = open_job(source, out, arguments.model or None)
    model = model_names.full_name(name, folder=arguments.engine.checkpoint.download_dir)
    if line := model_names.notice(name, model):
        print(f"weft: {line}", file=sys.stderr)
    config = engine_config(arguments.with_model(model))
    names = (*arguments.answers.served_model_name, name, model)
    options = replace(
        arguments.answers,
        served_model_name=tuple(dict.fromkeys(names)),
        # The same length for rows of any length is a limit and no wish: no row fails by it.
        clip_max_tokens=not rows.is_requests,
    )
    answer = answer_here
    if arguments.ray:
        from weft.ray.data import answer_on_ray

        answer = answer_on_ray
    job = BatchJob(rows, out, config, options, defaults)
    try:
        counts = run_job(job, answer)
    except KeyboardInterrupt:
        print("weft: stopped; the same command goes on with the rows that have no answer", file=sys.stderr)
        raise
    print(summary(job, counts))
    return 0 if counts[0] else 1
