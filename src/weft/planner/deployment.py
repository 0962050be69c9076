"""Workload and DeploymentLayout: what a deployment has to serve, and how a model is cut over the GPUs of a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import ModelShape
from weft.errors import ConfigError, PlanError
from weft.machine.hardware.cluster import Cluster
from weft.plan.parallelism import Parallelism
from weft.plan.places import engine_places

DEFAULT_LENGTH = 1024  # tokens of a prompt, and of an answer, if the user gives neither


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that a deployment has to serve.

    Lengths are in tokens and are means over all requests. `output_spread` is the standard deviation of the answers'
    lengths divided by their mean; 0 if all are equally long. `concurrency` is the number of requests that run at once
    in the whole deployment; None stands for as many as the KV cache and the engine hold (saturated). `max_model_len` is
    the longest request that must fit, by default input and output together.
    """

    input_len: int = DEFAULT_LENGTH
    output_len: int = DEFAULT_LENGTH
    output_spread: float = 0.0
    concurrency: int | None = None
    max_model_len: int | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest request that must fit."""
        return self.max_model_len or self.input_len + self.output_len

    def context(self, share: float) -> float:
        """Mean context length of a running request that has `share` of its answer, in tokens.

        Long answers are over-represented among the running requests: their mean length is E[L^2] / E[L] (length-biased
        sampling, from renewal theory).
        """
        return self.input_len + share * self.output_len * (1 + self.output_spread**2)


def check_length(length: int, model: str, longest: int) -> None:
    """Raise ConfigError for a request that is longer than a model goes."""
    if length > longest:
        raise ConfigError(
            f"max_model_len is {length}; {model} goes up to {longest:,} tokens: give that or less",
            code="max-model-len-above-model",
        )


def default_lengths(input_len: int | None, output_len: int | None, most: int) -> tuple[int, int]:
    """Lengths of prompt and answer, which together have at most `most` tokens.

    A length that is None becomes DEFAULT_LENGTH, or less if the other one leaves less room.
    """
    if input_len is None and output_len is None:
        half = max(1, min(DEFAULT_LENGTH, most // 2))
        return half, half
    if input_len is None:
        assert output_len is not None
        return max(1, min(DEFAULT_LENGTH, most - output_len)), output_len
    if output_len is None:
        return input_len, max(1, min(DEFAULT_LENGTH, most - input_len))
    return input_len, output_len


class DeploymentLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A model cut over the GPUs of a cluster.

    `places` and `gpus` have one entry per rank of the deployment, ordered by replica, then by stage:
    rank = (replica * pipeline_parallel + stage) * tensor_parallel + tp_rank. `gpus[rank]` is the number of its
    GPU in `Cluster` order (node by node). Replicas differ only in the experts that they hold; `place.rank`
    counts within an engine: a replica, or all replicas if they share their experts. `precision` and `kv_dtype` are
    names of `checkpoint.quantised.precision`.
    """

    parallelism: Parallelism
    precision: str
    kv_dtype: str
    places: tuple[Place, ...]

    @property
    def gpus(self) -> tuple[int, ...]:
        return self.parallelism.devices

    def gpu_count(self, cluster: Cluster) -> int:
        """Number of GPUs of the cluster that it uses; without GPUs, of the CPU's parts."""
        return len({number for number in self.gpus if number < len(cluster.gpus)})

    def replica_slices(self) -> Iterator[slice]:
        """The ranks of each replica, as slices of `places` and `gpus`."""
        size = self.parallelism.replica_size
        yield from (slice(start, start + size) for start in range(0, len(self.gpus), size))

    def rank_signatures(self, cluster: Cluster) -> list[tuple[int, int, int]]:
        """(number of experts, columns of each, identity of the GPU's spec) per rank: all that replicas may differ
        in."""
        gpus = cluster.devices
        if not self.parallelism.shares_experts:
            return [(0, 0, id(gpus[index])) for index in self.gpus]
        return [
            (len(place.experts), len(place.expert_ffn), id(gpus[index]))
            for place, index in zip(self.places, self.gpus, strict=True)
        ]

    def replica(self, number: int) -> tuple[tuple[Place, int], ...]:
        """(place, GPU number) of each rank of one replica."""
        ranks = slice(number * self.parallelism.replica_size, (number + 1) * self.parallelism.replica_size)
        return tuple(zip(self.places[ranks], self.gpus[ranks], strict=True))


def deploy(shape: ModelShape, parallelism: Parallelism, *, precision: str, kv_dtype: str) -> DeploymentLayout:
    """Lay out as many replicas as the parallelism has devices for; experts that it leaves open are cut like all else.

    Raises PlanError for a cut that the model does not allow.
    """
    size, gpus = parallelism.replica_size, parallelism.devices
    replicas, left_over = divmod(len(gpus), size)
    if left_over or not replicas:
        raise PlanError(
            f"{len(gpus)} GPUs are no multiple of the {size} ranks of a replica", code="gpus-not-multiple-of-replica"
        )
    parts = parallelism.expert_parallel or 1
    cut = msgspec.structs.replace(
        parallelism,
        data_parallel=replicas,
        expert_parallel=parts,
        deals_experts=parallelism.deals_experts is True and max(parts, replicas) > 1,
    )
    places = engine_places(shape, cut, precision)
    return DeploymentLayout(parallelism=cut, precision=precision, kv_dtype=kv_dtype, places=places * cut.engines)
