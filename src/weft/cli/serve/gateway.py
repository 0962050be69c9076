"""weft gateway: one address for several servers."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from weft.cli.flags.flags import given_values
from weft.cli.flags.gateway_flags import GATEWAY_FLAGS


def main(arguments: Namespace) -> int:
    """Serve until a signal ends the process."""
    from weft.fleet.gateway.server import run_gateway
    from weft.fleet.upstreams.config import make_config, read_config

    flags: dict[str, Any] = given_values(arguments, GATEWAY_FLAGS)
    shutdown_timeout = flags.pop("shutdown_timeout")
    if "upstream" in flags:
        flags["upstreams"] = [{"url": url} for url in flags.pop("upstream")]
    path = getattr(arguments, "config", None)
    config = read_config(path, flags) if path is not None else make_config(flags)
    run_gateway(config, os.environ.get("WEFT_ADMIN_KEY"), shutdown_timeout)
    return 0
