"""Flags of weft cost that weft plan does not have: API prices and demand."""

from __future__ import annotations

import csv
from argparse import ArgumentTypeError
from math import isfinite
from typing import ClassVar

from weft.cli.flags import values
from weft.cli.flags.declared import Arguments, flag
from weft.cli.flags.plan_flags import Subject, share
from weft.errors import error_reason
from weft.regular_files import SETTINGS_BYTES, read_regular_text


def prices(text: str) -> tuple[float, ...]:
    """Prices IN/OUT or IN/OUT/CACHED in dollars per million tokens; not both of the first two are 0."""
    try:
        dollars = tuple(float(part.strip().removeprefix("$")) for part in text.split("/"))
    except ValueError:
        dollars = ()
    valid = len(dollars) in (2, 3) and all(isfinite(price) and price >= 0 for price in dollars)
    if not valid or not dollars[0] + dollars[1]:
        raise ArgumentTypeError(
            f"{text!r} is not a price per million tokens, as in 0.15/0.60 or 0.15/0.60/0.08 (cached)"
        )
    return dollars


def cached_share(text: str) -> float:
    """A share from 0 to 1."""
    return 0.0 if text in ("0", "0.0") else share(text)


def demand(text: str) -> tuple[float, ...]:
    """Requests per second in equal spans of time: 3, or 1,1,4,9,4, or a CSV file with a rate at the end of a line."""
    rates = read_demand(text) if text.lower().endswith((".csv", ".txt")) else list(values.decimals(text))
    if not rates or not all(isfinite(rate) and rate >= 0 for rate in rates) or not any(rates):
        raise ArgumentTypeError(
            f"{text!r} is not a demand: give requests per second, none below 0 and at least one above 0"
        )
    return tuple(rates)


def read_demand(path: str) -> list[float]:
    """The last column of a CSV file, whose first row may be a heading."""
    try:
        rows = [row for row in csv.reader(read_regular_text(path, SETTINGS_BYTES).splitlines()) if row]
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentTypeError(f"{path} cannot be read: {error_reason(error)}") from None
    rates = []
    for number, row in enumerate(rows, 1):
        try:
            rates.append(float(row[-1]))
        except ValueError:
            if number > 1:
                raise ArgumentTypeError(f"{path}, row {number}: {row[-1]!r} is not a number of requests") from None
    return rates


class CostArguments(Arguments):
    """weft cost MODEL."""

    title: ClassVar = "cost"
    against: tuple[str, ...] = flag(
        (),
        metavar="NAME",
        repeated=True,
        help="an API's model to compare with, as in gpt-4o-mini or openrouter/z-ai/glm-4.6; may be given several "
        "times. Default: the providers that sell this model",
    )
    api_price: tuple[float, ...] | None = flag(
        parse=prices, metavar="IN/OUT[/CACHED]", help="dollars per million tokens of any other API"
    )
    cached: float = flag(
        0.0, parse=cached_share, metavar="SHARE", help="share of the prompt tokens that the API's prompt cache serves"
    )
    utilization: float = flag(0.5, parse=share, metavar="SHARE", help="average load, as a share of the full load")
    demand: tuple[float, ...] | None = flag(
        parse=demand,
        metavar="RATES",
        help="requests per second to divide between own GPUs and API: 3, or hour by hour 1,1,4,9,4, or a CSV file",
    )
    max_load: float = flag(
        0.8,
        parse=share,
        metavar="SHARE",
        help="share of its full load up to which a replica is filled; the other requests go to the API",
    )
    json: bool = flag(False, help="print one JSON object")
    subject: Subject
