"""Model: what the planner knows of a model before a byte of its weights is read."""

from __future__ import annotations

import msgspec

from weft.architectures.shape import ModelShape


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """`params` are counted without copies of tied weights. `precision` is what the name stands for, in the words of
    `formats.precision`: bf16 where nothing else is said. `source` tells where all this is from; `stored_bytes` is
    what the weights take in the files, where those were looked at."""

    name: str
    shape: ModelShape
    params: int
    precision: str
    source: str
    note: str = ""
    stored_bytes: int | None = None
