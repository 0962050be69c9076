"""Upper limits for the numbers in a checkpoint: above every real model, and far below what would exhaust a machine.

They refuse a damaged or hostile file in one line, before any memory is allocated by its numbers.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path

from weft.errors import ModelError

LAYERS = 10_000  # the deepest published models have fewer than 200
EXPERTS = 100_000  # in a layer; published models have up to 512
POSITIONS = 100_000_000  # tokens of context; published models have up to 10 million
CONFIG_BYTES = 100_000_000  # a config.json or the like, usually some KB; an index of tensors may have 20 MB
TOKENIZER_BYTES = 1_000_000_000  # a vocabulary's file, usually 2 to 35 MB


def check_file(path: Path, most: int | None = None) -> None:
    """Raise ModelError unless `path` is a regular file of at most `most` bytes; OSError if it cannot be inspected.

    Reading a pipe could wait without end, and a device may have no end.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(
            f"{path} is no regular file but a pipe, a device or a directory; fetch the model again",
            code="not-a-regular-file",
        )
    if most is not None and status.st_size > most:
        raise ModelError(
            f"{path} has {status.st_size:,} bytes; at most {most:,} are read; fetch the model again",
            code="file-too-large",
        )


def check_unique(text: bytes, where: str) -> None:
    """Raise ModelError if an object in a JSON text has a key twice: readers differ in the value that they take."""

    def pairs(members: list[tuple[str, object]]) -> None:
        seen: set[str] = set()
        for key, _ in members:
            if key in seen:
                raise ModelError(
                    f"{where} has {key!r:.80} twice, and only one can be meant; fetch it again",
                    code="key-twice-in-json",
                )
            seen.add(key)

    try:
        json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ModelError(
            f"{where} is damaged: its JSON is nested too deeply; fetch it again", code="json-nested-too-deeply"
        ) from error
