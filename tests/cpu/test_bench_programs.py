"""Benchmarks that replace a function or a class of the product by its name: the name is the one that is used."""

from __future__ import annotations

import asyncio

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from scripts.programs.bench.connection_cost import __main__ as connection_cost
from scripts.programs.bench.latent_context import __main__ as latent_context
from weft.http import server
from weft.http.connection import Connection

pytestmark = pytest.mark.long


def test_every_form_of_latent_attention_computes_a_step() -> None:
    times = latent_context.time_steps(1, 256, 1, transformers=False)
    assert set(times["step_ms"]) == {"latents", "latents, layer by layer", "expanded anew", "kept"}


def test_the_protocol_that_is_measured_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def protocol(*given: object, **named: object) -> asyncio.Protocol:
        made.append(connection_cost.plain(HttpToolsProtocol, *given, **named))
        return made[-1]

    monkeypatch.setattr(connection_cost, "MEASURE_S", 0.1)
    monkeypatch.setattr(server, "Connection", Connection)  # put back afterwards
    rates = asyncio.run(connection_cost.measure(protocol))
    assert made and all(rates.values())
