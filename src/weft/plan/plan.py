"""Plan: what is executed. JSON in, JSON out; every rank gets the same one and finds itself in it."""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.architectures.kv import number_bytes
from weft.architectures.place import Place
from weft.architectures.shape import DType, ModelShape
from weft.plan.fills import rank_weight_bytes


class DraftModel(msgspec.Struct, frozen=True, kw_only=True):
    """A small model that guesses for the large one, whole on the output rank. `checkpoint` as in `Plan`."""

    model: str
    checkpoint: str
    load_format: Literal["safetensors", "gguf", "dummy"]
    shape: ModelShape


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """At most `tokens` guesses of a request's next tokens in a step: a draft model's, or else what followed its last
    `lookup_max` to `lookup_min` tokens where they came before."""

    tokens: int
    lookup_min: int = 2
    lookup_max: int = 4
    draft: DraftModel | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A model, cut across ranks, with the limits that it runs under. Sizes are bytes, lengths tokens.

    `places`, `devices` and `cores` have one entry per rank, in rank order; a device is "cpu" or "cuda:N", and `uuids`
    are what the driver calls those GPUs (none for a CPU);
    `cores` are the CPU numbers that the rank's threads may use, `max_threads` the most that they may be
    (OMP_NUM_THREADS), None for one per core. `peer_to_peer` is False where GPUs were found not to reach each other's
    memory as they should: all that passes between them goes through the host's. `checkpoint` is a directory or a
    GGUF file, empty with `load_format` "dummy". With `lookahead` a step is scheduled before the tokens of the one
    before are known. `kv_cache_bytes` is the user's figure per rank, None to measure. `schemes` are those tensors of
    the checkpoint that are held quantised, with how (`formats.schemes`); the others are in `dtype`.
    """

    model: str
    checkpoint: str
    load_format: Literal["safetensors", "gguf", "dummy"]
    shape: ModelShape
    dtype: DType
    kv_cache_dtype: str = "auto"  # in the planner's words, architectures.kv; auto: as `dtype`
    quantization: str = "none"
    schemes: dict[str, str] = {}
    places: tuple[Place, ...]
    devices: tuple[str, ...]
    uuids: tuple[str, ...] = ()
    cores: tuple[tuple[int, ...], ...]
    max_threads: int | None = None
    max_model_len: int
    max_model_len_given: bool = False
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: tuple[float, ...] = ()  # one share per rank; a CPU needs none
    max_memory: dict[str, int] = {}  # bytes that all ranks of a device may take, where the user says so
    attention_backend: str = "auto"
    peer_to_peer: bool = True
    lookahead: bool = False
    speculation: Speculation | None = None
    graphs: bool = False  # decode steps as CUDA graphs
    seed: int = 0

    @property
    def tensor_parallel(self) -> int:
        return self.places[0].tp_size

    @property
    def stages(self) -> int:
        return self.places[0].stages

    @property
    def output_rank(self) -> int:
        """The rank that samples: the first of the last stage."""
        return (self.stages - 1) * self.tensor_parallel

    def weight_bytes(self, rank: int) -> int:
        """Bytes of a rank's weights."""
        return rank_weight_bytes(self.shape, self.places[rank], self.dtype, self.schemes)

    def threads(self, rank: int) -> int:
        """How many threads a rank computes with."""
        cores = len(self.cores[rank])
        return min(cores, self.max_threads or cores)

    @property
    def kv_dtype(self) -> str:
        """What a number of the KV cache is kept in, a name of `architectures.kv`."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def block_bytes(self, rank: int) -> int:
        """Bytes of one KV block on a rank: keys and values of its layers and KV heads."""
        place = self.places[rank]
        per_token = 2 * len(place.kv_heads) * self.shape.head_dim * number_bytes(self.kv_dtype)
        return per_token * self.block_size * len(place.layers)
