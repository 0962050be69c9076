"""Weft's HTTP server over an engine that answers at once: `weft_end.py PORT`, with the demo's tokenizer."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[4]))

from scripts.programs.bench.front_ends.load import SAID
from tests.pure.worlds import FakeEngine
from weft.api.server import server
from weft.api.service.service import Service
from weft.config import EngineConfig
from weft.engine.core.request import Output, Request
from weft.engine.frontend.frontend import Frontend
from weft.engine.replicas.opening import open_model
from weft.http import listen
from weft.http.admission import ConnectionLimits
from weft.http.options import ServeOptions

CAPACITY, LENGTH = 256, 2048


class InstantEngine(FakeEngine):
    """The tests' engine without its memory of all requests, through which the garbage collector would go."""

    def submit(self, requests: Sequence[Request]) -> AsyncGenerator[Output, None]:
        outputs = super().submit(requests)
        self.requests.clear()
        return outputs


async def serve(port: int) -> None:
    checkpoint, tools = open_model(EngineConfig(model="demo"))
    assert tools.tokenizer is not None
    ids = tools.tokenizer.encode(SAID)

    def script(request: Request) -> Iterable[Output]:
        most = request.params.max_tokens or LENGTH
        for at in range(most):
            yield Output(request.id, [ids[at % len(ids)]], [None], "length" if at + 1 == most else None)

    shape = checkpoint.shape
    front = Frontend(vocab=shape.vocab, max_model_len=LENGTH, eos=shape.eos, text_tools=tools)
    options = ServeOptions(port=port, host="127.0.0.1")
    service = Service(InstantEngine(script), front, options, model="demo", capacity=CAPACITY)
    with listen.bind(options) as listener:
        made = server.ServingServer(service, listener, asyncio.Event().wait, ConnectionLimits())
        listen.start_listening(listener, options)
        gc.freeze()  # as `weft serve` does
        await made.serve(sockets=[listener])


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
