"""Models that run through Transformers' classes: their tensors and cuts, as those classes describe them."""

from __future__ import annotations

from typing import Literal

import msgspec

PREFIX = "transformers:"  # prefix of the architecture's name in a shape whose model runs through Transformers' class


class LibraryTensor(msgspec.Struct, frozen=True, cache_hash=True):
    """One tensor of a model: its name in the checkpoint, of a layer's tensor relative to `LibraryModel.layer`.

    - `dims`: one or two lengths.
    - `linear`: it is the weight of a linear layer.
    - `cut`: the dimension that tensor parallelism divides evenly: its first, its second, or neither.
    """

    name: str
    dims: tuple[int, ...]
    linear: bool = False
    cut: Literal["", "rows", "cols"] = ""


class LibraryModel(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """A model that runs through Transformers' class for it.

    - `config`: its config.json, from which the class is built.
    - `layer`: prefix of a layer's tensors, with `{layer}` for its number.
    - `embedding`, `head`: names of the embedding's weight, and of the head's weight and, behind it, bias. With
      tied weights the head's is the embedding's.
    - `width`: length of the embedding's rows.
    - `before`, `after`: the other tensors of the first and of the last stage.
    - `kinds`: tensors of each kind of layer; `layers` has the kind of each layer.
    - `joined`: modules of linear layers whose results all ranks gather.
    - `merged`: groups of linear modules of a layer that read the same tensor: their weights are one parameter.
    - `whole`: a reason not to cut layers among ranks; `one_stage`: one not to make a pipeline; "" if there is none.
    """

    config: str
    layer: str
    embedding: str
    head: tuple[str, ...]
    width: int
    before: tuple[LibraryTensor, ...] = ()
    after: tuple[LibraryTensor, ...] = ()
    kinds: tuple[tuple[LibraryTensor, ...], ...]
    layers: tuple[int, ...]
    joined: tuple[str, ...] = ()
    merged: tuple[tuple[str, ...], ...] = ()
    whole: str = ""
    one_stage: str = ""


def merged_name(group: tuple[str, ...]) -> str:
    """Name in a layer of the module that stands for a group of merged ones, such as "self_attn.q_proj+k_proj"."""
    parents = {path.rpartition(".")[0] for path in group}
    last = (path.rpartition(".")[2] if len(parents) == 1 else path for path in group)
    return ".".join(filter(None, (parents.pop() if len(parents) == 1 else "", "+".join(last))))
