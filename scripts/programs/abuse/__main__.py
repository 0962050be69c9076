"""`scripts/abuse`: what hostile clients can do to a server, replayed on loopback, beside a neighbour's stream.

Starts the servers itself: `weft serve demo -tp 2 --max-num-batched-tokens 256 --api-key ...`. The flag keeps the steps
of long prompts short, so that what is judged is the server's work on hostile input and not the length of a step, which
the operator chooses. Every load is bounded in count and time. Prints one JSON object on standard output and a table on
standard error. Exit status 1 if a goal is missed, 2 if nothing could be run, 3 if none is missed, but the host is too
busy to show whether all stalls are within the goal.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from ipaddress import ip_address
from urllib.parse import urlsplit

from scripts.programs.abuse import (
    apis,
    bodies,
    cluster,
    connections,
    files,
    grammars,
    killers,
    starts,
    stops,
    storage,
    templates,
)
from scripts.programs.abuse.case import Attack, Case, Served
from scripts.programs.abuse.runner import HEADINGS, Runner
from scripts.programs.abuse.server import Stranger

MODEL = "demo"
FLAGS = ("-tp", "2", "--max-num-batched-tokens", "256")
# Attacks on one server together: connections that need a server of their own come last among theirs.
CASES: tuple[Case, ...] = (
    *sorted(
        (*connections.ATTACKS, *bodies.ATTACKS, *apis.ATTACKS, *grammars.ATTACKS, *templates.ATTACKS, *storage.ATTACKS),
        key=lambda attack: attack.served != Served(),
    ),
    *stops.LIVES,
    *grammars.LIVES,
    *templates.LIVES,
    *killers.LIVES,
    *storage.LIVES,
    *files.LIVES,
    *starts.LIVES,
    *cluster.LIVES,
)


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not without ending its servers
    if arguments.list:
        for case in CASES:
            print(f"{case.name:26} {case.finding}")
        return 0
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only]
    runner = Runner((arguments.model, *FLAGS))
    if arguments.base_url:
        left_out = [case.name for case in cases if not (isinstance(case, Attack) and case.served == Served())]
        cases = [case for case in cases if case.name not in left_out]
        if left_out:
            print(f"left out, for they start servers of their own: {', '.join(left_out)}", file=sys.stderr)
        runner.stranger, runner.key = Stranger(arguments.base_url), arguments.api_key
    print(HEADINGS, file=sys.stderr)
    runner.run_cases(cases)
    report = runner.report()
    print(json.dumps(report, indent=1))
    if not cases:
        return 2
    return 1 if report["missed"] else 3 if report["undecided"] else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/abuse", description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the cases and the findings that they replay")
    parser.add_argument("--only", type=known_cases, metavar="CASE,...", help="only these cases")
    parser.add_argument("--model", default=MODEL, help="model of the servers (default: %(default)s)")
    parser.add_argument(
        "--base-url",
        type=loopback,
        metavar="URL",
        help="attack this server of this machine in place of own ones; cases that start and end servers are left out",
    )
    parser.add_argument("--api-key", help="key of the server at --base-url")
    return parser.parse_args()


def known_cases(value: str) -> list[str]:
    names, known = value.split(","), [case.name for case in CASES]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is no case; scripts/abuse --list names them")
    return names


def loopback(value: str) -> tuple[str, int]:
    """Host and port of a URL of this machine; nothing else is attacked."""
    try:
        url = urlsplit(value if "//" in value else f"//{value}")
        host = "127.0.0.1" if url.hostname == "localhost" else str(url.hostname)
        if not ip_address(host).is_loopback:
            raise argparse.ArgumentTypeError(f"{value}: only a server of this machine is attacked, at 127.0.0.1")
        return host, url.port or 80
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value}: {error}; give http://127.0.0.1:PORT") from None


if __name__ == "__main__":
    sys.exit(main())
