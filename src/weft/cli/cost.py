"""weft cost MODEL: dollars per million tokens, when own GPUs beat an API, and how much of a load to own."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import Any

import msgspec

from weft.architectures.model import Model
from weft.cli.parser import UsageError
from weft.cli.plan import NOTHING_FITS, ask, look_up
from weft.cli.tables import NARROW, console, table
from weft.errors import ConfigError
from weft.planner import api_prices, economics
from weft.planner.api_prices import Quote, Usage
from weft.planner.economics import Fleet, Mix
from weft.planner.question import Question
from weft.planner.ranking import Candidate
from weft.planner.search import search

SELLERS = 5  # of those that sell the model itself, the cheapest
HOURS_PER_MONTH = 365.25 * 24 / 12
STEPS = (1.0, 0.5, 0.25, 0.1)  # shares of the full load that are shown beside the one asked for


def main(arguments: Namespace) -> int:
    """Print the comparison; 3 where the model does not fit the hardware."""
    model = look_up(arguments)
    question = ask(arguments, model)
    if question.price is None:
        raise UsageError("what does a GPU cost? For example --price 2.49, dollars per GPU-hour")
    best = search(question).best
    if best is None:
        print(f"{model.name} does not fit this hardware; weft plan says why", file=sys.stderr)
        return NOTHING_FITS
    fleet = rented(question, best)
    quotes = asked(arguments, model, usage(question, arguments.cached))
    if getattr(arguments, "json", False):
        print(json.dumps(as_json(arguments, question, best, fleet, quotes)))
    else:
        show(arguments, question, model, best, fleet, quotes)
    return 0


def rented(question: Question, best: Candidate) -> Fleet:
    """The candidate as GPUs that are paid for by the hour."""
    assert question.price is not None
    tokens = best.predicted.output_tok_s
    return Fleet(
        dollars_per_hour=question.price * len(set(best.layout.gpus)),
        requests_per_s=tokens / question.workload.output_len,
        tokens_per_s=tokens,
        replicas=units(best),
    )


def units(best: Candidate) -> int:
    """How many parts of the deployment can be rented each by itself: its replicas, unless they share their experts."""
    layout = best.layout
    return layout.data_parallel if layout.expert_parallel <= layout.tensor_parallel else 1


def usage(question: Question, cached: float) -> Usage:
    work = question.workload
    return Usage(work.input_len, round(work.input_len * cached), work.output_len)


def asked(arguments: Namespace, model: Model, each: Usage) -> list[Quote]:
    """What APIs take for a request: those that were named, else whoever sells the model."""
    found = [api_prices.find_quote(name, each) for name in getattr(arguments, "against", ())]
    stated = getattr(arguments, "api_price", None)
    if stated is not None:
        found.append(api_prices.stated_quote(stated, each))
    if found:
        return found
    sellers = api_prices.find_quotes(model.name, each)[:SELLERS]
    if not sellers and hasattr(arguments, "demand"):
        raise ConfigError(
            f"nobody is known to sell {model.name}; name an API with --against gpt-4o-mini, or its prices with "
            "--api-price 0.15/0.60"
        )
    return sellers


def mixes(replica: Fleet, quote: Quote, demand: tuple[float, ...], max_load: float) -> list[Mix]:
    """None owned, the cheapest mix, and all owned: in this order, each once."""
    best = economics.cheapest_mix(replica, quote.dollars, demand, max_load)
    counts = dict.fromkeys((0, best.replicas, economics.replicas_for_peak(replica, demand, max_load)))
    return [economics.rent_and_api_mix(replica, quote.dollars, demand, count, max_load) for count in counts]


def as_json(
    arguments: Namespace, question: Question, best: Candidate, fleet: Fleet, quotes: list[Quote]
) -> dict[str, Any]:
    """Dollars; times in hours, loads in requests per second."""
    work, demand = question.workload, getattr(arguments, "demand", None)
    return {
        "layout": str(best.cut),
        "dollars_per_gpu_hour": question.price,
        "input_len": work.input_len,
        "output_len": work.output_len,
        **msgspec.structs.asdict(fleet),
        "error_band": best.predicted.error_band,
        "utilization": arguments.utilization,
        "dollars_per_million_tokens": fleet.dollars_per_million(arguments.utilization),
        "apis": [
            {
                **msgspec.structs.asdict(quote),
                "dollars_per_request": quote.dollars,
                "dollars_per_million_tokens": quote.dollars * 1e6 / work.output_len,
                "break_even_utilization": fleet.break_even(quote.dollars),
                "mixes": [
                    {**msgspec.structs.asdict(it), "dollars": it.dollars}
                    for it in mixes(fleet.per_replica, quote, demand, arguments.max_load)
                ]
                if demand
                else [],
            }
            for quote in quotes
        ],
    }


def show(
    arguments: Namespace, question: Question, model: Model, best: Candidate, fleet: Fleet, quotes: list[Quote]
) -> None:
    """The comparison as a person reads it."""
    out = console()
    out.width = max(out.width, NARROW)
    work, band = question.workload, best.predicted.error_band
    gpus = len(set(best.layout.gpus))
    out.print(
        f"{model.name} as {best.cut} on {counted(gpus, question)} at ${question.price:g} an hour each: "
        f"${fleet.dollars_per_hour:,.2f} an hour for up to {fleet.tokens_per_s:,.0f} tok/s, "
        f"{fleet.requests_per_s:,.2f} requests/s of {work.input_len:,} + {work.output_len:,} tokens "
        f"(predicted, within {band:.0%})",
        soft_wrap=True,
    )
    shares = sorted({*STEPS, arguments.utilization}, reverse=True)
    own = table("own GPUs busy", *(f"{share:.0%}" for share in shares))
    own.add_row("$/M answer", *(money(fleet.dollars_per_million(share)) for share in shares))
    out.print(own)
    if not quotes:
        out.print("nobody is known to sell this model; --against NAME or --api-price IN/OUT compares with an API")
        return
    api = table("API", "$/M answer", "of it prompt", "break-even", f"at {arguments.utilization:.0%} busy")
    for quote in quotes:
        even, share = fleet.break_even(quote.dollars), arguments.utilization
        million = quote.dollars * 1e6 / work.output_len
        prompts = 1 - quote.output_dollars / quote.dollars
        saved = million / fleet.dollars_per_million(share)
        verdict = f"own {saved:,.1f}x cheaper" if saved >= 1 else f"API {1 / saved:,.1f}x cheaper"
        busy = f"{even:.1%} busy" if even <= 1 else f"never ({even:.0%})"
        api.add_row(named(quote), money(million), f"{prompts:.0%}", busy, verdict)
    out.print(api)
    sources = ", ".join(dict.fromkeys(quote.source for quote in quotes))
    out.print(f"dollars per million answer tokens, their prompts included; API prices: {sources}", soft_wrap=True)
    if hasattr(arguments, "demand"):
        cheap = min(quotes, key=lambda it: it.dollars)
        show_mixes(out, arguments, question, fleet.per_replica, cheap, best)


def show_mixes(
    out: Any, arguments: Namespace, question: Question, replica: Fleet, quote: Quote, best: Candidate
) -> None:
    """How much of the demand to own, how much to let overflow."""
    demand, size = arguments.demand, len(set(best.layout.gpus)) // units(best)
    rows = mixes(replica, quote, demand, arguments.max_load)
    cheapest = min(rows, key=lambda it: it.dollars)
    mean = sum(demand) / len(demand)
    made = table(
        f"demand: {mean:,.2f} requests/s on average, {max(demand):,.2f} at most",
        "owned",
        "busy",
        "rent $/h",
        "API $/h",
        "sum $/h",
        "$/month",
    )
    for it in rows:
        gpus = it.replicas * size
        what = (
            f"{it.replicas} replica{'s' * (it.replicas != 1)} ({counted(gpus, question)})"
            if it.replicas
            else "all over the API"
        )
        mark = " <- cheapest" if it is cheapest else ""
        made.add_row(
            what + mark,
            f"{it.owned:.0%}",
            f"{it.utilization:.0%}" if it.replicas else "",
            *(f"{dollars:,.2f}" for dollars in (it.rent_dollars, it.api_dollars, it.dollars)),
            f"{it.dollars * HOURS_PER_MONTH:,.0f}",
        )
    out.print(made)
    out.print(
        f"a replica takes {arguments.max_load:.0%} of its {replica.requests_per_s:,.2f} requests/s before requests "
        f"overflow to {named(quote)}; weft simulate tells the waiting times at such a load",
        soft_wrap=True,
    )


def counted(devices: int, question: Question) -> str:
    kind = "CPU" if question.cluster.on_cpu else "GPU"
    return f"{devices} {kind}{'s' * (devices != 1)}"


def named(quote: Quote) -> str:
    """The seller, and the model without whoever made it."""
    return f"{quote.provider}/{quote.name.rpartition('/')[2]}" if quote.provider else quote.name


def money(dollars: float) -> str:
    """Cents matter, and below them two digits."""
    return f"{dollars:,.2f}" if dollars >= 0.1 else f"{dollars:.2g}"
