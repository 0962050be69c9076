"""weft batch IN OUT: answer the rows of a file."""

from __future__ import annotations

import sys
from argparse import Namespace

from weft.checkpoint.hub import model_names
from weft.cli.flags.batch_flags import ANSWERS
from weft.cli.flags.flags import engine_config, given_values, sampling_options
from weft.cli.parser import UsageError


def main(arguments: Namespace) -> int:
    """Answer the rows, and print how many have answers; return 1 if none has."""
    if len(arguments.argument) != 2:
        raise UsageError(
            "weft batch takes an input and an output file, as in: weft batch rows.jsonl answers.jsonl --model demo",
            code="batch-arguments",
        )
    from weft.api.offline.job import BatchJob, answer_here, open_job, run_job, summary
    from weft.http.options import ServeOptions

    source, out = arguments.argument
    defaults = sampling_options(arguments)
    rows, name = open_job(source, out, getattr(arguments, "model", None))
    model = model_names.full_name(name, folder=getattr(arguments, "download_dir", None))
    if line := model_names.notice(name, model):
        print(f"weft: {line}", file=sys.stderr)
    arguments.model = model
    config = engine_config(arguments)
    # The same length for rows of any length is a limit and no wish: no row fails by it.
    flags = {"clip_max_tokens": not rows.is_requests, **given_values(arguments, ANSWERS)}
    names = (*flags.pop("served_model_name", ()), name, model)
    options = ServeOptions(**flags, served_model_name=tuple(dict.fromkeys(names)))
    answer = answer_here
    if getattr(arguments, "ray", False):
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
