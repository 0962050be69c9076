"""Flags of weft bench serve, sweep, calibrate and compare; named as in `vllm bench serve` if it has the flag."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from math import inf, isnan
from typing import Any, ClassVar, Literal

from weft.cli.flags import values
from weft.cli.flags.declared import Arguments, Flags, flag
from weft.cli.flags.flags import EngineFlags
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


class Target(Flags):
    """The server that is measured, and the form of its requests."""

    base_url: str | None = flag(
        metavar="URL",
        help="address of a running server, as in http://127.0.0.1:8000. Default: start weft serve MODEL with the "
        "engine's flags below, and stop it afterwards",
    )
    host: str | None = flag(config_default=ServeOptions.host, help="host of a running server, instead of --base-url")
    port: int | None = flag(
        parse=values.at_least(1),
        config_default=ServeOptions.port,
        help="port of a running server, instead of --base-url",
    )
    backend: Literal["openai", "openai-chat"] = flag(
        "openai",
        help="openai: /v1/completions, which takes token ids; openai-chat: /v1/chat/completions, which takes texts",
    )
    endpoint: str | None = flag(metavar="PATH", help="path of the requests, instead of the backend's")
    served_model_name: str | None = flag(
        metavar="NAME", help="name of the model in the requests. Default: the first that the server lists"
    )
    api_key: str | None = flag(
        metavar="KEY",
        help="key to send; VLLM_API_KEY or OPENAI_API_KEY in the environment is safer, because `ps` shows flags",
    )
    header: tuple[tuple[str, str], ...] = flag(
        (), parse=header, repeated=True, metavar="NAME=VALUE", help="header to send with every request"
    )
    extra_body: dict[str, Any] | None = flag(metavar="JSON", help="fields to add to the body of every request")
    request_timeout: float = flag(
        600.0, parse=finite, metavar="S", help="seconds after which an unfinished request counts as failed"
    )


class Prompts(Flags):
    """The requests."""

    num_prompts: int = flag(100, parse=values.at_least(1), help="number of requests")
    dataset_name: Literal["random", "custom", "sharegpt"] | None = flag(
        help="random, or the format of --dataset-path. Default: detected from the file",
    )
    dataset_path: str | None = flag(
        metavar="FILE",
        help="file with prompts, reused from its beginning if there are too few: JSON lines with "
        '"prompt" or "messages" and "output_tokens", or ShareGPT\'s JSON. Default: random token ids',
    )
    input_len: int = flag(256, parse=values.at_least(1), help="tokens of a random prompt")
    output_len: int = flag(128, parse=values.at_least(1), help="tokens of an answer, if the file does not give them")
    random_input_len: ClassVar[Any] = flag(field="input_len", parse=values.at_least(1), help="the same as --input-len")
    random_output_len: ClassVar[Any] = flag(
        field="output_len", parse=values.at_least(1), help="the same as --output-len"
    )
    random_range_ratio: float = flag(
        0.0, parse=ratio, help="random lengths differ from --input-len and --output-len by up to this share"
    )
    random_prefix_len: int = flag(
        0, parse=values.at_least(0), help="tokens at the beginning of every random prompt, the same in all"
    )
    temperature: float = flag(0.0, help="0 always takes the most likely token")
    ignore_eos: bool | None = flag(help="continue after the model's end token (default: on for random prompts)")
    num_warmups: int = flag(1, parse=values.at_least(0), help="warm-up requests before the measured ones")


class Report(Flags):
    """The figures, and where they go."""

    goodput: tuple[str, ...] = flag(
        (),
        several=True,
        metavar="METRIC:MS",
        help="limits for an answer that counts as good, as in ttft:1000 tpot:50 e2el:5000",
    )
    metric_percentiles: tuple[float, ...] = flag(
        (95, 99), parse=percents, help="percentiles to report; 95 and 99 always are"
    )
    json: bool = flag(False, help="print one JSON object instead of the table")
    percentile_metrics: tuple[str, ...] = flag(
        (),
        parse=metric_names,
        metavar="NAMES",
        help="the times to show, of ttft, tpot, itl and e2el, as in ttft,tpot; the JSON object has all",
    )
    save_result: str | bool | None = flag(
        bare=True,
        metavar="FILE",
        help="write the JSON object to this file; without FILE to --result-filename in --result-dir",
    )
    result_dir: str | None = flag(metavar="DIR", help="folder of the result; default: this one")
    result_filename: str | None = flag(metavar="NAME", help="name of the result; default: rate, model and time")


class Arrivals(Flags):
    """The load of weft bench serve."""

    request_rate: float = flag(
        inf,
        parse=above(0),
        metavar="R",
        help="requests sent per second, whether earlier ones are answered or not; inf: all at once",
    )
    burstiness: float = flag(
        1.0,
        parse=finite,
        metavar="SHAPE",
        help="shape of the gamma distribution of the gaps: 1 is a Poisson process, below 1 bursts, above 1 even gaps",
    )
    max_concurrency: int | None = flag(
        parse=values.at_least(1), metavar="N", help="maximum number of unfinished requests at once"
    )


class Points(Flags):
    """The loads of weft bench sweep."""

    request_rate: tuple[float, ...] = flag(
        (),
        parse=values.ascending(above(0)),
        metavar="R,R,...",
        help="rates, each of which is measured, as in 1,2,4,inf",
    )
    max_concurrency: tuple[float, ...] = flag(
        (),
        parse=values.ascending(values.at_least(1)),
        metavar="N,N,...",
        help="limits for the number of unfinished requests, each of which is measured",
    )
    burstiness: float = flag(1.0, parse=finite, metavar="SHAPE", help="as in weft bench serve")


class SweepReport(Report):
    """The figures of several loads, and where they go."""

    plot: str | None = flag(metavar="FILE", help="also draw the results, as PNG or SVG (needs matplotlib)")


class LoadArguments(Arguments):
    """weft bench serve [MODEL]."""

    load: Arrivals
    prompts: Prompts
    server: Target
    report: Report
    engine: EngineFlags


class SweepArguments(Arguments):
    """weft bench sweep [MODEL]."""

    points: Points
    prompts: Prompts
    server: Target
    report: SweepReport
    engine: EngineFlags


class CalibrateArguments(Arguments):
    """weft bench calibrate [MODEL]."""

    title: ClassVar = "report"
    save: bool | None = flag(
        help="keep the figures for the planner (default: on, unless the planner's formulas fit them badly)"
    )
    json: bool = flag(False, help="print one JSON object instead of the tables")
    engine: EngineFlags


class CompareArguments(Arguments):
    """weft bench compare OLD NEW."""

    title: ClassVar = "report"
    tolerance: float = flag(0.05, parse=ratio, help="share by which a figure may get worse without exit status 1")
    json: bool = flag(False, help="print one JSON object instead of the table")
