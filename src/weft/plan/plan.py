"""Plan: a model laid out on devices, as every rank executes it. JSON in, JSON out; all ranks get the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from weft.checkpoint.architectures.kv import KVLayout, kv_layout, kv_specs
from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import DType, ModelShape
from weft.plan.backends import runs_on_gpus
from weft.plan.fills import rank_weight_bytes
from weft.plan.parallelism import Parallelism

Exchange = Literal["gather", "dispatch"]


class DraftModel(msgspec.Struct, frozen=True, kw_only=True):
    """A small model that drafts tokens for the large one, whole on the output rank. Fields as in `Plan`."""

    model: str
    checkpoint: str
    load_format: Literal["safetensors", "gguf", "dummy"]
    shape: ModelShape


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding with at most `tokens` draft tokens per request and step.

    The draft tokens come from the `draft` model, or without one from prompt lookup: the tokens that followed an earlier
    occurrence of the request's last `lookup_max` to `lookup_min` tokens.
    """

    tokens: int
    lookup_min: int = 2
    lookup_max: int = 4
    draft: DraftModel | None = None


class RankDevice(msgspec.Struct, frozen=True):
    """The device that a rank runs on: a GPU of a node, by its `index` there, or the node's CPU (index 0).

    Nodes are numbered from 0. `name` is torch's name for the device on that node: "cuda:1", or "cpu".
    """

    node: int
    kind: Literal["cuda", "cpu"]
    index: int

    @property
    def name(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


def exchange_kind(shape: ModelShape, data_parallel: int, expert_parallel: int) -> Exchange | None:
    """The exchange of `data_parallel` attention groups whose experts are dealt to `expert_parallel` parts.

    With more parts than a token chooses experts, a token is sent to the few ranks that have its experts. Otherwise
    nearly every rank has some: all groups gather all tokens, which takes fewer messages. None with one group.
    """
    if data_parallel == 1 or shape.experts is None:
        return None
    return "dispatch" if expert_parallel > shape.experts.top_k else "gather"


def named_devices(*names: str, node: int = 0) -> tuple[RankDevice, ...]:
    """The devices of a node by their names there, "cpu" or "cuda:N"."""
    parts = [name.partition(":") for name in names]
    return tuple(RankDevice(node, "cuda" if index else "cpu", int(index or 0)) for _, _, index in parts)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A model cut across ranks, with the limits that it runs under. Sizes are in bytes, lengths in tokens.

    - `checkpoint`: a directory or a GGUF file; the engine reads no weights from it if `load_format` is "dummy".
    - `schemes`: scheme (`checkpoint.quantised.schemes`) of each checkpoint tensor that is held quantised; all others
    are in `dtype`.
    - `places`, `devices`, `cores`: one entry per rank, in rank order. `cores` are the CPU numbers that the rank's
      threads may use.
    - `max_num_seqs`, `max_num_batched_tokens`: limits of each attention group.
    - `uuids`: the driver's ids of the GPUs, in rank order, "" for a rank on the CPU; empty if all ranks are on the CPU.
    - `max_threads`: largest number of threads per rank (OMP_NUM_THREADS); None for a thread per core.
    - `peer_to_peer`: False if a measurement found that the GPUs do not reach each other's memory correctly; all traffic
      between them then goes through the host's memory.
    - `product_backend`: "own", "humming", or "auto" if ranks race both for each shape of a quantised weight.
    - `deterministic`: kernels sum in one order, whatever other tokens are in a step.
    - `lookahead`: each step is scheduled before the tokens of the previous one are known.
    - `window_cache`: layers with a window free the KV behind it. Not with a draft model, which has the same block
      tables, and reads a text from where it last stopped.
    - `kv_cache_bytes`: the user's figure per rank; None to measure the free memory.
    - `engines`: number of engines that share the memory of a CPU: replicas.
    """

    model: str
    checkpoint: str
    load_format: Literal["safetensors", "gguf", "dummy", "sharded_state"]
    shape: ModelShape
    dtype: DType
    kv_cache_dtype: str = "auto"  # a name of architectures.kv; auto: as `dtype`
    quantization: str = "none"
    schemes: dict[str, str] = {}
    places: tuple[Place, ...]
    devices: tuple[RankDevice, ...]
    uuids: tuple[str, ...] = ()
    cores: tuple[tuple[int, ...], ...]
    max_threads: int | None = None
    max_model_len: int
    max_model_len_given: bool = False
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    window_cache: bool = True
    kv_cache_bytes: int | None = None
    engines: int = 1
    gpu_memory_utilization: tuple[float, ...] = ()  # one share per rank; unused on a CPU
    max_memory: dict[str, int] = {}  # bytes that all ranks of a device may take, by its name
    attention_backend: str = "auto"
    product_backend: str = "own"
    deterministic: bool = False
    peer_to_peer: bool = True
    lookahead: bool = False
    speculation: Speculation | None = None
    graphs: bool = False  # decode steps run as CUDA graphs
    seed: int = 0

    @property
    def tensor_parallel(self) -> int:
        return self.places[0].tp_size

    @property
    def stages(self) -> int:
        return self.places[0].stages

    @property
    def data_parallel(self) -> int:
        """Number of attention groups, each with a scheduler and a KV cache of its own, that share the experts."""
        return self.places[0].dp_size

    @property
    def max_running(self) -> int:
        """Number of requests that run at once at most, in all attention groups."""
        return self.max_num_seqs * self.data_parallel

    @property
    def expert_parallel(self) -> int:
        """Number of parts into which the experts are dealt; 1 if every rank has columns of all experts."""
        return max(1, len({place.experts for place in self.places}))

    @property
    def parallelism(self) -> Parallelism:
        """The cut that the places show. The weights of a tensor split are not kept."""
        return Parallelism(
            self.tensor_parallel,
            self.stages,
            self.data_parallel,
            self.expert_parallel,
            self.expert_parallel > 1 or self.data_parallel > 1,
            pipeline_split=tuple(len(self.places[ranks[0]].layers) for ranks in self.tensor_groups[: self.stages]),
        )

    @property
    def output_rank(self) -> int:
        """Number of the rank that samples for the first attention group: the first rank of its last stage."""
        return (self.stages - 1) * self.tensor_parallel

    @property
    def attention_groups(self) -> list[list[int]]:
        """The ranks of each attention group."""
        return self._ranks_with_equal("dp_rank")

    @property
    def tensor_groups(self) -> list[list[int]]:
        """The ranks of each stage of an attention group, in the order of their tensor-parallel ranks."""
        return self._ranks_with_equal("dp_rank", "stage")

    @property
    def pipelines(self) -> list[list[int]]:
        """The ranks of each tensor-parallel rank of an attention group, in the order of their stages."""
        return self._ranks_with_equal("dp_rank", "tp_rank")

    @property
    def data_groups(self) -> list[list[int]]:
        """The ranks with the same share of a stage, in the order of their attention groups."""
        return self._ranks_with_equal("stage", "tp_rank")

    @property
    def expert_groups(self) -> list[list[int]]:
        """The ranks of each stage of all attention groups, which share the stage's experts."""
        return self._ranks_with_equal("stage")

    @property
    def exchange(self) -> Exchange | None:
        """The way in which tokens reach experts on the ranks of other attention groups; None with one group.

        See `exchange_kind`.
        """
        return exchange_kind(self.shape, self.data_parallel, self.expert_parallel)

    @property
    def exchange_groups(self) -> list[list[int]]:
        """The ranks that exchange tokens with each other; empty with one attention group."""
        match self.exchange:
            case "gather":
                return self.data_groups
            case "dispatch":
                return self.expert_groups
        return []

    def _ranks_with_equal(self, *fields: str) -> list[list[int]]:
        """Partition of all ranks by these fields of their places."""
        parts: dict[tuple[int, ...], list[int]] = {}
        for place in self.places:
            parts.setdefault(tuple(getattr(place, name) for name in fields), []).append(place.rank)
        return list(parts.values())

    @property
    def nodes(self) -> int:
        """Number of nodes that the ranks are on."""
        return 1 + max(device.node for device in self.devices)

    def ranks_of(self, node: int) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, device in enumerate(self.devices) if device.node == node]

    def on_one_node(self, ranks: Sequence[int]) -> bool:
        """Return True if all these ranks are on the same node."""
        return len({self.devices[rank].node for rank in ranks}) == 1

    @property
    def exclusive_gpus(self) -> bool:
        """True if each rank has a GPU to itself: NCCL refuses two ranks on one GPU."""
        return not self.uses_cpu and len(set(self.devices)) == len(self.devices)

    @property
    def on_cpu(self) -> bool:
        """True if all ranks run on CPUs."""
        return all(device.kind == "cpu" for device in self.devices)

    @property
    def uses_cpu(self) -> bool:
        """True if a rank runs on a CPU: all of them, or one pipeline stage while others run on GPUs."""
        return any(device.kind == "cpu" for device in self.devices)

    def rank_backend(self, rank: int) -> str:
        """Attention backend of a rank: the plan's, except that a CPU used with GPUs takes its own."""
        is_beside = self.devices[rank].kind == "cpu" and not self.on_cpu
        return "auto" if is_beside and runs_on_gpus(self.attention_backend) else self.attention_backend

    def weight_bytes(self, rank: int) -> int:
        """Bytes of a rank's weights."""
        return rank_weight_bytes(self.shape, self.places[rank], self.dtype, self.schemes)

    def threads(self, rank: int) -> int:
        """Number of threads that a rank computes with."""
        cores = len(self.cores[rank])
        return min(cores, self.max_threads or cores)

    @property
    def kv_dtype(self) -> str:
        """Dtype of the KV cache, a name of `checkpoint.architectures.kv`."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def kv_layout(self) -> KVLayout:
        """Layout of the KV cache: its groups, and the blocks that a text takes."""
        frees = self.window_cache and not (self.speculation and self.speculation.draft)
        chunk = self.max_num_batched_tokens
        return kv_layout(self.shape, block_size=self.block_size, chunk=chunk, window_cache=frees)

    def block_bytes(self, rank: int) -> int:
        """Bytes of one KV block on a rank."""
        return self.kv_layout.block_bytes(kv_specs(self.shape, self.kv_dtype, self.places[rank]))
