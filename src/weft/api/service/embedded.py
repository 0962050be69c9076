"""A Service in this process without an HTTP server: for offline batches, and for replicas of Ray Serve."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from weft.api.observe.tracing import request_spans
from weft.api.service.service import Service
from weft.checkpoint.checkpoint import Checkpoint
from weft.config import EngineConfig
from weft.engine.cluster.assembly import AnyAssembly, assemble
from weft.engine.frontend.frontend import Frontend
from weft.engine.frontend.text_tools import TextTools
from weft.engine.replicas.engine_nodes import EngineNodes
from weft.engine.replicas.opening import open_model, plan_engines
from weft.engine.replicas.replicas import start_engine
from weft.http.options import ServeOptions
from weft.machine.hardware.host import Host, probe_host


class OpenedModel(NamedTuple):
    """A model that is ready to be planned and started here."""

    checkpoint: Checkpoint
    text_tools: TextTools
    host: Host
    assembly: AnyAssembly | None


def open_for_service(config: EngineConfig) -> OpenedModel:
    """Open the model, downloading it if needed, and the nodes that run it.

    It blocks, so that Ctrl-C ends a download. Raises ConfigError, ModelError and PlanError.
    """
    checkpoint, text_tools = open_model(config)
    host = probe_host()
    return OpenedModel(checkpoint, text_tools, host, assemble(config, checkpoint, host))


@contextlib.asynccontextmanager
async def run_service(config: EngineConfig, options: ServeOptions, opened: OpenedModel) -> AsyncIterator[Service]:
    """Start the engine, which ends with the block. Raises PlanError, ConfigError and EngineError."""
    checkpoint, text_tools, host, assembly = opened
    planned = plan_engines(config, checkpoint, host, assembly, whole=True)
    nodes = EngineNodes(config, checkpoint, assembly, planned) if assembly else None
    engine = await start_engine(planned, config, stall_s=options.progress_timeout, nodes=nodes)
    try:
        frontend = Frontend.for_engine(config, checkpoint, text_tools, max_model_len=engine.plan.max_model_len)
        capacity = sum(one.plan.max_running for one in planned) + config.max_num_queued_reqs
        service = Service(engine, frontend, options, model=config.model, capacity=capacity)
        with request_spans(options, service.names[0]) as service.spans:
            yield service
    finally:
        await engine.close()
