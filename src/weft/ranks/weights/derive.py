"""Parameters that are computed from what the checkpoint stores, after it is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.checkpoint.architectures.shape import ModelShape
from weft.ranks.quant.quantised import QuantisedWeight


@torch.inference_mode()
def derive_parameters(shape: ModelShape, targets: Mapping[str, torch.Tensor | QuantisedWeight]) -> None:
    """Add the offset of the model's norms to their weights, in place. Every load is followed by this once."""
    if not shape.norm.offset:
        return
    for name, target in targets.items():
        if name.endswith("norm.weight") and isinstance(target, torch.Tensor):
            target.add_(shape.norm.offset)
