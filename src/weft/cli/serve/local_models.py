"""weft pull, ls, rm: the models on this machine. weft stop: a server on it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from weft.cli.flags.command_flags import ListArguments, PullArguments, RemoveArguments
from weft.cli.flags.declared import Arguments
from weft.cli.parser import UsageError
from weft.errors import ModelError
from weft.formatting import format_bytes


def main(arguments: Arguments) -> int:
    """Run one of the commands."""
    command, positional = arguments.command, arguments.argument
    most = {"pull": 1, "stop": 1, "rm": None}.get(command, 0)
    if (most is None and not positional) or (most and len(positional) != most):
        raise UsageError(f"weft {command} needs the name of a model", code="model-missing")
    match arguments:
        case PullArguments():
            return pull(positional[0], arguments.hf_token, arguments.download_dir)
        case ListArguments():
            return list_models(arguments.download_dir, as_json=arguments.json)
        case RemoveArguments():
            return remove(positional, arguments.download_dir)
    return stop(positional[0])


def pull(name: str, token: str | None, folder: str | None) -> int:
    """Fetch a model, and print where it is."""
    from weft.checkpoint.hub.pull import pull_model

    print(pull_model(name, token=token, folder=folder))
    return 0


def list_models(folder: str | None, *, as_json: bool) -> int:
    """Print the models on this machine."""
    from weft.checkpoint.hub import local_models

    models = local_models.list_models(folder)
    if as_json:
        rows = [
            {
                "name": model.name,
                "format": model.format,
                "quantization": model.quantization or None,
                "bytes": model.nbytes,
                "modified": int(model.modified_s),
                "files": model.files,
            }
            for model in models
        ]
        print(json.dumps({"models": rows}))
        return 0
    cells = [
        [model.name, format_bytes(model.nbytes), model.quantization or "-", shown_date(model.modified_s)]
        for model in models
    ]
    print_table(["NAME", "SIZE", "QUANTISATION", "FETCHED"], cells, "no models are here; `weft pull MODEL` fetches one")
    return 0


def remove(names: Sequence[str], folder: str | None) -> int:
    """Remove models from this machine; all of them must be here."""
    from weft.checkpoint.hub import local_models

    models = []
    for name in names:
        model = local_models.find_model(name, folder)
        if model is None:
            raise ModelError(f"there is no model {name!r} here; `weft ls` lists the models here", code="no-local-model")
        models.append(model)
    for model in models:
        local_models.remove_model(model)
        print(f"removed {model.name} ({format_bytes(model.nbytes)})")
    return 0


def stop(name: str) -> int:
    """Stop the servers of a model: running requests get --shutdown-timeout seconds."""
    from weft.api.service.run_files import running_servers
    from weft.checkpoint.hub.model_names import tagged

    servers = running_servers()
    meant = [server for server in servers if tagged(name) in map(tagged, server.names)]
    if not meant:
        known = ", ".join(name for server in servers for name in server.names) or "none runs"
        raise ModelError(f"no server of {name!r} runs on this machine; servers: {known}", code="no-such-server")
    for server in meant:
        try:
            server.stop()
        except ProcessLookupError:
            continue
        print(f"stopping {', '.join(server.names)} at {server.url} (process {server.pid})")
    return 0


def shown_date(seconds: float) -> str:
    """Date and time of seconds since 1970, here."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def print_table(head: list[str], rows: list[list[str]], if_empty: str) -> None:
    """Print rows under a head, in columns as wide as their longest cell."""
    if not rows:
        print(if_empty)
        return
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
