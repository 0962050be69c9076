"""MXFP4 as gpt-oss publishes it: the matrices of all experts together, by Transformers' integrations/mxfp4.

NAME_blocks is [experts, rows, groups, 16] uint8, two numbers in each byte, the lower bits first, and NAME_scales
[experts, rows, groups] uint8.
"""

from __future__ import annotations

from weft.checkpoint.architectures.published import PublishedQuantization
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.format import Format, Index, Predicate
from weft.checkpoint.quantised.packed import Packed, check_part, wrong_part

PARTS = ("_blocks", "_scales")  # suffixes to the name of the experts' tensor
BLOCK = (32, 16)  # numbers that share a scale, and their bytes


class PackedBlocks(Packed, frozen=True, kw_only=True):
    """Matrices in this layout, or one of them."""


def _parse(_: Fields) -> PublishedQuantization:
    return PublishedQuantization(method="mxfp4", bits=4, group=32, symmetric=True)


def _quantised_layers(_: Fields) -> Predicate:
    return lambda name: ".experts." in name


def _join(index: Index, _: PublishedQuantization) -> dict[str, TensorInfo]:
    """Replace each pair of NAME_blocks and NAME_scales by one NAME of dims [experts, rows, cols]."""
    joined = {name: info for name, info in index.items() if not name.endswith(PARTS)}
    elements, nbytes = BLOCK
    for name, values in index.items():
        if not name.endswith(PARTS[0]):
            continue
        stack = name.removesuffix(PARTS[0])
        scales = index.get(stack + PARTS[1])
        if scales is None:
            raise wrong_part(values, stack, f"has no {stack}{PARTS[1]} with it", code="matrix-without-scales")
        if not scales.dims:
            raise wrong_part(scales, stack, "has a scalar for its scales", code="packed-part-of-other-dims")
        check_part(scales, stack, ("U8",))
        check_part(values, stack, ("U8",), (*scales.dims, nbytes))
        joined[stack] = PackedBlocks(
            file=values.file,
            type="MXFP4",
            dims=(*scales.dims[:-1], scales.dims[-1] * elements),
            offset=values.offset,
            nbytes=values.nbytes + scales.nbytes,
            numbers="mxfp4",
            bits=4,
            group=elements,
            values=values,
            scales=scales,
        )
    return joined


FORMAT = Format(
    methods=("mxfp4",),
    numbers=("mxfp4",),
    parse=_parse,
    quantised_layers=_quantised_layers,
    join=_join,
    stored_name="{name}_blocks",
    copies={"mxfp4": "mxfp4"},
)
