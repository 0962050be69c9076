"""weft cost MODEL: dollars per million tokens on own GPUs and from APIs, and the cheapest mix of both."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from weft.checkpoint.architectures.model import Model
from weft.checkpoint.hub import model_names
from weft.checkpoint.names import gguf_reference
from weft.cli.flags.cost_flags import CostArguments
from weft.cli.parser import UsageError
from weft.cli.plan_question import NOTHING_FITS, build_question, find_model
from weft.cli.tables import NARROW, console, figures_table
from weft.errors import ConfigError
from weft.planner.prices import api_prices, economics
from weft.planner.prices.api_prices import Quote, TokenUsage
from weft.planner.prices.economics import Mix, RentedReplicas
from weft.planner.question import Question
from weft.planner.search.ranking import Candidate
from weft.planner.search.search import search

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SELLERS = 5  # cheapest providers of the model itself
HOURS_PER_MONTH = 365.25 * 24 / 12
STEPS = (1.0, 0.5, 0.25, 0.1)  # shares of the full load that are shown besides --utilization


def main(arguments: CostArguments) -> int:
    """Print the comparison; return 3 if the model does not fit the hardware."""
    model = find_model(arguments.model, arguments.subject.source)
    question = build_question(arguments.subject, model)
    if question.price is None:
        raise UsageError(
            "what does a GPU cost? Give dollars per GPU and hour, as in --price 2.49", code="price-missing"
        )
    best = search(question).best
    if best is None:
        print(f"{model.name} does not fit this hardware; weft plan shows why", file=sys.stderr)
        return NOTHING_FITS
    fleet = rented_fleet(question, best)
    quotes = api_quotes(arguments, model, request_usage(question, arguments.cached))
    if arguments.json:
        print(json.dumps(as_json(arguments, question, best, fleet, quotes)))
    else:
        print_comparison(arguments, question, model, best, fleet, quotes)
    return 0


def rented_fleet(question: Question, best: Candidate) -> RentedReplicas:
    """The candidate as a fleet of GPUs that are paid for by the hour."""
    assert question.price is not None
    tokens = best.predicted.output_tok_s
    return RentedReplicas(
        dollars_per_hour=question.price * best.layout.gpu_count(question.cluster),
        requests_per_s=tokens / question.workload.output_len,
        tokens_per_s=tokens,
        replicas=rentable_units(best),
    )


def rentable_units(best: Candidate) -> int:
    """Number of parts that can be rented separately: the replicas, or 1 if they share their experts."""
    layout = best.layout
    return layout.parallelism.engines


def request_usage(question: Question, cached: float) -> TokenUsage:
    """Tokens of the mean request; `cached` is the share of its prompt that an API serves from its cache."""
    work = question.workload
    return TokenUsage(work.input_len, round(work.input_len * cached), work.output_len)


def api_quotes(arguments: CostArguments, model: Model, each: TokenUsage) -> list[Quote]:
    """Prices of a request: of the APIs that the flags name, else of all APIs that sell the model.

    Raises ConfigError if no provider sells the model and --demand needs an API.
    """
    quotes = [api_prices.find_quote(name, each) for name in arguments.against]
    if arguments.api_price is not None:
        quotes.append(api_prices.stated_quote(arguments.api_price, each))
    if quotes:
        return quotes
    # Sellers name the whole model, and not a file of it.
    reference = gguf_reference.parse_address(model.name)
    name = (model_names.whole_model(reference) if reference else None) or model.name
    sellers = api_prices.find_quotes(name, each)[:SELLERS]
    if not sellers and arguments.demand is not None:
        raise ConfigError(
            f"Weft knows no API that sells {model.name}; name another model, as in --against gpt-4o-mini, or give "
            "prices, as in --api-price 0.15/0.60",
            code="no-api-price",
        )
    return sellers


def compared_mixes(replica: RentedReplicas, quote: Quote, demand: tuple[float, ...], max_load: float) -> list[Mix]:
    """No own replicas, the cheapest mix, and enough replicas for all requests: in this order, without repetition."""
    best = economics.cheapest_mix(replica, quote.dollars, demand, max_load)
    counts = dict.fromkeys((0, best.replicas, economics.replicas_for_peak(replica, demand, max_load)))
    return [economics.rent_and_api_mix(replica, quote.dollars, demand, count, max_load) for count in counts]


def as_json(
    arguments: CostArguments, question: Question, best: Candidate, fleet: RentedReplicas, quotes: list[Quote]
) -> dict[str, Any]:
    """The comparison as JSON: money in dollars, times in hours, loads in requests per second."""
    work, demand = question.workload, arguments.demand
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
                "mixes": mixes_json(fleet, quote, demand, arguments.max_load) if demand else [],
            }
            for quote in quotes
        ],
    }


def mixes_json(fleet: RentedReplicas, quote: Quote, demand: tuple[float, ...], max_load: float) -> list[dict[str, Any]]:
    """The compared mixes as JSON."""
    mixes = compared_mixes(fleet.per_replica, quote, demand, max_load)
    return [{**msgspec.structs.asdict(mix), "dollars": mix.dollars} for mix in mixes]


def print_comparison(
    arguments: CostArguments,
    question: Question,
    model: Model,
    best: Candidate,
    fleet: RentedReplicas,
    quotes: list[Quote],
) -> None:
    """Print the comparison as text."""
    out = console()
    out.width = max(out.width, NARROW)
    work, band = question.workload, best.predicted.error_band
    gpus = device_count(best.layout.gpu_count(question.cluster), question)
    out.print(
        f"{model.name} as {best.cut} on {gpus} at ${question.price:g} an hour each: "
        f"${fleet.dollars_per_hour:,.2f} an hour for up to {fleet.tokens_per_s:,.0f} tok/s, "
        f"{fleet.requests_per_s:,.2f} requests/s of {work.input_len:,} + {work.output_len:,} tokens "
        f"(predicted; error up to {100 * band:.0f} %)",
        soft_wrap=True,
    )
    shares = sorted({*STEPS, arguments.utilization}, reverse=True)
    own = figures_table("own GPUs used", *(f"{share:.0%}" for share in shares))
    own.add_row("your $/M answer", *(money(fleet.dollars_per_million(share)) for share in shares))
    out.print(own)
    if not quotes:
        out.print("Weft knows no API that sells this model; --against NAME or --api-price IN/OUT compares with one")
        return
    out.print(api_table(fleet, quotes, arguments.utilization, work.output_len))
    sources = ", ".join(dict.fromkeys(quote.source for quote in quotes))
    out.print(
        f"$/M answer: dollars per million answer tokens, with the cost of their prompts; API prices: {sources}",
        soft_wrap=True,
    )
    if arguments.demand is not None:
        cheapest = min(quotes, key=lambda quote: quote.dollars)
        print_mixes(out, arguments.demand, arguments.max_load, question, fleet.per_replica, cheapest, best)


def api_table(fleet: RentedReplicas, quotes: Sequence[Quote], utilization: float, output_len: int) -> Table:
    """The prices of APIs, and the use from which own GPUs cost less."""
    table = figures_table("API", "$/M answer", "for prompts", "break-even", f"at {utilization:.0%} use")
    for quote in quotes:
        even = fleet.break_even(quote.dollars)
        million = quote.dollars * 1e6 / output_len
        prompts = 1 - quote.output_dollars / quote.dollars
        saved = million / fleet.dollars_per_million(utilization)
        verdict = f"own {saved:,.1f}x cheaper" if saved >= 1 else f"API {1 / saved:,.1f}x cheaper"
        use = f"{even:.1%} use" if even <= 1 else f"never: {even:.2f}x the API"
        table.add_row(seller_name(quote), money(million), f"{prompts:.0%}", use, verdict)
    return table


def print_mixes(
    out: Console,
    demand: tuple[float, ...],
    max_load: float,
    question: Question,
    replica: RentedReplicas,
    quote: Quote,
    best: Candidate,
) -> None:
    """Print the cost of own replicas together with an API for the demand."""
    size = best.layout.gpu_count(question.cluster) // rentable_units(best)
    mixes = compared_mixes(replica, quote, demand, max_load)
    cheapest = min(mixes, key=lambda mix: mix.dollars)
    mean = sum(demand) / len(demand)
    table = figures_table(
        f"demand: {mean:,.2f} requests/s on average, {max(demand):,.2f} at most",
        "owned",
        "used",
        "rent $/h",
        "API $/h",
        "sum $/h",
        "$/month",
    )
    for mix in mixes:
        name = "everything to the API"
        if mix.replicas:
            name = f"{mix.replicas} replica{'s' * (mix.replicas != 1)} ({device_count(mix.replicas * size, question)})"
        table.add_row(
            f"{name} <- cheapest" if mix is cheapest else name,
            f"{mix.owned:.0%}",
            f"{mix.utilization:.0%}" if mix.replicas else "",
            *(f"{dollars:,.2f}" for dollars in (mix.rent_dollars, mix.api_dollars, mix.dollars)),
            f"{mix.dollars * HOURS_PER_MONTH:,.0f}",
        )
    out.print(table)
    filled = max_load * replica.requests_per_s
    out.print(
        f"Each replica is filled to {max_load:.0%} ({filled:,.2f} requests/s); the other requests go to "
        f"{seller_name(quote)}. weft simulate shows the waiting times at such a load",
        soft_wrap=True,
    )


def device_count(devices: int, question: Question) -> str:
    """ "4 GPUs"."""
    kind = "CPU" if question.cluster.on_cpu else "GPU"
    return f"{devices} {kind}{'s' * (devices != 1)}"


def seller_name(quote: Quote) -> str:
    """ "provider/model", without the maker of the model."""
    return f"{quote.provider}/{quote.name.rpartition('/')[2]}" if quote.provider else quote.name


def money(dollars: float) -> str:
    """Dollars with cents; below 10 cents with two significant digits."""
    return f"{dollars:,.2f}" if dollars >= 0.1 else f"{dollars:.2g}"
