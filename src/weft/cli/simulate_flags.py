"""The flags of weft simulate, beside those of weft plan that describe model, hardware and layout."""

from __future__ import annotations

from argparse import ArgumentTypeError
from math import inf

from weft.cli import plan_flags, values
from weft.cli.flags import Flag

# As gateway.policy has them; that is not for --help to read.
POLICIES = ("least-connections", "round-robin")


def shape(text: str) -> float:
    """Of a gamma distribution."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.01 <= found < inf:
        raise ArgumentTypeError(
            f"{text!r} is no burstiness: 1 is a Poisson process, 0.2 comes in bursts, at least 0.01"
        )
    return found


def sample(text: str) -> int | None:
    """How many replicas are simulated: auto, all or a number; 0 stands for all."""
    return {"auto": None, "all": 0}[text] if text in ("auto", "all") else values.at_least(1)(text)


LOAD = (
    plan_flags.RATE,
    Flag(
        name="rates",
        parse=values.listed(plan_flags.rate),
        metavar="R,R,...",
        help="one run for each, a table, and plots",
    ),
    plan_flags.USERS,
    plan_flags.THINK,
    Flag(
        name="trace",
        metavar="FILE",
        help="instead: requests as they came, CSV or JSONL with time, input_len, output_len; Azure's, Mooncake's and "
        "BurstGPT's files as they are; with --rate or --rates as fast as that",
    ),
    Flag(
        name="burstiness",
        parse=shape,
        default=1.0,
        metavar="SHAPE",
        help="of the gamma distribution of the gaps at a rate: 1 is a Poisson process, less comes in bursts",
    ),
    Flag(
        name="input-len",
        metavar="TOKENS",
        help="of prompts: 1024, a range 100:2000, or lognormal:MEAN:DEVIATION; left out: 1024, or what the model can",
    ),
    Flag(
        name="output-len",
        metavar="TOKENS",
        help="of answers, likewise; left out: 512:1536, or what the model can",
    ),
    Flag(name="lengths", metavar="FILE", help="draw both lengths from the rows of a trace"),
    Flag(
        name="prefix-len", parse=values.at_least(1), metavar="TOKENS", help="with which prompts begin that share them"
    ),
    Flag(name="prefixes", parse=values.at_least(1), default=1, metavar="N", help="how many such beginnings there are"),
    Flag(
        name="duration",
        metavar="TIME",
        help="how long requests come, as in 90s or 1h (default: 10m, longer if answers or the lowest rate are slow; or "
        "the trace's)",
    ),
    Flag(
        name="warmup",
        metavar="TIME",
        help="the first part of that, which is not measured (default: a tenth, or none of a trace)",
    ),
    Flag(name="seed", parse=values.at_least(0), default=0, help="start of every random draw"),
)
SERVICE = (
    Flag(
        name="replicas", parse=values.at_least(1), metavar="N", help="of the plan's layout, instead of its own number"
    ),
    Flag(
        name="enable-prefix-caching",
        parse=None,
        help="find blocks of prompts again; left out: where prompts share something, and a preempted request, which "
        "would find its own, is computed anew",
    ),
    Flag(
        name="async-scheduling",
        parse=None,
        help="schedule each step before the one under way is over; left out: as Weft does, on GPUs without a pipeline",
    ),
    Flag(name="policy", choices=POLICIES, default=POLICIES[0], help="which replica gets a request"),
    plan_flags.MAX_NUM_SEQS,
    Flag(
        name="max-num-queued-reqs",
        parse=values.at_least(0),
        help="requests that wait in a replica, beyond which it refuses",
    ),
)
ANSWER = (
    plan_flags.SLO,
    Flag(
        name="find",
        choices=("replicas", "rate"),
        help="replicas: how many the objective takes at --rate; rate: how much load meets it",
    ),
    Flag(
        name="sample-replicas",
        parse=sample,
        metavar="N|auto|all",
        help="how many of equal replicas are simulated, with their share of the requests; auto: fewer than all where "
        "there would be more than 200,000 requests",
    ),
    Flag(name="stretches", parse=None, default=True, help="take steps whose batch does not change in one go"),
    Flag(
        name="plot",
        metavar="FILE",
        help="a picture, as PNG or SVG (needs matplotlib): of one run the distribution of its times, of several the "
        "times against the load; with the promise, what --find found and the predicted saturation as lines",
    ),
    Flag(name="json", parse=None, help="print one JSON object"),
)
OF_PLAN = tuple(flag for flag in plan_flags.LOAD if flag.name in ("engine", "objective"))
SIMULATE = (
    ("model", plan_flags.NAMED),
    ("hardware", plan_flags.HARDWARE),
    ("layout", (*plan_flags.CUT, *OF_PLAN)),
    ("load", LOAD),
    ("service", SERVICE),
    ("answer", ANSWER),
)
