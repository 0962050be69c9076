"""Cost: how fast a layout will be. Formulas: docs/planner-accuracy.md; constants: planner.profiles, facts/data.

A request's token takes one round of all stages, and its share of the prompts that are read meanwhile.
"""

from __future__ import annotations

from math import inf
from typing import Literal

import msgspec

from weft.architectures.shape import ModelShape
from weft.hardware.cluster import Cluster
from weft.planner.deployment import DeploymentLayout, Workload
from weft.planner.footprint import Footprint, footprint
from weft.planner.profiles import Profile
from weft.planner.replica import build_replicas
from weft.planner.roofline import Seconds

SEEN = 0.6  # of its answer is in the cache, on average over requests that run together and end at different times
ConcurrencyLimit = Literal["kv_cache", "max_num_seqs", "max_num_batched_tokens", "concurrency"]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a deployment. `single_tok_s` is one request alone, `ttft_s` its first token; `tpot_s` is the mean
    time per token of a request with `concurrency` requests at once, which get `output_tok_s` all together, their
    prompts read in between; `saturated_tok_s` is what the whole deployment answers with `saturated_concurrency`, which
    `limit` limits. `step` is where a round of the slowest replica goes at `concurrency`; `prefill_s` is the reading of
    one prompt on its slowest stage. The error band is relative: 0.2 is 20 % up or down; `error_source` says where it is
    from."""

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


def predict(
    shape: ModelShape,
    layout: DeploymentLayout,
    cluster: Cluster,
    workload: Workload,
    profile: Profile,
    memory: Footprint | None = None,
) -> Prediction:
    """The speed of `layout` under `workload`; `memory` is its footprint where the caller has it already."""
    memory = memory or footprint(shape, layout, cluster, profile, workload)
    runs = build_replicas(shape, layout, cluster, profile)
    limits = _limits(memory, profile, workload)
    full = [room for room, _ in limits]
    # Least connections give every replica as many, whatever its speed: a faster one answers more of them.
    share = inf if workload.concurrency is None else max(1.0, workload.concurrency / len(runs))
    asked = [min(room, share) for room in full]
    # A large cluster has many equal replicas: each is reckoned once.
    steps = [replica.batched_tokens for replica in memory.replicas]
    at_once, saturated = list(zip(runs, asked, steps, strict=True)), list(zip(runs, full, steps, strict=True))
    tpots = {it: it[0].tpot_s(it[1], workload, it[2]) for it in set(at_once)}
    rates = {it: it[0].throughput(it[1], workload, it[2]) for it in {*at_once, *saturated}}
    alone = {run: run.round_s(1, workload).total for run in set(runs)}
    fastest = min(alone, key=lambda run: (alone[run], runs.index(run)))
    # Of fewer requests than replicas some have none.
    concurrency = sum(asked) if workload.concurrency is None else min(sum(asked), workload.concurrency)
    error = profile.error_for(shape, layout.precision)
    slowest, batch, most = max(tpots, key=lambda it: (tpots[it], -runs.index(it[0])))
    return Prediction(
        single_tok_s=1 / alone[fastest],
        ttft_s=fastest.prompt_s(workload, steps[runs.index(fastest)]),
        tpot_s=sum(asked) / sum(it[1] / tpots[it] for it in at_once),
        concurrency=concurrency,
        output_tok_s=sum(rates[it] for it in at_once) * (concurrency / sum(asked)),
        saturated_tok_s=sum(rates[it] for it in saturated),
        saturated_concurrency=sum(full),
        limit=limits[0][1] if asked == full else "concurrency",
        step=slowest.round_s(batch, workload),
        prefill_s=slowest.prefill_s(workload, most),
        error_band=error.value,
        error_source=error.source,
    )


def _limits(memory: Footprint, profile: Profile, workload: Workload) -> list[tuple[float, ConcurrencyLimit]]:
    """The most requests that each replica runs at once, and why. A step has the next token of each, and beside them
    what is to be read of prompts in the meantime for as many to stay under way."""
    stages = memory.layout.pipeline_parallel
    steps = stages if profile.pipelined.value else 1
    known: dict[int, tuple[float, ConcurrencyLimit]] = {}
    for replica in memory.replicas:
        if id(replica) not in known:
            most = min(profile.batch_limits(rank.memory_bytes)[1] for rank in replica.ranks)
            told = steps * replica.batched_tokens / (1 + workload.input_len / workload.output_len)
            found: list[tuple[float, ConcurrencyLimit]] = [
                (_held(replica.kv_tokens, workload), "kv_cache"),
                (most * (stages if profile.max_num_seqs_by_stage.value else 1), "max_num_seqs"),
                (max(1.0, told), "max_num_batched_tokens"),
            ]
            known[id(replica)] = min(found, key=lambda it: it[0])
    return [known[id(replica)] for replica in memory.replicas]


def _held(kv_tokens: int, workload: Workload) -> float:
    """How many requests a KV cache has room for, with others always waiting. Of few it counts that they are whole: they
    run evenly behind each other, and the first is at its end when the others have half of their answers on average."""
    usual, half = workload.context(SEEN), workload.context(0.5)
    return max(1.0, min(kv_tokens / usual, (kv_tokens - (half - workload.input_len)) / half))
