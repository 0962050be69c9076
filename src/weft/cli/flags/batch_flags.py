"""Flags of weft batch that the engine does not have."""

from __future__ import annotations

from typing import Annotated, ClassVar

from weft.cli.flags.declared import Arguments, Group, flag
from weft.cli.flags.flags import EngineFlags, Sampling
from weft.http.options import ServeOptions

# Options of the server that change answers.
ANSWERS = (
    "served-model-name",
    "max-body-bytes",
    "default-chat-template-kwargs",
    "response-role",
    "tool-call-parser",
    "reasoning-parser",
)


class BatchArguments(Arguments):
    """weft batch IN OUT."""

    title: ClassVar = "batch"
    ray: bool = flag(
        False,
        help="answer on the engines of a Ray cluster: the one at RAY_ADDRESS, one that runs here, or a local one. "
        "--data-parallel-size is their number",
    )
    sampling: Sampling
    answers: Annotated[ServeOptions, Group(only=ANSWERS)]
    engine: EngineFlags
