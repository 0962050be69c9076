"""Model: the facts about a model that the planner needs; no weights are read for them."""

from __future__ import annotations

import msgspec

from weft.checkpoint.architectures.shape import ModelShape


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model by name.

    - `params`: number of parameters; tied weights count once.
    - `precision`: a name of `checkpoint.quantised.precision`; bf16 unless the model's name or config gives another one.
    - `source`: origin of these facts: a file, a URL or the catalogue.
    - `stored_bytes`: bytes of the weights in their files; None if the files were not read.
    """

    name: str
    shape: ModelShape
    params: int
    precision: str
    source: str
    note: str = ""
    stored_bytes: int | None = None
