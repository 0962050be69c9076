"""Flags of weft gateway. Left out, the file of --config counts, and then the defaults of gateway.config."""

from __future__ import annotations

from typing import ClassVar

from weft.cli.flags import values
from weft.cli.flags.declared import Arguments, flag
from weft.cli.flags.simulate_flags import USUAL_POLICY, policy, policy_names


class GatewayArguments(Arguments):
    """weft gateway."""

    title: ClassVar = "gateway"
    upstream: tuple[str, ...] = flag(
        (),
        repeated=True,
        metavar="URL",
        help="a server that the gateway sends requests to, as in http://10.0.1.10:8000",
    )
    host: str | None = flag(metavar="HOST", help="address to listen on; 0.0.0.0 means all", config_default="127.0.0.1")
    port: int | None = flag(help="port to listen on; 0 picks a free one", config_default=8080)
    policy: str | None = flag(
        parse=policy,
        choices=policy_names,
        help="rule that picks the upstream for a request",
        config_default=USUAL_POLICY,
    )
    keys: str | None = flag(metavar="FILE", help="YAML list of the keys that clients must send")
    access_log: str | None = flag(metavar="FILE", help="append a line of JSON for each request; - is standard output")
    max_body_bytes: int | None = flag(
        parse=values.at_least(1), help="maximum size of a request body", config_default="64 MiB"
    )
    max_held_bytes: int | None = flag(
        parse=values.at_least(1),
        help="maximum size of all request bodies that are held together",
        config_default="512 MiB",
    )
    ssl_keyfile: str | None = flag(metavar="FILE", help="key for HTTPS")
    ssl_certfile: str | None = flag(metavar="FILE", help="certificate for HTTPS")
    shutdown_timeout: float = flag(30.0, metavar="S", help="seconds that running requests have left after SIGTERM")
