"""Flags of weft bench serve, sweep, calibrate and compare; named as in `vllm bench serve` if it has the flag."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from math import inf, isnan

from weft.cli.flags import values
from weft.cli.flags.flags import Flag
from weft.http.options import ServeOptions

TIMES = ("ttft", "tpot", "itl", "e2el")  # the same as in bench.summary, which is slow to import for --help


def above(minimum: float) -> Callable[[str], float]:
    """A parser of numbers above `minimum`; inf is one."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a number") from None
        if isnan(value) or value <= minimum:
            raise ArgumentTypeError(f"{text!r} must be above {minimum:g}")
        return value

    return number


def finite(text: str) -> float:
    """A number above 0 and below infinity."""
    value = above(0)(text)
    if value == inf:
        raise ArgumentTypeError(f"{text!r} must be finite")
    return value


def ratio(text: str) -> float:
    """A number of at least 0 and below 1."""
    value = above(-1)(text)
    if not 0 <= value < 1:
        raise ArgumentTypeError(f"{text!r} must be at least 0 and below 1")
    return value


def percents(text: str) -> tuple[float, ...]:
    """Percentiles with commas, ascending: 95,99.9."""
    percentiles = tuple(sorted(set(values.decimals(text))))
    if not all(0 <= percent <= 100 for percent in percentiles):
        raise ArgumentTypeError(f"{text!r} is not a list of percentiles; each must be from 0 to 100")
    return percentiles


def metric_names(text: str) -> tuple[str, ...]:
    """Names of times with commas: ttft,tpot."""
    names = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    if not names or not set(names) <= set(TIMES):
        raise ArgumentTypeError(f"{text!r} is not a list of times; they are {', '.join(TIMES)}")
    return names


def header(text: str) -> tuple[str, str]:
    """An HTTP header NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not (name + value).isprintable():
        raise ArgumentTypeError(f"{text!r} is not a header, as in X-Team=blue")
    return name.strip(), value.strip()


TARGET = (
    Flag(
        name="base-url",
        metavar="URL",
        help="address of a running server, as in http://127.0.0.1:8000. Default: start weft serve MODEL with the "
        "engine's flags below, and stop it afterwards",
    ),
    Flag(name="host", config_default=ServeOptions.host, help="host of a running server, instead of --base-url"),
    Flag(
        name="port",
        parse=values.at_least(1),
        config_default=ServeOptions.port,
        help="port of a running server, instead of --base-url",
    ),
    Flag(
        name="backend",
        choices=("openai", "openai-chat"),
        default="openai",
        help="openai: /v1/completions, which takes token ids; openai-chat: /v1/chat/completions, which takes texts",
    ),
    Flag(name="endpoint", metavar="PATH", help="path of the requests, instead of the backend's"),
    Flag(
        name="served-model-name",
        metavar="NAME",
        help="name of the model in the requests. Default: the first that the server lists",
    ),
    Flag(
        name="api-key",
        metavar="KEY",
        help="key to send; VLLM_API_KEY or OPENAI_API_KEY in the environment is safer, because `ps` shows flags",
    ),
    Flag(name="header", parse=header, repeated=True, metavar="NAME=VALUE", help="header to send with every request"),
    Flag(name="extra-body", parse=values.mapping, metavar="JSON", help="fields to add to the body of every request"),
    Flag(
        name="request-timeout",
        parse=finite,
        default=600.0,
        metavar="S",
        help="seconds after which an unfinished request counts as failed",
    ),
)
PROMPTS = (
    Flag(name="num-prompts", parse=values.at_least(1), default=100, help="number of requests"),
    Flag(
        name="dataset-name",
        choices=("random", "custom", "sharegpt"),
        help="random, or the format of --dataset-path. Default: detected from the file",
    ),
    Flag(
        name="dataset-path",
        metavar="FILE",
        help="file with prompts, reused from its beginning if there are too few: JSON lines with "
        '"prompt" or "messages" and "output_tokens", or ShareGPT\'s JSON. Default: random token ids',
    ),
    Flag(name="input-len", parse=values.at_least(1), default=256, help="tokens of a random prompt"),
    Flag(
        name="output-len",
        parse=values.at_least(1),
        default=128,
        help="tokens of an answer, if the file does not give them",
    ),
    Flag(name="random-input-len", field="input_len", parse=values.at_least(1), help="the same as --input-len"),
    Flag(name="random-output-len", field="output_len", parse=values.at_least(1), help="the same as --output-len"),
    Flag(
        name="random-range-ratio",
        parse=ratio,
        default=0.0,
        help="random lengths differ from --input-len and --output-len by up to this share",
    ),
    Flag(
        name="random-prefix-len",
        parse=values.at_least(0),
        default=0,
        help="tokens at the beginning of every random prompt, the same in all",
    ),
    Flag(name="temperature", parse=float, default=0.0, help="0 always takes the most likely token"),
    Flag(name="ignore-eos", parse=None, help="continue after the model's end token (default: on for random prompts)"),
    Flag(name="num-warmups", parse=values.at_least(0), default=1, help="warm-up requests before the measured ones"),
)
REPORT = (
    Flag(
        name="goodput",
        several=True,
        metavar="METRIC:MS",
        help="limits for an answer that counts as good, as in ttft:1000 tpot:50 e2el:5000",
    ),
    Flag(
        name="metric-percentiles", parse=percents, default="95,99", help="percentiles to report; 95 and 99 always are"
    ),
    Flag(name="json", parse=None, help="print one JSON object instead of the table"),
    Flag(
        name="percentile-metrics",
        parse=metric_names,
        metavar="NAMES",
        help="the times to show, of ttft, tpot, itl and e2el, as in ttft,tpot; the JSON object has all",
    ),
    Flag(
        name="save-result",
        bare=True,
        metavar="FILE",
        help="write the JSON object to this file; without FILE to --result-filename in --result-dir",
    ),
    Flag(name="result-dir", metavar="DIR", help="folder of the result; default: this one"),
    Flag(name="result-filename", metavar="NAME", help="name of the result; default: rate, model and time"),
)
ARRIVALS = (
    Flag(
        name="request-rate",
        parse=above(0),
        default=inf,
        metavar="R",
        help="requests sent per second, whether earlier ones are answered or not; inf: all at once",
    ),
    Flag(
        name="burstiness",
        parse=finite,
        default=1.0,
        metavar="SHAPE",
        help="shape of the gamma distribution of the gaps: 1 is a Poisson process, below 1 bursts, above 1 even gaps",
    ),
    Flag(
        name="max-concurrency",
        parse=values.at_least(1),
        metavar="N",
        help="maximum number of unfinished requests at once",
    ),
)
POINTS = (
    Flag(
        name="request-rate",
        parse=values.ascending(above(0)),
        metavar="R,R,...",
        help="rates, each of which is measured, as in 1,2,4,inf",
    ),
    Flag(
        name="max-concurrency",
        parse=values.ascending(values.at_least(1)),
        metavar="N,N,...",
        help="limits for the number of unfinished requests, each of which is measured",
    ),
    Flag(name="burstiness", parse=finite, default=1.0, metavar="SHAPE", help="as in weft bench serve"),
)
SERVE = (("load", ARRIVALS), ("prompts", PROMPTS), ("server", TARGET), ("report", REPORT))
SWEEP = (
    ("points", POINTS),
    ("prompts", PROMPTS),
    ("server", TARGET),
    (
        "report",
        (*REPORT, Flag(name="plot", metavar="FILE", help="also draw the results, as PNG or SVG (needs matplotlib)")),
    ),
)
CALIBRATE = (
    (
        "report",
        (
            Flag(
                name="save",
                parse=None,
                help="keep the figures for the planner (default: on, unless the planner's formulas fit them badly)",
            ),
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
                help="share by which a figure may get worse without exit status 1",
            ),
            Flag(name="json", parse=None, help="print one JSON object instead of the table"),
        ),
    ),
)
