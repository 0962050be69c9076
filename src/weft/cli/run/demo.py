"""weft demo [PROMPT]: a small real model on two ranks."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from weft.checkpoint.hub.demo import NAME
from weft.cli import engine
from weft.cli.flags.flags import sampling_options
from weft.cli.run.plan_table import print_plan
from weft.machine.hardware import host

PROMPT = "Why is the sky blue?"
MAX_TOKENS = 200
RANKS = 2


def main(arguments: Namespace) -> int:
    """Print the layout, the answer while it grows, and its speed."""
    prompt = " ".join(arguments.argument) or PROMPT
    options = sampling_options(arguments, temperature=0.0, max_tokens=MAX_TOKENS)
    with engine.start_engine(arguments, model=NAME, **demo_layout(arguments)) as llm:
        print_plan(llm.plan, sys.stdout)
        print(f"> {prompt}\n", flush=True)
        params = llm.sampling_params(**options)
        answer = engine.print_stream(llm.stream(engine.conversation(prompt), params))
    if answer is not None:
        print(f"\n{engine.speed_text(answer)}")
    return 0


def demo_layout(arguments: Namespace) -> dict[str, Any]:
    """Engine options for two ranks, which share the GPU if there is only one; empty if the flags give a layout."""
    names = {"plan", "tensor_parallel_size", "tensor_split", "pipeline_parallel_size", "pipeline_split", "device_ids"}
    if names & vars(arguments).keys():
        return {}
    shared = getattr(arguments, "device", "auto") != "cpu" and len(host.probe_host().gpus) == 1
    return {"tensor_parallel_size": RANKS, **({"device_ids": (0,) * RANKS} if shared else {})}
