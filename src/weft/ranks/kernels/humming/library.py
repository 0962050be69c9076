"""The library humming-kernels as far as it is called: its functional form, not its layer, which allocates on whatever
device is current.

Names, layouts and arguments are as in version `plan.products.VERSION`, from its sources (PyPI: humming-kernels).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from weft.ranks.kernels.usable import UnusableError


class Library(NamedTuple):
    """Functions of the library.

    `weight_schema(**fields)` says what a weight holds. `layer_config(n, k, weight_schema=, num_experts=, has_bias=,
    pad_n_to_multiple=, pad_k_to_multiple=, torch_dtype=, device=)` is what kernels are compiled for, and
    `transform(config, tensors)` gives the tensors that these read, `transform_bias(bias)` one of them. `tile(config,
    rows, gemm_type=, device=)` is the choice of a tile for this many rows. `forward(config, inputs, weight, ...)`
    multiplies.
    """

    weight_schema: Callable[..., Any]
    layer_config: Callable[..., Any]
    transform: Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    transform_bias: Callable[[torch.Tensor], torch.Tensor]
    tile: Callable[..., dict[str, Any]]
    forward: Callable[..., torch.Tensor]


def load_library() -> Library:
    """Import the library. Raises UnusableError if that fails, for whatever reason."""
    try:
        transform = import_module("humming.transform")
        return Library(
            import_module("humming.schema").HummingWeightSchema,
            transform.prepare_layer_config,
            transform.transform_humming_tensors,
            transform.transform_humming_bias,
            import_module("humming.tune").get_heuristics_config,
            import_module("humming.forward").humming_forward,
        )
    except Exception as error:  # also what its imports raise without a driver or a compiler
        raise UnusableError(f"it cannot be imported: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
