"""Format: the declaration of a published weight format."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from weft.checkpoint.architectures.published import Numbers, PublishedQuantization
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.files.tensor import TensorInfo

Index = Mapping[str, TensorInfo]  # the tensors of a checkpoint, by name
Predicate = Callable[[str], bool]  # tells by the name of a linear layer if it is quantised


def _reads_all(_: Fields) -> str | None:
    return None


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """A published weight format: how config.json describes it, and the tensors that it stores a matrix in.

    Its bytes in the file follow from the `PublishedQuantization` that `parse` returns, its scheme and precision too.
    `ranks.weights.readers` reads the tensors that `join` returns: by their layout, which formats may share.

    - `methods`: values of `quant_method`. `packings`: with compressed-tensors, values of `format`.
    - `numbers`: the kinds of numbers that it stores.
    - `listed`: its name where all formats are listed, under a heading of `registry.FORMATS`.
    - `unsupported`: describes a feature of a config that is not read; None if all are. Given the quantization_config,
      and with compressed-tensors one of its config_groups.
    - `parse`: given a config without such a feature, the quantisation without its exceptions.
    - `quantised_layers`: the layers that a quantization_config describes as quantised.
    - `join`: replaces the tensors of each quantised matrix by one `Packed` of the matrix's name. Raises ModelError,
      naming file and tensor, if they do not fit together.
    - `stored_name`: name of the tensor with the numbers of a matrix {layer}weight or {name}; "" for the same name.
    - `vllm`: values of vLLM's --quantization for it, besides the methods.
    - `copies`: further suffixes in the names of quantised copies, and their precisions; `aliases`: suffixes that are
      names of a precision too.
    """

    methods: tuple[str, ...]
    packings: tuple[str, ...] = ()
    numbers: tuple[Numbers, ...]
    listed: str = ""
    unsupported: Callable[[Fields], str | None] = _reads_all
    parse: Callable[[Fields], PublishedQuantization]
    quantised_layers: Callable[[Fields], Predicate]
    join: Callable[[Index, PublishedQuantization], dict[str, TensorInfo]]
    stored_name: str = ""
    vllm: tuple[str, ...] = ()
    copies: dict[str, str] = {}
    aliases: dict[str, str] = {}
