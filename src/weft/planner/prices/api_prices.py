"""API prices: the price of a request at a provider, from the genai-prices library or from the user.

The library includes its table (github.com/pydantic/genai-prices); nothing is fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec

from weft.errors import ConfigError

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, Provider

MILLION = 1e6


class Quote(msgspec.Struct, frozen=True, kw_only=True):
    """The price of one request at a provider, in dollars: for the uncached part of its prompt, for the cached part, and
    for its answer."""

    name: str
    provider: str
    input_dollars: float
    cached_dollars: float
    output_dollars: float
    source: str

    @property
    def dollars(self) -> float:
        return self.input_dollars + self.cached_dollars + self.output_dollars


class TokenUsage(msgspec.Struct, frozen=True):
    """Tokens of one request; `cached` of the input are in the provider's prompt cache."""

    input: int
    cached: int
    output: int


def stated_quote(prices: tuple[float, ...], usage: TokenUsage) -> Quote:
    """A quote from dollars per million tokens: input, output and, if it differs from input, cached input."""
    dollars_in, dollars_out, *dollars_cached = prices
    cached = dollars_cached[0] if dollars_cached else dollars_in
    return Quote(
        name="as stated",
        provider="",
        input_dollars=(usage.input - usage.cached) * dollars_in / MILLION,
        cached_dollars=usage.cached * cached / MILLION,
        output_dollars=usage.output * dollars_out / MILLION,
        source="--api-price",
    )


def find_quote(name: str, usage: TokenUsage) -> Quote:
    """The quote for `model` or `provider/model`. Raises ConfigError with the nearest names for an unknown name."""
    for provider, model in _named(name):
        priced = _quote(provider, model, usage)
        if priced:
            return priced
    known = [f"{provider.id}/{model.id}" for provider in _providers() for model in provider.models]
    bare = {_bare(each): each for each in reversed(known)}
    close = [bare[each] for each in get_close_matches(_bare(name), bare, n=3, cutoff=0.5)]
    hint = f"; nearest: {', '.join(close)}" if close else ""
    raise ConfigError(
        f"no price is known for {name!r}{hint}; or give --api-price IN/OUT in dollars per million tokens",
        code="unknown-api-price",
    )


def find_quotes(name: str, usage: TokenUsage) -> list[Quote]:
    """The quote of every provider that sells the model of this name, in any spelling; the cheapest first."""
    quotes: dict[str, Quote] = {}
    for provider in _providers():
        for model in provider.models:
            if _bare(model.id) != _bare(name) or provider.id in quotes:
                continue
            priced = _quote(provider, model, usage)
            if priced:
                quotes[provider.id] = priced
    return sorted(quotes.values(), key=lambda quote: quote.dollars)


def _named(name: str) -> Iterator[tuple[Provider, ModelInfo]]:
    """Every model that has the name; the name may begin with a provider."""
    providers = _providers()
    maker, slash, short = name.partition("/")
    if slash:
        for provider in providers:
            if provider.id == maker.lower():
                yield from _of_provider(provider, short)
    for spelling in (name, name.lower()):
        for provider in providers:
            model = provider.find_model(spelling)
            if model is not None:
                yield provider, model


def _of_provider(provider: Provider, name: str) -> Iterator[tuple[Provider, ModelInfo]]:
    model = provider.find_model(name)
    if model is not None:
        yield provider, model
    # Names as weft cost prints them, without the organisation that made the model.
    yield from ((provider, other) for other in provider.models if _bare(other.id) == _bare(name))


def _quote(provider: Provider, model: ModelInfo, usage: TokenUsage) -> Quote | None:
    """None if the model is not priced by tokens in and out, or is free (a trial, not an offer)."""
    from genai_prices import Usage as Tokens

    def priced(**tokens: int) -> float:
        # The tier depends on the whole prompt, whichever part of it is priced.
        return float(model.calc_price(Tokens(**tokens), provider).total_price)

    whole = priced(input_tokens=usage.input, cache_read_tokens=usage.cached, output_tokens=usage.output)
    prompt = priced(input_tokens=usage.input, cache_read_tokens=usage.cached, output_tokens=0)
    answer = whole - prompt
    if prompt <= 0 or answer <= 0:
        return None
    uncached = priced(input_tokens=usage.input, cache_read_tokens=0, output_tokens=0)
    read = uncached * (usage.input - usage.cached) / usage.input
    return Quote(
        name=model.id,
        provider=provider.id,
        input_dollars=read,
        cached_dollars=prompt - read,
        output_dollars=answer,
        source=f"genai-prices {version('genai-prices')}",
    )


@cache
def _providers() -> tuple[Provider, ...]:
    from genai_prices import data_snapshot

    return tuple(data_snapshot.get_snapshot().providers)


def _bare(name: str) -> str:
    """Without organisation, case and punctuation: `meta-llama/Llama-3.3-70B-Instruct` is `llama3370binstruct`."""
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower().removesuffix(":free"))
