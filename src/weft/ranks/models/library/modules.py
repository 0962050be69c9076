"""Modules that take the place of Transformers' own in a model's class."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from weft.checkpoint.architectures.place import Span
from weft.ranks.comm import Group
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.matrices import Product


class Direct(nn.Module):
    """A module without hooks: a call is its `forward`, without the microseconds in which torch looks for hooks."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


class CutLinear(Direct):
    """A linear layer with a rank's share of its weight.

    - `cut`: the weight's dimension that is cut, "rows" or "cols"; "" if every rank has all of it.
    - `columns`: this rank's columns of the input, if `cut` is "cols".
    - `sizes`: each rank's rows, if all ranks gather the results.
    """

    def __init__(self, product: Product, comm: Group, cut: str, columns: Span | None, sizes: list[int] | None) -> None:
        super().__init__()
        self.product, self.comm, self.cut, self.columns, self.sizes = product, comm, cut, columns, sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply [..., in] -> [..., out]; with `cut` "rows" and without `sizes`, this rank's columns of the result.

        An input may be whole, or this rank's columns of it.
        """
        *lead, width = x.shape
        if self.columns is not None and width != len(self.columns):
            x = x[..., self.columns.start : self.columns.stop]
        y = self.product(x.reshape(-1, x.shape[-1]).contiguous())
        if self.cut == "cols" and self.comm.size > 1:
            y = self.comm.sum(y)
        elif self.sizes is not None and self.comm.size > 1:
            y = self.comm.all_gather(y.t().contiguous(), self.sizes).t()
        return y.reshape(*lead, -1)


class SharedProduct:
    """A product whose result is divided among linear layers that read the same tensor.

    `widths` are each layer's columns of the result. The first layer to be called with a tensor multiplies for all.
    """

    def __init__(self, product: Product, widths: list[int]) -> None:
        self._product, self._widths = product, widths
        self._input: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}  # that no layer has asked for yet

    def part(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Columns of the `number`th layer: [..., in] -> [..., width]."""
        if x is not self._input or number not in self._parts:
            y = self._product(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], -1)
            self._input, self._parts = x, dict(enumerate(y.split(self._widths, dim=-1)))
        part = self._parts.pop(number)
        if not self._parts:
            self._input = None
        return part


class MergedLinear(Direct):
    """One of several linear layers that read the same tensor, with a rank's rows of its weight."""

    def __init__(self, shared: SharedProduct, number: int) -> None:
        super().__init__()
        self.shared, self.number = shared, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply [..., in] -> [..., out], this rank's columns of the result."""
        return self.shared.part(x, self.number)


class KernelNorm(Direct):
    """An RMS norm that the kernels compute in one call, in place of a class's own, which takes several."""

    def __init__(self, original: nn.Module, weight: nn.Parameter, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self.eps, self._kernels = weight, eps, kernels
        self._original = (original,)  # no submodule: it has the same weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., width] -> [..., width]; by the class's own norm if the dtype is not the weight's."""
        if x.dtype != self.weight.dtype:
            normalised: torch.Tensor = self._original[0](x)
            return normalised
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._kernels.pointwise.norm(rows, self.weight, self.eps).view(x.shape)


def kernel_norm(module: nn.Module, kernels: Kernels) -> KernelNorm | None:
    """The kernels' norm for a module that computes the same: an RMS norm with one weight and no offset. None for all
    other modules; whether it is the same is seen from an example."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = module._parameters.get("weight")
    if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float) or weight is None or weight.dim() != 1:
        return None
    example = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.inference_mode():
        theirs, ours = module(example[None])[0].float(), kernels.pointwise.norm(example, weight, eps).float()
    # The class rounds once more, before it multiplies by the weight.
    rounding = 4 * torch.finfo(weight.dtype).eps
    return KernelNorm(module, weight, eps, kernels) if torch.allclose(ours, theirs, rtol=rounding, atol=1e-6) else None


class Passed(nn.Module):
    """A layer or a norm of another stage: it hands its input on, or the hidden states that were `received`.

    Plain attributes of the layer, which the model may read, stay.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(original).items() if isinstance(value, int | str | float)}
        vars(self).update({name: value for name, value in plain.items() if name not in vars(self)})
        self.received: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Return the hidden states [1, T, hidden]."""
        return hidden_states if self.received is None else self.received


class Given(nn.Module):
    """Stands for the base model when the head runs: it returns the hidden states that it was given, [1, S, hidden]."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **options: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self.hidden)


class GatheredHead(nn.Module):
    """The head: logits of the whole vocabulary on the group's rank 0, of none on the others.

    `widths` are the rows of the vocabulary of each rank.
    """

    def __init__(self, product: Product, bias: torch.Tensor | None, widths: list[int], comm: Group) -> None:
        super().__init__()
        self.product, self.widths, self.comm = product, widths, comm
        self._bias = (bias,)  # no parameter of the module: the decoder has it

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, S, hidden] -> [1, S, vocab] or [1, S, 0]."""
        logits = self.product(hidden[0].contiguous())
        (bias,) = self._bias
        gathered = self.comm.gather(logits if bias is None else logits + bias, self.widths)
        return logits.new_empty(1, len(logits), 0) if gathered is None else gathered[None]
