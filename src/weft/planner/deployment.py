"""Deployment: a way to cut a model and lay it on the GPUs of a cluster, before there is an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from weft.architectures.place import Place
from weft.architectures.shape import ModelShape
from weft.errors import PlanError
from weft.hardware.cluster import Cluster
from weft.plan.places import column_unit, cut_places, deal_experts

LENGTH = 1024  # tokens of a prompt, and of an answer, where nobody says


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a deployment. Lengths are tokens, the means of all requests; `output_spread` is the standard
    deviation of answers' lengths over their mean, 0 where all are equally long. `concurrency` counts the requests that
    run at once in the whole deployment, None for as many as its KV cache and its engine hold (saturated).

    `max_model_len` is the longest request that must fit, by default input and output together.
    """

    input_len: int = LENGTH
    output_len: int = LENGTH
    output_spread: float = 0.0
    concurrency: int | None = None
    max_model_len: int | None = None

    @property
    def longest(self) -> int:
        return self.max_model_len or self.input_len + self.output_len

    def context(self, share: float) -> float:
        """Tokens of a request that runs, with `share` of its answer. A long answer is met among those that run more
        often than a short one: their mean length is E[L^2] / E[L] (length-biased sampling, of renewal theory)."""
        return self.input_len + share * self.output_len * (1 + self.output_spread**2)


def lengths(input_len: int | None, output_len: int | None, most: int) -> tuple[int, int]:
    """Tokens of a prompt and of its answer, which together are `most` at most: as said, else LENGTH, or as many as
    leave room for the other one."""
    if input_len is None and output_len is None:
        half = max(1, min(LENGTH, most // 2))
        return half, half
    if input_len is None:
        assert output_len is not None
        return max(1, min(LENGTH, most - output_len)), output_len
    return input_len, max(1, min(LENGTH, most - input_len)) if output_len is None else output_len


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is cut and where its parts lie: `data_parallel` replicas of `pipeline_parallel` stages of
    `tensor_parallel` ranks.

    `places` and `gpus` have one entry per rank of the deployment, replica by replica, and in it stage by stage:
    rank = (replica * pipeline_parallel + stage) * tensor_parallel + tp_rank. `gpus[rank]` is the number of its
    GPU in `Cluster` order (node by node). Replicas differ in nothing but which experts they hold; `place.rank`
    counts within a replica. `precision` and `kv_dtype` are names of `formats.precision`.

    `expert_parallel` is the number of ranks that a layer's routed experts are dealt out to whole: 1 where every
    rank holds a slice of each expert, else tensor_parallel, or tensor_parallel * data_parallel where the
    replicas share one set of experts (attention data parallel).
    """

    tensor_weights: tuple[float, ...]
    stage_layers: tuple[int, ...]
    data_parallel: int
    expert_parallel: int
    precision: str
    kv_dtype: str
    places: tuple[Place, ...]
    gpus: tuple[int, ...]

    @property
    def tensor_parallel(self) -> int:
        return len(self.tensor_weights)

    @property
    def pipeline_parallel(self) -> int:
        return len(self.stage_layers)

    @property
    def size(self) -> int:
        """Ranks of one replica."""
        return self.tensor_parallel * self.pipeline_parallel

    def replicas(self) -> Iterator[slice]:
        """The ranks of each replica."""
        size = self.size
        yield from (slice(start, start + size) for start in range(0, len(self.gpus), size))

    def marks(self, cluster: Cluster) -> list[tuple[int, int]]:
        """Of each rank what replicas may differ in: how many experts it holds, and on which GPU, by identity."""
        gpus = cluster.gpus
        if self.expert_parallel <= self.tensor_parallel:
            return [(0, id(gpus[index])) for index in self.gpus]
        return [
            (place.experts.stop - place.experts.start, id(gpus[at]))
            for place, at in zip(self.places, self.gpus, strict=True)
        ]

    def replica(self, number: int) -> tuple[tuple[Place, int], ...]:
        """(place, GPU) of each rank of a replica."""
        ranks = slice(number * self.size, (number + 1) * self.size)
        return tuple(zip(self.places[ranks], self.gpus[ranks], strict=True))


def deploy(
    shape: ModelShape,
    *,
    tensor_weights: Sequence[float],
    stage_layers: Sequence[int],
    gpus: Sequence[int],
    precision: str,
    kv_dtype: str,
    expert_parallel: bool = False,
) -> Layout:
    """The layout of as many replicas as `gpus` suffice for; `expert_parallel` deals the experts out to all of them.

    Raises PlanError for a cut that the model does not allow.
    """
    weights, layers = tuple(tensor_weights), tuple(stage_layers)
    size, unit = len(weights) * len(layers), column_unit(shape, precision)
    replicas, rest = divmod(len(gpus), size)
    if rest or not replicas:
        raise PlanError(f"{len(gpus)} GPUs are no multiple of the {size} ranks of a replica")
    ranked = _places(shape, weights, layers, (0, replicas) if expert_parallel else None, unit) * replicas
    if expert_parallel and shape.experts:
        # Replicas differ in nothing but which experts they hold.
        dealt, tensor = deal_experts(shape.experts.count, weights * replicas), len(weights)
        held = [dealt[rank // size * tensor + place.tp_rank] for rank, place in enumerate(ranked)]
        ranked = tuple(msgspec.structs.replace(it, experts=own) for it, own in zip(ranked, held, strict=True))
    return Layout(
        tensor_weights=weights,
        stage_layers=layers,
        data_parallel=replicas,
        expert_parallel=len(tensor_weights) * replicas if expert_parallel else 1,
        precision=precision,
        kv_dtype=kv_dtype,
        places=ranked,
        gpus=tuple(gpus),
    )


# A search tries the same cuts many times over.
_places = lru_cache(maxsize=1024)(cut_places)
