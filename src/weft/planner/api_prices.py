"""API prices: what providers take for a request, from the genai-prices library or from the user.

The library brings its table along (github.com/pydantic/genai-prices); nothing is fetched.
"""

from __future__ import annotations

import re
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
    """What one request costs at a provider, in dollars: the part of its prompt that is read anew, the part that
    comes from a cache, and its answer."""

    name: str
    provider: str
    input_dollars: float
    cached_dollars: float
    output_dollars: float
    source: str

    @property
    def dollars(self) -> float:
        return self.input_dollars + self.cached_dollars + self.output_dollars


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request; `cached` of the input come from the provider's prompt cache."""

    input: int
    cached: int
    output: int


def stated_quote(prices: tuple[float, ...], usage: Usage) -> Quote:
    """A quote from dollars per million tokens: input, output and, where it differs from input, cached input."""
    dollars_in, dollars_out, *rest = prices
    cached = rest[0] if rest else dollars_in
    return Quote(
        name="as stated",
        provider="",
        input_dollars=(usage.input - usage.cached) * dollars_in / MILLION,
        cached_dollars=usage.cached * cached / MILLION,
        output_dollars=usage.output * dollars_out / MILLION,
        source="--api-price",
    )


def find_quote(name: str, usage: Usage) -> Quote:
    """The quote for `model` or `provider/model`. Raises ConfigError with the nearest names for one that is unknown."""
    for provider, model in _named(name):
        found = _quote(provider, model, usage)
        if found:
            return found
    known = [f"{provider.id}/{model.id}" for provider in _providers() for model in provider.models]
    bare = {_bare(each): each for each in reversed(known)}
    close = [bare[each] for each in get_close_matches(_bare(name), bare, n=3, cutoff=0.5)]
    hint = f"; nearest: {', '.join(close)}" if close else ""
    raise ConfigError(f"no price is known of {name!r}{hint}; or give --api-price IN/OUT in dollars per million tokens")


def find_quotes(name: str, usage: Usage) -> list[Quote]:
    """Of every provider that sells the model of this name, whatever its spelling; the cheapest first."""
    wanted, found = _bare(name), {}
    for provider in _providers():
        for model in provider.models:
            if _bare(model.id) == wanted and provider.id not in found and (priced := _quote(provider, model, usage)):
                found[provider.id] = priced
    return sorted(found.values(), key=lambda it: it.dollars)


def _named(name: str) -> list[tuple[Provider, ModelInfo]]:
    """Every model that answers to the name; a provider may be said before it."""
    first, slash, rest = name.partition("/")
    providers = _providers()
    chosen = [provider for provider in providers if slash and provider.id == first.lower()]
    found = [(provider, provider.find_model(rest)) for provider in chosen]
    # As weft cost prints it, without who made the model.
    found += [(provider, model) for provider in chosen for model in provider.models if _bare(model.id) == _bare(rest)]
    found += [(provider, provider.find_model(ref)) for ref in (name, name.lower()) for provider in providers]
    return [(provider, model) for provider, model in found if model is not None]


def _quote(provider: Provider, model: ModelInfo, usage: Usage) -> Quote | None:
    """None where the model is not priced by tokens in and out, or costs nothing (a trial, not an offer)."""
    from genai_prices import Usage as Tokens

    def priced(**tokens: int) -> float:
        # The tier follows the whole prompt, whichever part of it is asked for.
        return float(model.calc_price(Tokens(**tokens), provider).total_price)

    whole = priced(input_tokens=usage.input, cache_read_tokens=usage.cached, output_tokens=usage.output)
    prompt = priced(input_tokens=usage.input, cache_read_tokens=usage.cached, output_tokens=0)
    answer = whole - prompt
    if prompt <= 0 or answer <= 0:
        return None
    fresh = priced(input_tokens=usage.input, cache_read_tokens=0, output_tokens=0)
    read = fresh * (usage.input - usage.cached) / usage.input
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
