"""Flags of weft gateway. Left out, the file of --config counts, and then the defaults of gateway.config."""

from __future__ import annotations

from weft.cli.flags import values
from weft.cli.flags.flags import Flag
from weft.cli.flags.simulate_flags import POLICY_NAMES, policy

GATEWAY_FLAGS = (
    Flag(
        name="upstream",
        repeated=True,
        metavar="URL",
        help="a server that the gateway sends requests to, as in http://10.0.1.10:8000",
    ),
    Flag(name="host", metavar="HOST", help="address to listen on; 0.0.0.0 means all", config_default="127.0.0.1"),
    Flag(name="port", parse=values.size, help="port to listen on; 0 picks a free one", config_default=8080),
    Flag(
        name="policy",
        parse=policy,
        choices=POLICY_NAMES,
        help="rule that picks the upstream for a request",
        config_default=POLICY_NAMES[0],
    ),
    Flag(name="keys", metavar="FILE", help="YAML list of the keys that clients must send"),
    Flag(name="access-log", metavar="FILE", help="append a line of JSON for each request; - is standard output"),
    Flag(
        name="max-body-bytes",
        parse=values.at_least(1),
        help="maximum size of a request body",
        config_default="64 MiB",
    ),
    Flag(
        name="max-held-bytes",
        parse=values.at_least(1),
        help="maximum size of all request bodies that are held together",
        config_default="512 MiB",
    ),
    Flag(name="ssl-keyfile", metavar="FILE", help="key for HTTPS"),
    Flag(name="ssl-certfile", metavar="FILE", help="certificate for HTTPS"),
    Flag(
        name="shutdown-timeout",
        parse=float,
        default=30.0,
        metavar="S",
        help="seconds that running requests have left after SIGTERM",
    ),
)
