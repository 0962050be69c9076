"""weft serve MODEL: the HTTP server."""

from __future__ import annotations

import os
from argparse import Namespace

from weft.cli.flags import engine_config, serve_options


def main(arguments: Namespace) -> int:
    """Serve until a signal ends the process; on another node than the first, run ranks until the head ends."""
    from weft.cluster.settings import node_settings, served_config

    config = served_config(engine_config(arguments), os.environ)
    settings = node_settings(config, os.environ)
    if settings and settings.node:
        from weft.cluster.node import run_node

        run_node(config, settings)
        return 0
    from weft.serving.server import serve

    serve(config, serve_options(arguments, os.environ))
    return 0
