"""Flags of weft simulate: weft plan's for model, hardware and layout, and its own for the load."""

from __future__ import annotations

from argparse import ArgumentTypeError
from math import inf
from typing import Annotated, Literal

from weft.cli.flags import plan_flags, values
from weft.cli.flags.declared import Arguments, Flags, Group, flag
from weft.cli.flags.plan_flags import RATE, SLO, THINK, USERS, Aim, Hardware, Layout, LimitFlags, Source
from weft.config import EngineConfig

USUAL_POLICY = "least_conn"


def policy_names() -> tuple[str, ...]:
    """The names of the policies."""
    from weft.fleet.upstreams.policy import POLICIES  # not for the help of all commands

    return tuple(POLICIES)


def policy(text: str) -> str:
    """The name of a policy, for its old name too."""
    from weft.fleet.upstreams.policy import OLD_NAMES

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


class Load(Flags):
    """The load that is simulated."""

    rate: float | None = RATE
    rates: tuple[float, ...] = flag(
        (),
        parse=values.ascending(plan_flags.rate),
        metavar="R,R,...",
        help="several rates, with a run for each, a table and plots",
    )
    users: int | None = USERS
    think: str | None = THINK
    trace: str | None = flag(
        metavar="FILE",
        help="instead of a rate: a CSV or JSONL file of requests with time, input_len, output_len; the files of "
        "Azure, Mooncake and BurstGPT work unchanged; --rate or --rates speed it up or slow it down to that rate",
    )
    burstiness: float = flag(
        1.0,
        parse=shape,
        metavar="SHAPE",
        help="shape of the gamma distribution of the gaps between requests: 1 is a Poisson process, below 1 bursts",
    )
    input_len: str | None = flag(
        metavar="TOKENS",
        help="tokens of a prompt: 1024, a range 100:2000, or lognormal:MEAN:DEVIATION. Default: 1024, or fewer if "
        "the model's context is short",
    )
    output_len: str | None = flag(
        metavar="TOKENS",
        help="tokens of an answer, in the same forms. Default: 512:1536, or fewer if the model's context is short",
    )
    lengths: str | None = flag(metavar="FILE", help="draw both lengths from the rows of this trace")
    prefix_len: int | None = flag(
        parse=values.at_least(1), metavar="TOKENS", help="tokens of a beginning that prompts share"
    )
    prefixes: int = flag(1, parse=values.at_least(1), metavar="N", help="number of different shared beginnings")
    duration: str | None = flag(
        metavar="TIME",
        help="simulated time in which requests arrive, as in 90s or 1h (default: 10m, longer if answers are slow "
        "or the lowest rate is low; with --trace the length of the trace)",
    )
    warmup: str | None = flag(
        metavar="TIME",
        help="first part of the duration, which is not measured (default: a tenth; with --trace nothing)",
    )
    seed: int = flag(0, parse=values.at_least(0), help="random seed")


class Service(Flags):
    """The replicas that answer it."""

    replicas: int | None = flag(parse=values.at_least(1), metavar="N", help="number of replicas, instead of the plan's")
    enable_prefix_caching: bool | None = flag(
        help="reuse KV blocks of prompts with the same beginning, and of preempted requests (default: on only if "
        "prompts share a beginning)"
    )
    async_scheduling: bool | None = flag(
        help="schedule each step before the previous one has ended (default: on for GPUs without a pipeline)"
    )
    policy: str = flag(
        USUAL_POLICY, parse=policy, choices=policy_names, help="rule that picks the replica for a request"
    )


class Queue(Flags):
    """The queue of each replica."""

    max_num_queued_reqs: int | None = flag(
        parse=values.at_least(0),
        config_default=EngineConfig.max_num_queued_reqs,
        help="maximum number of requests that wait in a replica; further ones are refused",
    )


class SimulationAnswer(Flags):
    """The promise, the search for a limit, and the form of the answer."""

    slo: str | None = SLO
    find: Literal["replicas", "rate"] | None = flag(
        help="replicas: find the fewest that keep the promise at --rate; rate: find the highest rate that keeps it",
    )
    sample_replicas: int | None = flag(
        parse=sample,
        metavar="N|auto|all",
        help="number of equal replicas that are simulated, with their share of the requests; auto: fewer than all "
        "if there would be more than 200,000 requests",
    )
    stretches: bool = flag(
        True, help="simulate consecutive steps with the same batch at once, which is faster", config_default=True
    )
    plot: str | None = flag(
        metavar="FILE",
        help="draw PNG or SVG (needs matplotlib): for one run the distribution of its times, for several the times "
        "against the load; lines show the promise, the result of --find and the predicted saturation",
    )
    json: bool = flag(False, help="print one JSON object")


class SimulateArguments(Arguments):
    """weft simulate MODEL."""

    source: Annotated[Source, Group("model")]
    hardware: Hardware
    layout: Layout
    aim: Annotated[Aim, Group("layout")]
    load: Load
    service: Service
    limits: Annotated[LimitFlags, Group("service")]
    queue: Annotated[Queue, Group("service")]
    answer: SimulationAnswer
