"""Choice of the class that runs a rank's part of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import ModelShape
from weft.ranks.comm import Group
from weft.ranks.kernels.base import Kernels
from weft.ranks.layers.exchange import TokenExchange
from weft.ranks.layers.weights import Tensors
from weft.ranks.models.decoder import DecoderModel

if TYPE_CHECKING:
    from weft.ranks.models.library.decoder import LibraryDecoder


def create_model(
    shape: ModelShape,
    places: Sequence[Place],
    rank: int,
    tensors: Tensors,
    comm: Group,
    kernels: Kernels,
    exchange: TokenExchange | None = None,
) -> DecoderModel | LibraryDecoder:
    """One rank's part of a model; see DecoderModel for the arguments."""
    if shape.library is None:
        return DecoderModel(shape, places, rank, tensors, comm, kernels, exchange=exchange)
    from weft.ranks.models.library.decoder import LibraryDecoder  # imports Transformers, which other models do without

    return LibraryDecoder(shape, places, rank, tensors, comm, kernels)
