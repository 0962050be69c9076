"""`scripts/bench front-ends`: the load, on Weft's server over an engine that answers at once."""

from __future__ import annotations

import asyncio

from scripts.programs.bench.front_ends import load
from tests.pure.worlds import FakeEngine, World, saying
from weft.api.server import server
from weft.http import listen
from weft.http.admission import ConnectionLimits

TOKENS = 5


async def test_answers_and_their_events_are_counted() -> None:
    world = World(FakeEngine(saying("a" * 99)), max_model_len=1024, port=0, served_model_name=["demo"])
    with listen.bind(world.service.options) as listener:
        made = server.ServingServer(world.service, listener, asyncio.Event().wait, ConnectionLimits())
        listen.start_listening(listener, world.service.options)
        running = asyncio.create_task(made.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        await load.wait_until_served(port, 5.0, lambda: True)
        whole, _ = await load.saturate(port, 0.02, stream=False, tokens=TOKENS)
        streams, _ = await load.saturate(port, 0.02, stream=True, tokens=TOKENS)
        paced = await load.paced(port, 0.1, 50.0, tokens=TOKENS)
        made.leave()
        await running
    assert len(whole.seconds) >= load.CLIENTS and whole.tokens == TOKENS * len(whole.seconds)
    # An event for each token, and one for the role.
    assert streams.events == (TOKENS + 1) * len(streams.seconds) > 0
    assert len(paced.seconds) == 5 and 0 < paced.percentile(0.5) <= paced.percentile(0.99)
