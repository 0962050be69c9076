"""weft demo [PROMPT]: a real model, cut across two ranks."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from weft.cli import engine
from weft.cli.flags import sampling
from weft.cli.plan_table import print_plan
from weft.formats.demo import NAME
from weft.hardware import host

PROMPT = "Why is the sky blue?"
MAX_TOKENS = 200
RANKS = 2


def main(arguments: Namespace) -> int:
    """Print the plan, stream the answer, tell how fast it was."""
    prompt = " ".join(arguments.argument) or PROMPT
    wanted = sampling(arguments, temperature=0.0, max_tokens=MAX_TOKENS)
    with engine.start(arguments, model=NAME, **cut(arguments)) as llm:
        print_plan(llm.plan, sys.stdout)
        print(f"> {prompt}\n", flush=True)
        params = llm.sampling_params(**wanted)
        answer = engine.show(llm.stream(engine.conversation(prompt), params))
    if answer is not None:
        print(f"\n{engine.speed_text(answer)}")
    return 0


def cut(arguments: Namespace) -> dict[str, Any]:
    """Two ranks, unless the flags say how; on a machine with one GPU they share it."""
    said = {"plan", "tensor_parallel_size", "tensor_split", "pipeline_parallel_size", "pipeline_split", "device_ids"}
    if said & vars(arguments).keys():
        return {}
    shared = getattr(arguments, "device", "auto") != "cpu" and len(host.probe_host().gpus) == 1
    return {"tensor_parallel_size": RANKS, **({"device_ids": (0,) * RANKS} if shared else {})}
