"""Protocols of the kernels: attention over paged KV, operations on rows, products, sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

from weft.checkpoint.architectures.shape import Attention, Experts, LatentAttention
from weft.plan.backends import AttentionSpec
from weft.plan.plan import Plan
from weft.ranks.comm import Group
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.fused import FusedLayer, FusedMLP, FusedStage, fuse_nothing
from weft.ranks.kernels.sampling import Sampling
from weft.ranks.kernels.staged import StagedStep
from weft.ranks.kernels.warm import KernelLaunch
from weft.ranks.quant.quantised import QuantisedWeight

if TYPE_CHECKING:
    from weft.ranks.kernels.latents import LatentDims, LatentKernels, LatentProducts


@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values: [num_blocks, block_size, kv_heads, head_dim] each. The kernels that write and read
    them choose their order within a block. The tables of KV group `group` say which blocks are a row's."""

    keys: torch.Tensor
    values: torch.Tensor
    group: int = 0

    @classmethod
    def of_latents(cls, latents: torch.Tensor, rank: int) -> KVCache:
        """The cache of a layer with latent attention: [num_blocks, block_size, 1, rank + rope_dim], in this order. Its
        values are the first `rank` columns of its keys."""
        return cls(latents, latents[..., :rank])

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Dimensions of a rank's attention, and the limits of its steps.

    `q_heads` and `kv_heads` are this rank's. `windows` are the sliding windows that its layers have, `groups` their
    pairs of KV group and window, if there are several groups. If `sinks`, each head has one. With `latent`, heads are
    the heads of the expanded form. Limits: `rows` of a decode step, `tokens` of a step, `length` of a row's context.
    `fixed_order`: all kernels sum in one order, whatever other tokens are in a step.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    scale: float
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    rows: int
    tokens: int
    length: int
    groups: tuple[tuple[int, int | None], ...] = ()
    sinks: bool = False
    latent: LatentAttention | None = None
    fixed_order: bool = False

    @classmethod
    def from_plan(cls, plan: Plan, rank: int) -> AttentionShape:
        """The shape of attention on a rank of a plan."""
        place, shape, dtype = plan.places[rank], plan.shape, getattr(torch, plan.dtype)
        layers, layout = range(place.layers.start, place.layers.stop), plan.kv_layout
        pairs = ((layout.group_of(layer), shape.layers[layer].window) for layer in layers)
        return cls(
            q_heads=len(place.q_heads),
            kv_heads=len(place.kv_heads),
            head_dim=shape.head_dim,
            windows=tuple(dict.fromkeys(shape.layers[layer].window for layer in layers)),
            groups=tuple(dict.fromkeys(pairs)) if len(layout.groups) > 1 else (),
            scale=shape.mixer.scale,
            sinks=isinstance(shape.mixer, Attention) and shape.mixer.sinks,
            latent=shape.latent,
            dtype=dtype,
            cache_dtype=torch.float8_e4m3fn if plan.kv_dtype == "fp8" else dtype,
            block_size=plan.block_size,
            rows=plan.max_num_seqs,
            tokens=plan.max_num_batched_tokens,
            length=plan.max_model_len,
            fixed_order=plan.deterministic,
        )

    @property
    def group_windows(self) -> tuple[tuple[int, int | None], ...]:
        """Pairs of a KV group and a window of its layers."""
        return self.groups or tuple((0, window) for window in self.windows)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def spec(self) -> AttentionSpec:
        """Facts by which backends are chosen."""
        dtype, fp8 = str(self.dtype).removeprefix("torch."), self.cache_dtype.itemsize == 1
        latent = self.latent.kv_lora_rank + self.latent.rope_dim if self.latent else 0
        return AttentionSpec(head_dim=self.head_dim, group=self.group, dtype=dtype, fp8_cache=fp8, latent_dim=latent)


@dataclass(frozen=True)
class HeadNorm:
    """Weights [head_dim] of the RMS norms over each query and key head, before the rotation (Qwen3)."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


# x [T, in] -> x W^T + b [T, out].
Product = Callable[[torch.Tensor], torch.Tensor]


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


class PagedAttention(Protocol):
    """Attention over paged KV.

    If `capturable`, decode steps can be captured as CUDA graphs: no call waits for the GPU, and padding rows, which
    have slot -1 and no context, are skipped.
    """

    @property
    def name(self) -> str:
        """Name of the backend, a key of ATTENTION_BACKENDS."""
        ...

    @property
    def capturable(self) -> bool: ...

    def prepare(self, batch: Batch) -> None:
        """Compute once what all layers of a step share: the next calls of `attend` are for this batch.

        Never recorded in a CUDA graph: for a `fixed` batch it prepares the recorded calls for other rows.
        """
        ...

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        scale: float,
        window: int | None,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of all rows, each over its own context: [T, q_heads, head_dim] -> [T, q_heads * head_dim].

        A token sees the last `window` positions, its own included, or all of them if that is None. If `lse` is given,
        a tensor [T, q_heads] float32, it gets the natural logarithm of the sum of e^score over the positions that each
        head of a token sees; -inf if there are none. Results over parts of a context are joined by it (Dao et al. 2023,
        Flash-Decoding).

        `sinks` [q_heads], of q's dtype, are learned scores, one per head, that take part in the sum of the softmax and
        bring no value (gpt-oss); `lse` is without them.
        """
        ...

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        """Calls that together launch every variant of a kernel that steps within the shape's limits can launch, except
        the kernels that each step launches. The calls of a group launch the same kernels."""
        ...


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention with sinks, from the result `out` [T, q_heads * head_dim] and the `lse` of attention without.

    The weights of all values shrink by e^lse / (e^lse + e^sink): see `PagedAttention.attend`.
    """
    heads = out.unflatten(1, (sinks.shape[0], -1))
    return (heads * torch.sigmoid(lse - sinks.float()).unsqueeze(2)).to(out.dtype).flatten(1)


class Pointwise(Protocol):
    """Operations on rows between the products. Keys and values are stored in the order that the `PagedAttention` of the
    same kernels reads."""

    def fill_batch(self, staged: StagedStep, batch: Batch) -> None:
        """Write a step into the tensors of a batch that is large enough, and its new blocks into the tables of all
        request slots. Padding rows of a `fixed` batch get no slot and no context."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm of x [T, hidden]."""
        ...

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x in place; return the RMS norm of the sum."""
        ...

    def sum_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, comm: Group
    ) -> torch.Tensor:
        """residual += the sum of x over the ranks, in place; return its RMS norm, the same bits on every rank."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SiLU of the first half of the columns times the second half: [T, 2F] -> [T, F]."""
        ...

    def choose_experts(
        self,
        scores: torch.Tensor,
        spec: Experts,
        slots: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of each token by the router's scores [T, experts] float32: their numbers [T, top_k] int64
        and shares [T, top_k] float32. The best comes first; of equal scores, the lower number. See `Experts`.

        `correction` [experts] float32 is as in `Experts.correction`.

        With `slots` [T], from a CUDA graph, tokens of negative slots are padding and get the numbers -1. Kernels of a
        CPU are called without.
        """
        ...

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        """Rotate q and k of qkv [T, (q + 2 kv heads) * head_dim] by the rows of `rope` at their positions, after `norm`
        if there is one. Write k and v to the batch's slots; return q [T, q_heads, head_dim]."""
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


# Fuses the layers of a pipeline stage into one call; None if separate operations are as fast.
FuseLayers = Callable[[Sequence[FusedLayer], Group], FusedStage | None]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Implementations of a decoder's operations on one device, in parts. Inputs are bf16, fp16 or fp32 and contiguous
    along their last dim; sums are computed in fp32."""

    attention: PagedAttention
    pointwise: Pointwise
    matrices: Matrices
    sampling: Sampling
    latents: LatentKernels
    fuse_layers: FuseLayers = fuse_nothing

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        """The launches of all parts, see `PagedAttention.launches`."""
        attention = self.latents if shape.latent else self.attention
        return [*self.matrices.launches(shape.tokens), *attention.launches(shape, device)]
