"""A head of its own in files whose config ties it to the embedding."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.files.tensor import DENSE, TensorInfo
from weft.logs import event_fields
from weft.regular_files import open_regular

logger = logging.getLogger("weft")

CHUNK = 1 << 20  # bytes that are compared at once


def with_own_head(shape: ModelShape, index: Mapping[str, TensorInfo], path: str) -> ModelShape:
    """A shape that is not tied if the files have a head that is not the embedding, as Transformers 5 has it.

    A head that is equal to the embedding is left out: the model needs half the memory for both.
    """
    if not shape.tied or shape.library:
        return shape
    names = find_architecture(shape.architecture).names
    head, embedding = index.get(names.head + ".weight"), index.get(names.embed + ".weight")
    if head is None or embedding is None or not _can_be_head(head, embedding) or _is_same(head, embedding):
        return shape
    logger.warning(
        "%s: the config ties the head to the embedding, and the files have another; theirs is used",
        path,
        extra=event_fields("own-head", path=path),
    )
    return msgspec.structs.replace(shape, tied=False)


def _can_be_head(head: TensorInfo, embedding: TensorInfo) -> bool:
    """Return True for a head that is not quantised, and has a row for each token."""
    return head.type in DENSE and head.dims == embedding.dims and not (head.transposed or embedding.transposed)


def _is_same(head: TensorInfo, embedding: TensorInfo) -> bool:
    """Return True if two tensors have the same bytes."""
    if head.type != embedding.type or head.nbytes != embedding.nbytes:
        return False
    with open_regular(head.file) as first, open_regular(embedding.file) as second:
        first.seek(head.offset)
        second.seek(embedding.offset)
        for start in range(0, head.nbytes, CHUNK):
            size = min(CHUNK, head.nbytes - start)
            if first.read(size) != second.read(size):
                return False
    return True
