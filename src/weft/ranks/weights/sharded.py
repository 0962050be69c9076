"""Sharded state read and written: what a rank holds, in a file of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from weft.checkpoint.files.safetensors import encode_header
from weft.checkpoint.files.sharded import KEY, file_name, read_rank
from weft.checkpoint.files.tensor import TensorInfo
from weft.errors import ModelError
from weft.plan.plan import Plan
from weft.plan.shards import check_shards
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.weights.stored import BAND, map_bytes

Targets = Mapping[str, torch.Tensor | QuantisedWeight]

# Names of dtypes in safetensors files.
DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def tensor_parts(targets: Targets) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of all that parameters hold; the parts of a quantised one are named NAME.PART."""
    for name, target in targets.items():
        if isinstance(target, torch.Tensor):
            yield name, target
            continue
        for field, part in target.parts.items():
            yield f"{name}.{field}", part


def read_shard(plan: Plan, rank: int, targets: Targets, report: Callable[[int, int], None] | None) -> None:
    """Fill parameters of a rank from its file. `report` gets the bytes that are read so far, and all bytes.

    Raises ModelError for a file that is damaged, PlanError for a file of another layout.
    """
    state, tensors = read_rank(Path(plan.checkpoint), rank)
    check_shards(plan, state)
    parts = dict(tensor_parts(targets))
    for name, part in parts.items():
        _check_part(tensors.get(name), name, part, Path(plan.checkpoint) / file_name(rank))
    total, done = sum(part.nbytes for part in parts.values()), 0
    for name, part in parts.items():
        octets = part.view(-1).view(torch.uint8)
        for start in range(0, len(octets), BAND):
            count = min(BAND, len(octets) - start)
            ahead = min(BAND, len(octets) - start - count)
            octets[start : start + count].copy_(map_bytes(tensors[name], start, count, ahead=ahead))
            done += count
            if report:
                report(done, total)


def _check_part(info: TensorInfo | None, name: str, part: torch.Tensor, path: Path) -> None:
    """Raise ModelError unless a tensor in a file is what a rank holds."""
    wanted = f"{DTYPES[part.dtype]} of {list(part.shape)}"
    if info is None:
        raise ModelError(f"{path} lacks tensor {name}, {wanted}; write it again with weft shard", code="missing-tensor")
    if (info.type, info.dims) != (DTYPES[part.dtype], tuple(part.shape)):
        raise ModelError(
            f"{path}: tensor {name} is {info.type} of {list(info.dims)}, and the rank holds {wanted}; write it again "
            "with weft shard",
            code="tensor-of-other-dims",
        )


class ShardFile:
    """The file of a rank while it is written; the order of its tensors is `outline`'s."""

    def __init__(self, file: BinaryIO, outline: Targets, state: str) -> None:
        entries = {name: (DTYPES[part.dtype], part.shape, part.nbytes) for name, part in tensor_parts(outline)}
        self._file, self._names = file, list(entries)
        file.write(encode_header(entries, {KEY: state}))

    def write_parameters(self, targets: Targets) -> None:
        """Write the next parameters."""
        for name, part in tensor_parts(targets):
            assert name == self._names.pop(0)
            octets = part.cpu().contiguous().view(-1).view(torch.uint8)
            self._file.write(octets.numpy().data)

    @property
    def complete(self) -> bool:
        """True if all parameters are written."""
        return not self._names


@contextmanager
def create_shard(folder: Path, rank: int, outline: Targets, state: str) -> Iterator[ShardFile]:
    """Create the file of a rank in a directory; it gets its name when all is written. Raises OSError."""
    path = folder / file_name(rank)
    incomplete = path.with_suffix(".incomplete")
    try:
        with incomplete.open("wb") as file:
            shard = ShardFile(file, outline, state)
            yield shard
        assert shard.complete
        os.replace(incomplete, path)
    finally:
        incomplete.unlink(missing_ok=True)


def write_groups(shard: ShardFile, groups: Iterable[Targets]) -> None:
    """Write groups of parameters, of which only one is in memory at a time."""
    for targets in groups:
        shard.write_parameters(targets)
