"""weft serve [MODEL]: the HTTP server of a model, of a file's models, or of all models on this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from weft.cli.flags.command_flags import ServeArguments
from weft.cli.flags.flags import engine_config, serve_options
from weft.cli.parser import UsageError

if TYPE_CHECKING:
    from weft.fleet.hosting.model_set import ModelSet

OLLAMA_PORT = 11434


def main(arguments: ServeArguments) -> int:
    """Serve until a signal ends the process; on another node than the first, run ranks until the head ends."""
    models = model_set(arguments)
    if models is not None:
        return serve_models(arguments, models)
    from weft.engine.cluster.settings import node_settings, served_config

    config = served_config(engine_config(arguments), os.environ)
    settings = node_settings(config, os.environ)
    if settings and settings.node:
        from weft.engine.cluster.node import run_node

        run_node(config, settings)
        return 0
    from weft.api.server.server import serve

    serve(config, serve_options(arguments, os.environ))
    return 0


def model_set(arguments: ServeArguments) -> ModelSet | None:
    """The models of the file, or without a model all on this machine; None for one model.

    Raises UsageError and ConfigError.
    """
    from weft.cli.serve import set_file

    path, named = arguments.config, arguments.model
    models = set_file.read_model_set(path) if path is not None else None
    if models is not None and named:
        raise UsageError(
            f"{path} has several models, and the command line names {named!r}; leave one of them out",
            code="model-beside-set",
        )
    if models is None and not named:
        from weft.api.ollama.keep_alive import default_keep_alive
        from weft.fleet.hosting.catalogue import fetched_models

        models = fetched_models(default_keep_alive(os.environ))
        if not models.entries:
            raise UsageError(
                "which model? None is on this machine; `weft pull` fetches one, or for example: weft serve demo",
                code="model-missing",
            )
    if models is not None:
        set_file.check_front_flags(arguments.engine, models.source)
    return models


def serve_models(arguments: ServeArguments, models: ModelSet) -> int:
    """Serve several models at one address: from the flags, the file, or OLLAMA_HOST."""
    from weft.fleet.hosting.server import serve_set

    options = serve_options(arguments, os.environ)
    if "port" not in arguments.given and models.port is not None:
        options = replace(options, port=models.port)
    elif arguments.given.isdisjoint(("port", "host")) and (address := os.environ.get("OLLAMA_HOST")):
        host, port = ollama_address(address)
        options = replace(options, host=host, port=port)
    serve_set(models, options)
    return 0


def ollama_address(address: str) -> tuple[str, int]:
    """Host and port of OLLAMA_HOST, as in 0.0.0.0:11434, :8000 or http://10.0.0.1. Raises UsageError."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        port = parts.port
    except ValueError:
        raise UsageError(
            f"OLLAMA_HOST is {address!r}, which is no address; write it as 127.0.0.1:11434", code="invalid-ollama-host"
        ) from None
    return parts.hostname or "127.0.0.1", OLLAMA_PORT if port is None else port
