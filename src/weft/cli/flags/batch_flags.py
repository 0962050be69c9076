"""Flags of weft batch that the engine does not have."""

from __future__ import annotations

from weft.cli.flags.flags import SERVER, Flag

BATCH = (
    Flag(
        name="ray",
        parse=None,
        help="answer on the engines of a Ray cluster: the one at RAY_ADDRESS, one that runs here, or a local one. "
        "--data-parallel-size is their number",
    ),
)
NAMES = (
    "served-model-name",
    "max-body-bytes",
    "default-chat-template-kwargs",
    "response-role",
    "tool-call-parser",
    "reasoning-parser",
)
# Options of the server that change answers.
ANSWERS = tuple(flag for flag in SERVER if flag.name in NAMES)
