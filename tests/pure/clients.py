"""The official clients of the APIs, whose requests go straight to the application."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai

from tests.pure.worlds import World

# OpenAI's client changed its HTTP library between two of its versions.
HTTP = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])


@asynccontextmanager
async def openai_client(world: World, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of a world."""
    http = HTTP.AsyncClient(transport=HTTP.ASGITransport(app=world.app))
    async with openai.AsyncOpenAI(base_url="http://weft/v1", api_key=key, http_client=http, max_retries=0) as api:
        yield api
