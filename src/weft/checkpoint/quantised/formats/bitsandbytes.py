"""bitsandbytes (nf4, fp4, int8), by the fields of Transformers' BitsAndBytesConfig and the tensors of the library.

4 bits: NAME.weight has the numbers of a matrix one after the other, row by row, two to a byte, the first one in the
upper bits. Each is an index of a table of 16 values (`schemes.TABLES`). With it are stored

- NAME.weight.absmax: a scale for each `blocksize` numbers, in float32; with double quantisation a byte for each, an
  index of NAME.weight.nested_quant_map, to be multiplied by a value of NAME.weight.nested_absmax per `nested_blocksize`
  bytes and added to `nested_offset`;
- NAME.weight.quant_map: the table;
- NAME.weight.quant_state.bitsandbytes__nf4 (or fp4): the other figures, as the bytes of a JSON object.

Blocks run along the whole matrix, so a row has blocks of its own only if they divide its columns. If they do not, the
scale of a block is repeated for each part of it of as many columns as divide both. Source: functional.QuantState.

8 bits (LLM.int8()): NAME.weight [rows, cols] I8 and NAME.SCB [rows], the largest number of each row: a weight is number
* SCB / 127. NAME.weight_format is 0 for rows as they are. Source: nn.Linear8bitLt. `llm_int8_threshold` says which
activations are multiplied in 16 bits; Weft multiplies all so, which is more exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Literal

import msgspec

from weft.checkpoint.architectures.published import ROW, PublishedQuantization, Wide, held_group, scheme_name
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.files.model_file import read_tensor
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.format import Format, Index, Predicate
from weft.checkpoint.quantised.layouts.byte_numbers import join_signed
from weft.checkpoint.quantised.packed import Packed, misfit

METHOD = "bitsandbytes"
BLOCK = 64  # numbers that share a scale, unless a matrix says otherwise
BLOCKS = tuple(32 << i for i in range(8))  # block sizes that bitsandbytes has: 32 to 4,096
STATE = ".quant_state.bitsandbytes__"
PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
LARGEST_STATE = 1 << 16  # bytes; published ones have about 200
LARGEST = 127  # that SCB stands for


class QuantState(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one matrix, by bitsandbytes' names."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int = 0
    nested_offset: float = 0.0


class PackedTable(Packed, frozen=True, kw_only=True):
    """A 4-bit matrix. `group`: columns that share a scale; `state.blocksize` numbers do in the file.

    `scales` are bytes if `nested_map` and `nested_scales` tell what they stand for, else float32.
    """

    state: QuantState
    table: TensorInfo
    nested_map: TensorInfo | None
    nested_scales: TensorInfo | None


def _unsupported(config: Fields) -> str | None:
    bits = _bits(config)
    if bits is None:
        return "bitsandbytes with neither load_in_4bit nor load_in_8bit"
    kind = config.text_or("bnb_4bit_quant_type", None) or "fp4"
    return f"bitsandbytes in the number format {kind}" if bits == 4 and kind not in ("nf4", "fp4") else None


def _parse(config: Fields) -> PublishedQuantization:
    if _bits(config) == 8:
        return PublishedQuantization(method=METHOD, bits=8, group=ROW, symmetric=True, wide="signed")
    wide: Wide = "nf4" if config.text_or("bnb_4bit_quant_type", None) == "nf4" else "fp4"
    nested = config.flag("bnb_4bit_use_double_quant")
    return PublishedQuantization(method=METHOD, bits=4, group=BLOCK, symmetric=True, wide=wide, nested=nested)


def _bits(config: Fields) -> int | None:
    for bits in (4, 8):
        if config.flag(f"load_in_{bits}bit") or config.flag(f"_load_in_{bits}bit"):
            return bits
    return None


def _quantised_layers(config: Fields) -> Predicate:
    """The layers outside `llm_int8_skip_modules`; without that list the head stays in 16 bits.

    Entries match as in Transformers' `should_convert_module`: at the beginning of a name, or at its end.
    """
    key = "llm_int8_skip_modules"
    skipped = ["lm_head"] if config.values.get(key) is None else config.names(key)

    def is_quantised(name: str) -> bool:
        return not any(name.endswith(entry) or f"{name}.".startswith(f"{entry}.") for entry in skipped)

    return is_quantised


def _join(index: Index, published: PublishedQuantization) -> dict[str, TensorInfo]:
    return _join_bytes(index, published) if published.bits == 8 else _join_tables(index)


def _join_tables(index: Index) -> dict[str, TensorInfo]:
    """Replace the tensors of each 4-bit matrix in an index by one `PackedTable` of the matrix's name."""
    joined = {name: info for name, info in index.items() if not name.endswith(PARTS) and STATE not in name}
    for name in _matrix_names(index):
        joined[name] = _join_table(index, name)
    for name, info in joined.items():
        if info.type == "U8" and name.endswith(".weight"):
            raise misfit(info, name, "has no .absmax and no .quant_state with it", code="matrix-without-scales")
    return joined


def _matrix_names(index: Iterable[str]) -> list[str]:
    """The names of the matrices that scales or states in an index belong to, sorted."""
    extra = (name for name in index if STATE in name or name.endswith(".absmax"))
    names = {re.sub(r"\.(absmax|quant_state\.\w+)$", "", name) for name in extra}
    return sorted(name for name in names if not name.endswith(".nested_absmax"))


def _numbers_and_state(index: Index, name: str) -> tuple[TensorInfo, QuantState]:
    """The tensor with the numbers of a matrix, and the matrix's state."""
    if name not in index:
        scales = next(info for own, info in index.items() if own.startswith(name + "."))
        raise misfit(scales, name, "is missing, though its scales are there", code="missing-tensor")
    values = index[name]
    states = [name + STATE + kind for kind in ("nf4", "fp4") if name + STATE + kind in index]
    if not states:
        raise misfit(values, name, f"has no {name}{STATE}nf4 or fp4 with it", code="matrix-without-quant-state")
    return values, _read_state(index[states[0]], name)


def _join_table(index: Index, name: str) -> PackedTable:
    values, state = _numbers_and_state(index, name)
    rows, cols = state.shape
    if values.nbytes * 2 != rows * cols:
        raise misfit(
            values,
            name,
            f"has {values.nbytes:,} bytes; {state.quant_type} of {list(state.shape)} takes {rows * cols // 2:,}",
            code="packed-part-of-other-dims",
        )
    blocks = -(-rows * cols // state.blocksize)
    scales, table = _part(index, name, ".absmax", blocks, ("F32", "U8")), _part(index, name, ".quant_map", 16)
    nested = scales.type == "U8"
    if nested and state.nested_blocksize <= 0:
        raise misfit(scales, name, "has a quant_state without nested_blocksize", code="bad-quant-state")
    group = held_group(state.blocksize, cols)
    parts = [values, scales, table]
    nested_map = nested_scales = None
    if nested:
        nested_map = _part(index, name, ".nested_quant_map", 256)
        nested_scales = _part(index, name, ".nested_absmax", -(-blocks // state.nested_blocksize))
        parts += [nested_map, nested_scales]
    return PackedTable(
        file=values.file,
        type=scheme_name(state.quant_type, group),
        dims=state.shape,
        offset=values.offset,
        nbytes=sum(part.nbytes for part in parts),
        numbers=state.quant_type,
        bits=4,
        group=group,
        values=values,
        scales=scales,
        state=state,
        table=table,
        nested_map=nested_map,
        nested_scales=nested_scales,
    )


def _read_state(info: TensorInfo, name: str) -> QuantState:
    """Read the quant_state of matrix `name` from its tensor. Raises ModelError if it is damaged."""
    if info.type != "U8" or info.nbytes > LARGEST_STATE:
        raise misfit(
            info, name, f"has a quant_state that is {info.type} of {info.nbytes:,} bytes", code="bad-quant-state"
        )
    try:
        state = msgspec.json.decode(read_tensor(info), type=QuantState)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise misfit(info, name, f"has a damaged quant_state: {error!s:.200}", code="bad-quant-state") from error
    if state.blocksize not in BLOCKS or min(state.shape) < 1:
        raise misfit(
            info,
            name,
            f"has blocks of {state.blocksize} for {list(state.shape)}; Weft reads {', '.join(map(str, BLOCKS))}",
            code="bad-quant-state",
        )
    return state


def _part(index: Index, name: str, part: str, count: int, types: tuple[str, ...] = ("F32",)) -> TensorInfo:
    """The tensor NAME + `part` of `count` numbers."""
    info = index.get(name + part)
    if info is None:
        raise misfit(index[name], name, f"has no {name}{part} with it", code="matrix-without-scales")
    if info.type not in types or prod(info.dims) != count:
        raise misfit(
            info,
            name + part,
            f"is {info.type} of {list(info.dims)}; it must be {' or '.join(types)} of [{count}]",
            code="packed-part-of-other-dims",
        )
    return info


def _join_bytes(index: Index, published: PublishedQuantization) -> dict[str, TensorInfo]:
    """Replace each 8-bit matrix and its scales, unless its numbers are in the order of one GPU's tensor cores."""
    for name, info in index.items():
        if name.endswith(".weight_format"):
            _check_order(info, name)
    return join_signed(index, published, ".SCB", LARGEST)


def _check_order(format: TensorInfo, name: str) -> None:
    if format.nbytes != 1:
        raise misfit(
            format,
            name,
            f"is {format.type} of {list(format.dims)}; it must be one byte",
            code="packed-part-of-other-dims",
        )
    order = read_tensor(format)
    if order != b"\0":
        raise misfit(
            format,
            name,
            f"is {order[0]}, an order of one GPU's cores; Weft reads 0, rows as they are",
            code="weight-format-not-read",
        )


FORMAT = Format(
    methods=(METHOD,),
    numbers=("nf4", "fp4", "signed"),
    listed="nf4, fp4, int8",
    unsupported=_unsupported,
    parse=_parse,
    quantised_layers=_quantised_layers,
    join=_join,
)
