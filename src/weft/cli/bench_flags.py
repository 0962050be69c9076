"""The flags of weft bench serve and its kin; vLLM's names where `vllm bench serve` has one."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from math import inf, isnan

from weft.cli import values
from weft.cli.flags import Flag


def above(minimum: float) -> Callable[[str], float]:
    """A number above `minimum`, inf among them."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is no number") from None
        if isnan(value) or value <= minimum:
            raise ArgumentTypeError(f"{text!r} must be above {minimum:g}")
        return value

    return number


def finite(text: str) -> float:
    """A number above 0, and no more than that."""
    value = above(0)(text)
    if value == inf:
        raise ArgumentTypeError(f"{text!r} must have an end")
    return value


def ratio(text: str) -> float:
    """From 0 up to, but not, 1."""
    value = above(-1)(text)
    if not 0 <= value < 1:
        raise ArgumentTypeError(f"{text!r} must be 0 or more, and below 1")
    return value


def percents(text: str) -> tuple[float, ...]:
    """95,99.9"""
    found = tuple(sorted(set(values.decimals(text))))
    if not all(0 <= percent <= 100 for percent in found):
        raise ArgumentTypeError(f"{text!r} are no percentiles; each is from 0 to 100")
    return found


def header(text: str) -> tuple[str, str]:
    """NAME=VALUE"""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not (name + value).isprintable():
        raise ArgumentTypeError(f"{text!r} is no header, as in X-Team=blue")
    return name.strip(), value.strip()


TARGET = (
    Flag(
        name="base-url",
        metavar="URL",
        help="a server that runs, as in http://127.0.0.1:8000; left out: MODEL is served for as long as it takes, with "
        "the engine's flags below",
    ),
    Flag(name="host", help="the same, as vLLM has it: the server's address"),
    Flag(name="port", parse=values.at_least(1), help="and its port"),
    Flag(
        name="backend",
        choices=("openai", "openai-chat"),
        default="openai",
        help="/v1/completions, which takes token ids, or /v1/chat/completions, which takes texts",
    ),
    Flag(name="endpoint", metavar="PATH", help="where requests go, instead of that"),
    Flag(name="served-model-name", metavar="NAME", help="the model to ask for; left out: the server's first"),
    Flag(
        name="api-key",
        metavar="KEY",
        help="key to send; better VLLM_API_KEY or OPENAI_API_KEY in the environment, for flags show in `ps`",
    ),
    Flag(name="header", parse=header, repeated=True, metavar="NAME=VALUE", help="a header to send"),
    Flag(name="extra-body", parse=values.mapping, metavar="JSON", help="fields to add to every request"),
    Flag(name="request-timeout", parse=finite, default=600.0, metavar="S", help="seconds until a request has failed"),
)
PROMPTS = (
    Flag(name="num-prompts", parse=values.at_least(1), default=100, help="requests"),
    Flag(
        name="dataset-name",
        choices=("random", "custom", "sharegpt"),
        help="random, or what --dataset-path holds; left out: as the file says",
    ),
    Flag(
        name="dataset-path",
        metavar="FILE",
        help="take the prompts from this file, again from its beginning where it has too few: JSON lines with "
        '"prompt" or "messages" and "output_tokens", or ShareGPT\'s JSON; left out: random token ids',
    ),
    Flag(name="input-len", parse=values.at_least(1), default=256, help="tokens of a random prompt"),
    Flag(name="output-len", parse=values.at_least(1), default=128, help="answer tokens, where the file says nothing"),
    Flag(name="random-input-len", field="input_len", parse=values.at_least(1), help="the same as --input-len"),
    Flag(name="random-output-len", field="output_len", parse=values.at_least(1), help="the same as --output-len"),
    Flag(
        name="random-range-ratio",
        parse=ratio,
        default=0.0,
        help="random lengths are within this share of those two, up and down",
    ),
    Flag(name="random-prefix-len", parse=values.at_least(0), default=0, help="tokens before them, equal in all"),
    Flag(name="temperature", parse=float, default=0.0, help="0 takes the likeliest token"),
    Flag(name="ignore-eos", parse=None, help="go on after the model's end token (default: on for random prompts)"),
    Flag(name="num-warmups", parse=values.at_least(0), default=1, help="requests before those that count"),
)
REPORT = (
    Flag(
        name="goodput",
        several=True,
        metavar="METRIC:MS",
        help="limits that a good answer keeps, as in ttft:1000 tpot:50; e2el too",
    ),
    Flag(name="metric-percentiles", parse=percents, default="95,99", help="percentiles, beside these two"),
    Flag(name="json", parse=None, help="print one JSON object instead of the table"),
    Flag(name="save-result", metavar="FILE", help="write that JSON object to this file"),
)
ARRIVALS = (
    Flag(
        name="request-rate",
        parse=above(0),
        default=inf,
        metavar="R",
        help="requests per second, sent whatever has become of those before; inf: all at once",
    ),
    Flag(
        name="burstiness",
        parse=finite,
        default=1.0,
        metavar="SHAPE",
        help="of the gaps' gamma distribution: 1 is Poisson, less comes in bursts, more comes evenly",
    ),
    Flag(name="max-concurrency", parse=values.at_least(1), metavar="N", help="most requests under way at once"),
)
POINTS = (
    Flag(
        name="request-rate",
        parse=values.listed(above(0)),
        metavar="R,R,...",
        help="one measurement for each of these rates, as in 1,2,4,inf",
    ),
    Flag(
        name="max-concurrency",
        parse=values.listed(values.at_least(1)),
        metavar="N,N,...",
        help="or for each of these limits, as many requests being under way all the time",
    ),
    Flag(name="burstiness", parse=finite, default=1.0, metavar="SHAPE", help="as weft bench serve has it"),
)
SERVE = (("load", ARRIVALS), ("prompts", PROMPTS), ("server", TARGET), ("report", REPORT))
SWEEP = (
    ("points", POINTS),
    ("prompts", PROMPTS),
    ("server", TARGET),
    ("report", (*REPORT, Flag(name="plot", metavar="FILE", help="a picture of it, as PNG or SVG (needs matplotlib)"))),
)
CALIBRATE = (
    (
        "report",
        (
            Flag(name="save", parse=None, help="keep the figures for the planner (default: on, unless they fit badly)"),
            Flag(name="json", parse=None, help="print one JSON object instead of the tables"),
        ),
    ),
)
COMPARE = (
    (
        "report",
        (
            Flag(
                name="tolerance",
                parse=ratio,
                default=0.05,
                help="share by which a figure may be worse before the exit status is 1",
            ),
            Flag(name="json", parse=None, help="print one JSON object instead of the table"),
        ),
    ),
)
