"""weft serve MODEL: the HTTP server."""

from __future__ import annotations

import os
from argparse import Namespace

from weft.cli.flags import engine_config, serve_options


def main(arguments: Namespace) -> int:
    """Serve until a signal ends the process."""
    from weft.serving.server import serve

    serve(engine_config(arguments), serve_options(arguments, os.environ))
    return 0
