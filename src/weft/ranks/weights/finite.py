"""Scales that are no numbers: a damaged one makes a whole group of weights NaN, and one of every answer's tokens wrong.

Only scales, minima and other small tensors are looked at, a hundredth of the weights' bytes.
"""

from __future__ import annotations

import torch

from weft.errors import ModelError


class NotFiniteError(ModelError):
    """A scale of a tensor that is NaN or infinite."""

    def __init__(self, source: str = "a tensor") -> None:
        super().__init__(
            f"{source:.300} has a value that is NaN or infinite; the file is damaged, fetch it again",
            code="scale-not-finite",
        )


def check_finite(scales: torch.Tensor) -> torch.Tensor:
    """Return `scales`. Raises NotFiniteError; the loader says of which tensor."""
    if not scales.isfinite().all():
        raise NotFiniteError
    return scales
