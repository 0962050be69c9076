"""Flags of weft simulate: weft plan's for model, hardware and layout, and its own for the load."""

from __future__ import annotations

from argparse import ArgumentTypeError
from math import inf

from weft.cli.flags import plan_flags, values
from weft.cli.flags.flags import Flag
from weft.config import EngineConfig
from weft.fleet.upstreams.policy import OLD_NAMES, POLICIES

POLICY_NAMES = tuple(POLICIES)


def policy(text: str) -> str:
    """The name of a policy, for its old name too."""
    return OLD_NAMES.get(text, text)


def shape(text: str) -> float:
    """The shape of a gamma distribution, at least 0.01."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.01 <= value < inf:
        raise ArgumentTypeError(
            f"{text!r} is not a burstiness: it must be at least 0.01; 1 is a Poisson process, 0.2 comes in bursts"
        )
    return value


def sample(text: str) -> int | None:
    """Number of replicas that are simulated; None for auto, 0 for all."""
    return {"auto": None, "all": 0}[text] if text in ("auto", "all") else values.at_least(1)(text)


LOAD = (
    plan_flags.RATE,
    Flag(
        name="rates",
        parse=values.ascending(plan_flags.rate),
        metavar="R,R,...",
        help="several rates, with a run for each, a table and plots",
    ),
    plan_flags.USERS,
    plan_flags.THINK,
    Flag(
        name="trace",
        metavar="FILE",
        help="instead of a rate: a CSV or JSONL file of requests with time, input_len, output_len; the files of Azure, "
        "Mooncake and BurstGPT work unchanged; --rate or --rates speed it up or slow it down to that rate",
    ),
    Flag(
        name="burstiness",
        parse=shape,
        default=1.0,
        metavar="SHAPE",
        help="shape of the gamma distribution of the gaps between requests: 1 is a Poisson process, below 1 bursts",
    ),
    Flag(
        name="input-len",
        metavar="TOKENS",
        help="tokens of a prompt: 1024, a range 100:2000, or lognormal:MEAN:DEVIATION. Default: 1024, or fewer if the "
        "model's context is short",
    ),
    Flag(
        name="output-len",
        metavar="TOKENS",
        help="tokens of an answer, in the same forms. Default: 512:1536, or fewer if the model's context is short",
    ),
    Flag(name="lengths", metavar="FILE", help="draw both lengths from the rows of this trace"),
    Flag(
        name="prefix-len", parse=values.at_least(1), metavar="TOKENS", help="tokens of a beginning that prompts share"
    ),
    Flag(
        name="prefixes", parse=values.at_least(1), default=1, metavar="N", help="number of different shared beginnings"
    ),
    Flag(
        name="duration",
        metavar="TIME",
        help="simulated time in which requests arrive, as in 90s or 1h (default: 10m, longer if answers are slow or "
        "the lowest rate is low; with --trace the length of the trace)",
    ),
    Flag(
        name="warmup",
        metavar="TIME",
        help="first part of the duration, which is not measured (default: a tenth; with --trace nothing)",
    ),
    Flag(name="seed", parse=values.at_least(0), default=0, help="random seed"),
)
SERVICE = (
    Flag(name="replicas", parse=values.at_least(1), metavar="N", help="number of replicas, instead of the plan's"),
    Flag(
        name="enable-prefix-caching",
        parse=None,
        help="reuse KV blocks of prompts with the same beginning, and of preempted requests (default: on only if "
        "prompts share a beginning)",
    ),
    Flag(
        name="async-scheduling",
        parse=None,
        help="schedule each step before the previous one has ended (default: on for GPUs without a pipeline)",
    ),
    Flag(
        name="policy",
        parse=policy,
        choices=POLICY_NAMES,
        default=POLICY_NAMES[0],
        help="rule that picks the replica for a request",
    ),
    plan_flags.MAX_NUM_SEQS,
    Flag(
        name="max-num-queued-reqs",
        parse=values.at_least(0),
        config_default=EngineConfig.max_num_queued_reqs,
        help="maximum number of requests that wait in a replica; further ones are refused",
    ),
)
ANSWER = (
    plan_flags.SLO,
    Flag(
        name="find",
        choices=("replicas", "rate"),
        help="replicas: find the fewest that keep the promise at --rate; rate: find the highest rate that keeps it",
    ),
    Flag(
        name="sample-replicas",
        parse=sample,
        metavar="N|auto|all",
        help="number of equal replicas that are simulated, with their share of the requests; auto: fewer than all if "
        "there would be more than 200,000 requests",
    ),
    Flag(
        name="stretches",
        parse=None,
        default=True,
        help="simulate consecutive steps with the same batch at once, which is faster",
    ),
    Flag(
        name="plot",
        metavar="FILE",
        help="draw PNG or SVG (needs matplotlib): for one run the distribution of its times, for several the times "
        "against the load; lines show the promise, the result of --find and the predicted saturation",
    ),
    Flag(name="json", parse=None, help="print one JSON object"),
)
PLAN_LOAD = tuple(flag for flag in plan_flags.LOAD if flag.name in ("engine", "objective"))
SIMULATE = (
    ("model", plan_flags.MODEL),
    ("hardware", plan_flags.HARDWARE),
    ("layout", (*plan_flags.LAYOUT, *PLAN_LOAD)),
    ("load", LOAD),
    ("service", SERVICE),
    ("answer", ANSWER),
)
