"""weft gateway: one address for several servers."""

from __future__ import annotations

import os

from weft.cli.flags.gateway_flags import GatewayArguments


def main(arguments: GatewayArguments) -> int:
    """Serve until a signal ends the process."""
    from weft.fleet.gateway.server import run_gateway
    from weft.fleet.upstreams.config import make_config, read_config

    path, given = arguments.config, arguments.given_values()
    given.pop("shutdown_timeout", None)
    if given.pop("upstream", ()):
        given["upstreams"] = [{"url": url} for url in arguments.upstream]
    config = read_config(path, given) if path is not None else make_config(given)
    run_gateway(config, os.environ.get("WEFT_ADMIN_KEY"), arguments.shutdown_timeout)
    return 0
