"""Predicted speed of a layout. Formulas: docs/planner-accuracy.md; constants: planner.profiles, hardware/data.

A token of a request takes one round through all stages, plus its share of the prompts that are read in that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Literal, NamedTuple

import msgspec

from weft.checkpoint.architectures.shape import ModelShape
from weft.machine.hardware.cluster import Cluster
from weft.planner.deployment import DeploymentLayout, Workload
from weft.planner.memory.footprint import Footprint, ReplicaMemory, footprint
from weft.planner.profiles import EngineProfile
from weft.planner.work.replica import PlannedReplica, build_replicas
from weft.planner.work.roofline import Seconds

# Share of its answer that a request has in the cache, on average over requests that run together and end at different
# times.
MEAN_ANSWER_SHARE = 0.6
ConcurrencyLimit = Literal["kv_cache", "max_num_seqs", "max_num_batched_tokens", "concurrency"]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a deployment.

    `single_tok_s` is the speed of one request alone, `ttft_s` the time to its first token. `tpot_s` is the mean time
    per token of a request with `concurrency` requests at once, and `output_tok_s` the speed of all of these together,
    with their prompts read in between. `saturated_tok_s` is the speed of the whole deployment with
    `saturated_concurrency` requests, a number that `limit` limits. `step` is the time of a round of the slowest replica
    at `concurrency` by what it is spent on. `prefill_s` is the time to read one prompt on its slowest stage.
    `error_band` is relative (0.2 is 20 % up or down), and `error_source` says where it is from.
    """

    single_tok_s: float
    ttft_s: float
    tpot_s: float
    concurrency: float
    output_tok_s: float
    saturated_tok_s: float
    saturated_concurrency: float
    limit: ConcurrencyLimit
    step: Seconds
    prefill_s: float
    error_band: float
    error_source: str


class _Load(NamedTuple):
    """One replica with the number of requests that it runs at once. A large cluster has many equal ones: as keys of a
    dict they are computed once."""

    replica: PlannedReplica
    batch: float
    step_tokens: int

    def tpot_s(self, workload: Workload) -> float:
        return self.replica.tpot_s(self.batch, workload, self.step_tokens)

    def throughput(self, workload: Workload) -> float:
        return self.replica.throughput(self.batch, workload, self.step_tokens)


def predict(
    shape: ModelShape,
    layout: DeploymentLayout,
    cluster: Cluster,
    workload: Workload,
    profile: EngineProfile,
    memory: Footprint | None = None,
) -> Prediction:
    """The speed of `layout` under `workload`; `memory` is its footprint, if the caller has computed it already."""
    memory = memory or footprint(shape, layout, cluster, profile, workload)
    replicas = build_replicas(shape, layout, cluster, profile)
    limits = _limits(memory, profile, workload)
    full = [room for room, _ in limits]
    batches = _running_batches(full, workload)
    steps = [replica.batched_tokens for replica in memory.replicas]
    running, saturated = _loads(replicas, batches, steps), _loads(replicas, full, steps)
    tpots = {load: load.tpot_s(workload) for load in set(running)}
    rates = {load: load.throughput(workload) for load in {*running, *saturated}}
    fastest, round_s = _fastest_alone(replicas, workload)
    # With fewer requests than replicas some replicas have none.
    concurrency = min(sum(batches), workload.concurrency or inf)
    error = profile.error_for(shape, layout.precision)
    slowest = _slowest(tpots, replicas)
    return Prediction(
        single_tok_s=1 / round_s,
        ttft_s=replicas[fastest].prompt_s(workload, steps[fastest]),
        tpot_s=sum(batches) / _tokens_per_second(running, tpots),
        concurrency=concurrency,
        output_tok_s=_total_rate(running, rates) * (concurrency / sum(batches)),
        saturated_tok_s=_total_rate(saturated, rates),
        saturated_concurrency=sum(full),
        limit=limits[0][1] if batches == full else "concurrency",
        step=slowest.replica.round_s(slowest.batch, workload),
        prefill_s=slowest.replica.prefill_s(workload, slowest.step_tokens),
        error_band=error.value,
        error_source=error.source,
    )


def _loads(replicas: list[PlannedReplica], batches: list[float], steps: list[int]) -> list[_Load]:
    return [_Load(*load) for load in zip(replicas, batches, steps, strict=True)]


def _running_batches(full: list[float], workload: Workload) -> list[float]:
    """Requests that each replica runs at once, at most as many as it has room for.

    Least-connections routing gives every replica an equal number, whatever its speed: a faster one answers more.
    """
    if workload.concurrency is None:
        return full
    share = max(1.0, workload.concurrency / len(full))
    return [min(room, share) for room in full]


def _tokens_per_second(loads: list[_Load], tpots: Mapping[_Load, float]) -> float:
    """Output tokens per second of all requests while they decode."""
    return sum(load.batch / tpots[load] for load in loads)


def _total_rate(loads: list[_Load], rates: Mapping[_Load, float]) -> float:
    return sum(rates[load] for load in loads)


def _slowest(tpots: Mapping[_Load, float], replicas: list[PlannedReplica]) -> _Load:
    """The load with the longest time per token, and among equal ones the load of the first replica."""
    return max(tpots, key=lambda load: (tpots[load], -replicas.index(load.replica)))


def _fastest_alone(replicas: list[PlannedReplica], workload: Workload) -> tuple[int, float]:
    """(number, seconds of a round) of the replica that is fastest with one request; the first of equal ones."""
    seconds = {replica: replica.round_s(1, workload).total for replica in set(replicas)}
    fastest = min(range(len(replicas)), key=lambda number: seconds[replicas[number]])
    return fastest, seconds[replicas[fastest]]


def _limits(memory: Footprint, profile: EngineProfile, workload: Workload) -> list[tuple[float, ConcurrencyLimit]]:
    """(most requests at once, the limit that sets it) for each replica."""
    stages = memory.layout.parallelism.pipeline_parallel
    known: dict[int, tuple[float, ConcurrencyLimit]] = {}
    for replica in memory.replicas:
        if id(replica) not in known:
            known[id(replica)] = _limit(replica, stages, profile, workload)
    return [known[id(replica)] for replica in memory.replicas]


def _limit(
    replica: ReplicaMemory, stages: int, profile: EngineProfile, workload: Workload
) -> tuple[float, ConcurrencyLimit]:
    """The limit of one replica. A step holds the next token of each request, and also the parts of prompts that have to
    be read so that as many requests stay in flight."""
    sequences = min(profile.batch_limits(rank.memory_bytes)[1] for rank in replica.ranks)
    steps = stages if profile.pipelined.value else 1
    by_tokens = steps * replica.batched_tokens / (1 + workload.input_len / workload.output_len)
    limits: list[tuple[float, ConcurrencyLimit]] = [
        (_requests_in_cache(replica, workload), "kv_cache"),
        (sequences * (stages if profile.max_num_seqs_by_stage.value else 1), "max_num_seqs"),
        (max(1.0, by_tokens), "max_num_batched_tokens"),
    ]
    return min(limits, key=lambda limit: limit[0])


def _requests_in_cache(replica: ReplicaMemory, workload: Workload) -> float:
    """Number of requests that a KV cache has room for, with others always waiting.

    The smaller of two estimates. Many requests end at different times, and need MEAN_ANSWER_SHARE of their answers on
    average. A few run evenly spaced: when one is at its end, the others have half of their answers on average.
    """
    room: float = replica.kv_tokens
    usual, half, prompt = workload.context(MEAN_ANSWER_SHARE), workload.context(0.5), float(workload.input_len)
    if replica.kv.in_blocks:
        room, layout = replica.num_blocks, replica.kv.layout
        usual, half, prompt = (layout.blocks(round(tokens), chunk=1) for tokens in (usual, half, prompt))
    return max(1.0, min(room / usual, (room - (half - prompt)) / half))
