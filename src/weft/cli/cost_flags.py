"""The flags of weft cost, beside those of weft plan: what is paid elsewhere, and how much there is to answer."""

from __future__ import annotations

import csv
from argparse import ArgumentTypeError
from math import isfinite
from pathlib import Path

from weft.cli import values
from weft.cli.flags import Flag
from weft.cli.plan_flags import share
from weft.errors import error_reason


def prices(text: str) -> tuple[float, ...]:
    """IN/OUT or IN/OUT/CACHED, dollars per million tokens."""
    try:
        found = tuple(float(part.strip().removeprefix("$")) for part in text.split("/"))
    except ValueError:
        found = ()
    if (
        len(found) not in (2, 3)
        or not all(isfinite(price) and price >= 0 for price in found)
        or not found[0] + found[1]
    ):
        raise ArgumentTypeError(
            f"{text!r} are no prices per million tokens, as in 0.15/0.60 or 0.15/0.60/0.08 (cached)"
        )
    return found


def cached(text: str) -> float:
    """From 0 to 1."""
    return 0.0 if text in ("0", "0.0") else share(text)


def demand(text: str) -> tuple[float, ...]:
    """Requests per second in equal spans of time: 3, or 1,1,4,9,4, or a CSV file with a number at the end of each
    line."""
    if text.lower().endswith((".csv", ".txt")):
        try:
            rows = [row for row in csv.reader(Path(text).read_text(encoding="utf-8").splitlines()) if row]
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentTypeError(f"{text} cannot be read: {error_reason(error)}") from None
        rates = []
        for number, row in enumerate(rows, 1):
            try:
                rates.append(float(row[-1]))
            except ValueError:
                if number > 1:  # the first may be a heading
                    raise ArgumentTypeError(f"{text}, row {number}: {row[-1]!r} is no number of requests") from None
    else:
        rates = list(values.decimals(text))
    if not rates or not all(isfinite(rate) and rate >= 0 for rate in rates) or not any(rates):
        raise ArgumentTypeError(f"{text!r} is no demand: requests per second, 0 or more, one or several above 0")
    return tuple(rates)


COST = (
    Flag(
        name="against",
        metavar="NAME",
        repeated=True,
        help="an API's model, as in gpt-4o-mini or openrouter/z-ai/glm-4.6; may be given several times; left out: "
        "whoever sells this model",
    ),
    Flag(
        name="api-price",
        parse=prices,
        metavar="IN/OUT[/CACHED]",
        help="dollars per million tokens of an API that is not known",
    ),
    Flag(
        name="cached",
        parse=cached,
        default=0.0,
        metavar="SHARE",
        help="share of the prompts that comes from the API's prompt cache",
    ),
    Flag(
        name="utilization",
        parse=share,
        default=0.5,
        metavar="SHARE",
        help="share of the full load that is there on average",
    ),
    Flag(
        name="demand",
        parse=demand,
        metavar="RATES",
        help="requests per second, as in 3, or hour by hour 1,1,4,9,4, or a CSV file: how much of it to own",
    ),
    Flag(
        name="max-load",
        parse=share,
        default=0.8,
        metavar="SHARE",
        help="share of its full load that a replica takes before requests overflow to the API",
    ),
    Flag(name="json", parse=None, help="print one JSON object"),
)
