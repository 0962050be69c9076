"""Products with weights: `Matrices`, which packs weights, and the products that it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels.latents import LatentDims, LatentProducts
from weft.ranks.kernels.warm import KernelLaunch
from weft.ranks.quant.quantised import QuantisedWeight

# x [T, in] -> x W^T + b [T, out].
Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FusedMLP:
    """The MLP of a layer, with a SiLU gate: the first half of the columns of `gate_up`."""

    gate_up: Product
    down: Product


class EmbeddingTable(Protocol):
    """An embedding [vocab, hidden], and the product with it if it is the head as well (tied weights)."""

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding: [T] int64 -> [T, hidden]."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Logits: [S, hidden] -> [S, vocab]."""
        ...


class ExpertStack(NamedTuple):
    """A parameter `name` of all experts of a rank: matrices [experts, out, in], and biases [experts, out]."""

    name: str
    weight: torch.Tensor | QuantisedWeight
    bias: torch.Tensor | None


@runtime_checkable
class ChoosingProduct(Protocol):
    """The product with a router that also chooses the experts of each token by its scores."""

    def choose_experts(
        self, x: torch.Tensor, spec: Experts, slots: torch.Tensor | None, correction: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Pointwise.choose_experts` by the scores of x [T, hidden]."""
        ...


class ExpertProducts(Protocol):
    """The MLPs of a rank's experts. If `capturable`, no call waits for the GPU, and no size depends on the choices.

    `routed` [experts of the rank] int64 counts the tokens that each has computed.
    """

    @property
    def capturable(self) -> bool: ...

    @property
    def routed(self) -> torch.Tensor: ...

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Sum of the results of each token's experts, weighted by its shares: [T, hidden] -> [T, hidden].

        `chosen` [T, k] int64 are numbers of experts of the whole model, `shares` [T, k] float32. Experts of other ranks
        and negative numbers add nothing. The order of a sum does not depend on other tokens.
        """
        ...


class MixtureProducts(Protocol):
    """The MLPs of a rank's routed experts, and of the experts that see every token, for up to `most_tokens` tokens."""

    @property
    def most_tokens(self) -> int: ...

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, gate: torch.Tensor | None
    ) -> torch.Tensor:
        """The sum of an `ExpertProducts`, plus the result of the shared experts times the sigmoid of `gate` [T, 1]
        float32, if there is one."""
        ...


class Matrices(Protocol):
    """Products with weights, which are packed once."""

    @property
    def multiplies_quantised(self) -> bool:
        """True if quantised weights stay quantised; otherwise they are held in the dtype of activations."""
        ...

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> Product:
        """The product with a weight [out, in], which may be repacked: the caller does not keep it."""
        ...

    def router(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> Product:
        """The same for a router [experts, in], whose scores are float32."""
        ...

    def experts(self, spec: Experts, gate_up: ExpertStack, down: ExpertStack, first: int) -> ExpertProducts:
        """The same for the experts of a rank, of which `first` is the number of the first one."""
        ...

    def mixture(self, experts: ExpertProducts, shared: FusedMLP) -> MixtureProducts | None:
        """The experts of a rank together with the experts that see every token, in one pass; None if that is not
        possible."""
        ...

    def latent_products(
        self, weight: torch.Tensor | QuantisedWeight, dims: LatentDims, name: str = ""
    ) -> LatentProducts:
        """The same for the projection from latents [heads * (nope_dim + value_dim), rank] to each head's key and then
        its value (kv_b_proj). It is held in the dtype of activations."""
        ...

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight, name: str = "") -> EmbeddingTable:
        """The same for an embedding [vocab, hidden], whose rows are read as well."""
        ...

    def replace(self, name: str, weight: torch.Tensor | QuantisedWeight) -> None:
        """Give a parameter other values, of the same dims and scheme, in the same memory."""
        ...

    def against_replacing(self, name: str, weight: torch.Tensor | QuantisedWeight) -> str | None:
        """Reason that a parameter cannot be given these values, or None."""
        ...

    def refresh_biases(self) -> None:
        """Take the values of biases that the caller has replaced in place: some products hold a copy of theirs."""
        ...

    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that hold weights."""
        ...

    def launches(self, tokens: int) -> Sequence[Sequence[KernelLaunch]]:
        """The same as `PagedAttention.launches`, for the products of up to `tokens` tokens with all matrices so far."""
        ...
