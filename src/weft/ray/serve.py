"""Ray Serve: `weft.ray.serve:build` makes an application whose replicas are engines with the server's whole API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib import import_module
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from weft import logs
from weft.api.server.app import create_app
from weft.api.service.embedded import open_for_service, run_service
from weft.config import EngineConfig
from weft.engine.client.arguments import engine_config
from weft.errors import ConfigError
from weft.http.errors import HttpError, api_path, error_response
from weft.http.options import ServeOptions
from weft.ray.resources import actor_config, actor_resources, import_library

DEPLOYMENT = "weft"  # name of the deployment, by which weft gateway knows it
# Their files lie on one replica's disk, and the next request asks another one.
NOT_HERE = ("/v1/files", "/v1/batches")
STOP_S = 30.0  # seconds that Ray Serve lets running requests have


class ServeArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of the application.

    `engine` are the keywords of `weft.LLM`, such as tensor_parallel_size. `server` are fields of ServeOptions,
    such as tool_call_parser. `autoscaling_config` is Ray Serve's, such as {"min_replicas": 1, "max_replicas": 4};
    `deployment` are other options of its deployments, such as num_replicas or ray_actor_options.
    """

    model: str
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}
    autoscaling_config: dict[str, Any] | None = None
    deployment: dict[str, Any] = {}


def build(arguments: Mapping[str, Any]) -> Any:
    """The Ray Serve application of a model. Raises ConfigError for a wrong argument, or if Ray Serve is missing."""
    serve = import_library("serve")
    try:
        wanted = msgspec.convert(dict(arguments), ServeArguments)
        options = msgspec.convert({"served_model_name": [wanted.model], **wanted.server}, ServeOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"arguments of weft.ray.serve:build: {error}", code="invalid-argument") from None
    if options.api_key or options.admin_key:
        raise ConfigError(
            "api_key and admin_key would be kept in the Ray cluster's state; leave them out, and set VLLM_API_KEY in "
            "the replicas' environment, that is, of ray start on each node",
            code="key-in-cluster",
        )
    config = actor_config(engine_config(wanted.model, wanted.engine))
    deployment = serve.deployment(name=DEPLOYMENT)(serve.ingress(ReplicaRouter())(RayReplica))
    return deployment.options(**deployment_options(wanted, config)).bind(
        msgspec.json.encode(config), msgspec.json.encode(options)
    )


def deployment_options(wanted: ServeArguments, config: EngineConfig) -> dict[str, Any]:
    """Options of the deployment: the given options, over options that suit an engine."""
    ray: Any = import_module("ray")
    gpus = ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0
    options: dict[str, Any] = {
        "max_ongoing_requests": 2 * config.max_num_seqs,
        "graceful_shutdown_timeout_s": STOP_S,
        "ray_actor_options": actor_resources(config, gpus),
    }
    if wanted.autoscaling_config is not None:
        options["autoscaling_config"] = wanted.autoscaling_config
    return options | wanted.deployment


class RayReplica:
    """One engine, in the actor of a Ray Serve replica."""

    async def __init__(self, config: bytes, options: bytes) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        logs.configure("INFO")
        engine = msgspec.json.decode(config, type=EngineConfig)
        server = with_key(msgspec.json.decode(options, type=ServeOptions), os.environ)
        opened = await asyncio.to_thread(open_for_service, engine)
        self._stack = AsyncExitStack()
        self.service = await self._stack.enter_async_context(run_service(engine, server, opened))
        self.api: ASGIApp = create_app(self.service)

    def check_health(self) -> None:
        """Raise RuntimeError if the engine is dead or stalled: Ray Serve starts the replica again."""
        reason = str(self.service.engine.failure or "") or self.service.unhealthy_reason()
        if reason:
            raise RuntimeError(reason)

    async def close(self) -> None:
        """End the engine."""
        await self._stack.aclose()


def with_key(options: ServeOptions, environment: Mapping[str, str]) -> ServeOptions:
    """The options with the VLLM_API_KEY of the replica's environment, if they have no key."""
    key = environment.get("VLLM_API_KEY", "").strip()
    return replace(options, api_key=(key,)) if key and not options.api_key else options


class ReplicaRouter:
    """The ASGI application that Ray Serve calls in each replica's process: the API of the engine there."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http" and api_path(scope).startswith(NOT_HERE):
            error = HttpError(
                404, "replicas of Ray Serve keep no files; weft batch --ray answers them", code="not-here"
            )
            await error_response(error, api_path(scope))(scope, receive, send)
        else:
            await self._replica().api(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """End the engine with the application; it has started before."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._replica().close()
        await send({"type": "lifespan.shutdown.complete"})

    def _replica(self) -> RayReplica:
        """The replica of this process, once it has started."""
        replica: RayReplica = import_library("serve").get_replica_context().servable_object
        return replica
