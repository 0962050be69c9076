"""4-bit checkpoints of bitsandbytes: the tensors of a matrix.

NAME.weight has the numbers of a matrix one after the other, row by row, two to a byte, the first one in the upper bits.
Each is an index of a table of 16 values (`schemes.TABLES`). With it are stored

- NAME.weight.absmax: a scale for each `blocksize` numbers, in float32; with double quantisation a byte for each, an
  index of NAME.weight.nested_quant_map, to be multiplied by a value of NAME.weight.nested_absmax per `nested_blocksize`
  bytes and added to `nested_offset`;
- NAME.weight.quant_map: the table;
- NAME.weight.quant_state.bitsandbytes__nf4 (or fp4): the other figures, as the bytes of a JSON object.

Blocks run along the whole matrix, so a row has blocks of its own only if they divide its columns. If they do not, the
scale of a block is repeated for each part of it of as many columns as divide both. Source: bitsandbytes,
functional.QuantState. 8-bit matrices are in `checkpoint.quantised.signed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Literal

import msgspec

from weft.checkpoint.architectures.published import PublishedQuantization, held_group, wide_scheme_name
from weft.checkpoint.files.model_file import read_tensor
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.packed import Packed
from weft.errors import ModelError

BLOCKS = tuple(32 << i for i in range(8))  # block sizes that bitsandbytes has: 32 to 4,096
STATE = ".quant_state.bitsandbytes__"
PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
LARGEST_STATE = 1 << 16  # bytes; published ones have about 200


class QuantState(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one matrix, by bitsandbytes' names."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int = 0
    nested_offset: float = 0.0


class TablePacked(Packed, frozen=True, kw_only=True):
    """A 4-bit matrix. `group`: columns that share a scale; `state.blocksize` numbers do in the file.

    `scales` are bytes if `nested_map` and `nested_scales` tell what they stand for, else float32.
    """

    state: QuantState
    table: TensorInfo
    nested_map: TensorInfo | None
    nested_scales: TensorInfo | None


def join_tables(index: Mapping[str, TensorInfo], published: PublishedQuantization) -> dict[str, TensorInfo]:
    """Replace the tensors of each 4-bit matrix in an index by one `TablePacked` of the matrix's name.

    Raises ModelError, naming file and tensor, if the tensors of a matrix do not fit together.
    """
    joined = {name: info for name, info in index.items() if not name.endswith(PARTS) and STATE not in name}
    for name in _matrix_names(index):
        joined[name] = _join(index, name, published)
    for name, info in joined.items():
        if info.type == "U8" and name.endswith(".weight"):
            raise _misfit(info, name, "has no .absmax and no .quant_state with it", code="matrix-without-scales")
    return joined


def _matrix_names(index: Iterable[str]) -> list[str]:
    """The names of the matrices that scales or states in an index belong to, sorted."""
    extra = (name for name in index if STATE in name or name.endswith(".absmax"))
    names = {re.sub(r"\.(absmax|quant_state\.\w+)$", "", name) for name in extra}
    return sorted(name for name in names if not name.endswith(".nested_absmax"))


def _numbers_and_state(index: Mapping[str, TensorInfo], name: str) -> tuple[TensorInfo, QuantState]:
    """The tensor with the numbers of a matrix, and the matrix's state."""
    if name not in index:
        scales = next(info for own, info in index.items() if own.startswith(name + "."))
        raise _misfit(scales, name, "is missing, though its scales are there", code="missing-tensor")
    values = index[name]
    states = [name + STATE + kind for kind in ("nf4", "fp4") if name + STATE + kind in index]
    if not states:
        raise _misfit(values, name, f"has no {name}{STATE}nf4 or fp4 with it", code="matrix-without-quant-state")
    return values, read_state(index[states[0]], name)


def _join(index: Mapping[str, TensorInfo], name: str, published: PublishedQuantization) -> TablePacked:
    values, state = _numbers_and_state(index, name)
    rows, cols = state.shape
    if values.nbytes * 2 != rows * cols:
        raise _misfit(
            values,
            name,
            f"has {values.nbytes:,} bytes; {state.quant_type} of {list(state.shape)} takes {rows * cols // 2:,}",
            code="packed-part-of-other-dims",
        )
    blocks = -(-rows * cols // state.blocksize)
    scales, table = _part(index, name, ".absmax", blocks, ("F32", "U8")), _part(index, name, ".quant_map", 16)
    nested = scales.type == "U8"
    if nested and state.nested_blocksize <= 0:
        raise _misfit(scales, name, "has a quant_state without nested_blocksize", code="bad-quant-state")
    group = held_group(state.blocksize, cols)
    parts = [values, scales, table]
    nested_map = nested_scales = None
    if nested:
        nested_map = _part(index, name, ".nested_quant_map", 256)
        nested_scales = _part(index, name, ".nested_absmax", -(-blocks // state.nested_blocksize))
        parts += [nested_map, nested_scales]
    return TablePacked(
        file=values.file,
        type=wide_scheme_name(state.quant_type, group),
        dims=state.shape,
        offset=values.offset,
        nbytes=sum(part.nbytes for part in parts),
        published=published,
        bits=4,
        group=group,
        symmetric=True,
        values=values,
        scales=scales,
        zeros=None,
        order=None,
        state=state,
        table=table,
        nested_map=nested_map,
        nested_scales=nested_scales,
    )


def read_state(info: TensorInfo, name: str) -> QuantState:
    """Read the quant_state of matrix `name` from its tensor. Raises ModelError if it is damaged."""
    if info.type != "U8" or info.nbytes > LARGEST_STATE:
        raise _misfit(
            info, name, f"has a quant_state that is {info.type} of {info.nbytes:,} bytes", code="bad-quant-state"
        )
    try:
        state = msgspec.json.decode(read_tensor(info), type=QuantState)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _misfit(info, name, f"has a damaged quant_state: {error!s:.200}", code="bad-quant-state") from error
    if state.blocksize not in BLOCKS or min(state.shape) < 1:
        raise _misfit(
            info,
            name,
            f"has blocks of {state.blocksize} for {list(state.shape)}; Weft reads {', '.join(map(str, BLOCKS))}",
            code="bad-quant-state",
        )
    return state


def _part(
    index: Mapping[str, TensorInfo], name: str, part: str, count: int, types: tuple[str, ...] = ("F32",)
) -> TensorInfo:
    """The tensor NAME + `part` of `count` numbers."""
    info = index.get(name + part)
    if info is None:
        raise _misfit(index[name], name, f"has no {name}{part} with it", code="matrix-without-scales")
    if info.type not in types or prod(info.dims) != count:
        raise _misfit(
            info,
            name + part,
            f"is {info.type} of {list(info.dims)}; it must be {' or '.join(types)} of [{count}]",
            code="packed-part-of-other-dims",
        )
    return info


def _misfit(info: TensorInfo, name: str, what: str, *, code: str) -> ModelError:
    return ModelError(f"{info.file}: tensor {name} {what}; fetch it again", code=code)
