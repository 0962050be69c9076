"""Process of one model of a set: `python -m weft.cli.serve.member LIFELINE NAME`, started by `fleet.hosting.member`.

The arguments of `weft serve` come through the lifeline, as a line of JSON. After that the socket is only watched: when
its other end closes, the process ends at once.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from dataclasses import replace

from weft.engine.processes.lifeline import die_with


def main() -> int:
    """Serve one model until a signal, or the end of the front."""
    from weft.cli.dispatch import report
    from weft.cli.main import INTERRUPTED
    from weft.errors import WeftError

    lifeline = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(lifeline.fileno(), False)
    line = lifeline.makefile("rb", buffering=0).readline()
    if not line:
        return 1  # the front has gone
    die_with(lifeline.fileno())
    if select.select([lifeline], [], [], 0)[0]:
        return 1  # it went before the system was told to watch
    try:
        serve_model(json.loads(line))
    except WeftError as error:
        return report(error)
    except KeyboardInterrupt:
        return INTERRUPTED  # a second signal: the front has waited for the requests long enough
    return 0


def serve_model(argv: list[str]) -> None:
    """Run `weft serve` with arguments, without a run file: `weft ps` shows the set. Raises WeftError."""
    from weft import logs
    from weft.api.server.server import serve
    from weft.cli.commands import COMMANDS
    from weft.cli.dispatch import expand_model_name
    from weft.cli.flags.command_flags import ServeArguments
    from weft.cli.flags.flags import engine_config, serve_options
    from weft.cli.parser import parse_command

    command = COMMANDS["serve"]
    logs.configure(command.log_level)
    arguments: ServeArguments = expand_model_name(command, parse_command(command, argv))
    options = replace(serve_options(arguments, os.environ), announces=False, behind_front=True)
    serve(engine_config(arguments), options)


if __name__ == "__main__":
    sys.exit(main())
