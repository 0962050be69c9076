"""Forecast: what the planner expects of a plan that runs here, and how it is told beside what came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.architectures.shape import DTYPE_BYTES
from weft.config import DEFAULT_CONFIG
from weft.formats.precision import OF_DTYPE
from weft.formatting import format_bytes
from weft.hardware.cluster import Cluster, Node
from weft.hardware.host import Host
from weft.plan.memory import Capacity
from weft.plan.plan import Plan
from weft.plan.quantization import precision_of
from weft.planner.batch import Choice
from weft.planner.cost import Prediction, predict
from weft.planner.deployment import Layout, Workload
from weft.planner.footprint import Footprint, activation_bytes, footprint
from weft.planner.profiles import Profile
from weft.planner.question import Question
from weft.planner.search import engine_profile
from weft.probes.machine import part, this_machine
from weft.probes.speeds import Speeds

GUESSED = " (with guesses, whose worth is not predicted)"
HINT = "weft bench calibrate measures what this machine really does"


@dataclass(frozen=True)
class Forecast:
    """A plan with what is expected of it. `layout` has its ranks on the devices of `cluster`, where those that share a
    device have a part of it each; `step_bytes` is what a step takes on each rank."""

    plan: Plan
    layout: Layout
    cluster: Cluster
    profile: Profile
    memory: Footprint
    step_bytes: tuple[int, ...]

    @property
    def weight_bytes(self) -> int:
        """Of all ranks, a draft model's too."""
        return sum(rank.weights.total + rank.draft_bytes for rank in self.memory.ranks)

    @property
    def kv_tokens(self) -> int:
        """That every rank has room for."""
        size, given = self.plan.block_size, self.plan.kv_cache_bytes
        if given is None:
            return self.memory.kv_tokens // size * size
        return min(given // (rank.kv_bytes_per_token * size) for rank in self.memory.ranks) * size

    @property
    def tells_speed(self) -> bool:
        """Whether the speed is known: guesses are worth what the texts make of them."""
        return self.plan.speculation is None

    def speed(self, input_len: float, output_len: float, concurrency: float = 1) -> Prediction:
        """With so many requests at once, of these lengths in tokens."""
        work = Workload(
            input_len=max(1, round(input_len)),
            output_len=max(1, round(output_len)),
            concurrency=max(1, round(concurrency)),
        )
        return predict(self.plan.shape, self.layout, self.cluster, work, self.profile, self.memory)


def forecast(plan: Plan, host: Host, known: Speeds) -> Forecast:
    """`host` as it was before the engine started, `known` what `execution.seen` says of it. Raises ConfigError for a
    GPU of which nothing is known."""
    layout, cluster, profile = as_candidate(plan, host, known, plan.max_num_batched_tokens)
    steps = tuple(
        activation_bytes(
            plan.shape, place, plan.max_num_batched_tokens, plan.max_num_seqs, profile, DTYPE_BYTES[plan.dtype]
        )
        for place in plan.places
    )
    return Forecast(plan, layout, cluster, profile, footprint(plan.shape, layout, cluster, profile), steps)


def step_choice(plan: Plan, host: Host, known: Speeds) -> Choice:
    """The most tokens of a step that `planner.batch` chooses for a plan, whatever it has. Raises as `forecast`."""
    layout, cluster, profile = as_candidate(plan, host, known, None)
    length = Workload(max_model_len=plan.max_model_len if plan.max_model_len_given else None)
    (memory,) = footprint(plan.shape, layout, cluster, profile, length).replicas
    return Choice(memory.batched_tokens, memory.batched_reason)


def as_candidate(plan: Plan, host: Host, known: Speeds, batched_tokens: int | None) -> tuple[Layout, Cluster, Profile]:
    """A plan as the search has its candidates, with the devices of its ranks and our engine's constants on them."""
    on_cpu = plan.devices[0] == "cpu"
    here = msgspec.structs.replace(host, gpus=(), pairs=()) if on_cpu else host
    kept = OF_DTYPE[plan.dtype] if plan.kv_cache_dtype == "auto" else plan.kv_cache_dtype
    precision = precision_of(plan.shape, plan.quantization, plan.schemes, plan.dtype)
    devices = [0] * len(plan.devices) if on_cpu else [gpu.index for gpu in host.named(plan.devices)]
    cluster = parted(limited(this_machine(here, known), plan, devices), devices)
    layout = Layout(
        tensor_weights=(1.0,) * plan.tensor_parallel,
        stage_layers=tuple(len(place.layers) for place in plan.places[:: plan.tensor_parallel]),
        data_parallel=1,
        expert_parallel=1,
        precision=precision,
        kv_dtype=kept,
        places=plan.places,
        gpus=tuple(range(len(plan.places))),
    )
    shares = set() if on_cpu else set(plan.gpu_memory_utilization)
    profile = engine_profile(
        Question(
            model=plan.model,
            shape=plan.shape,
            cluster=cluster,
            engine="weft",
            precisions=(precision,),
            kv_dtype=kept,
            # Other shares are limits, or those of GPUs that one request has to fill: the same rule finds them again.
            gpu_memory_utilization=shares.pop() if len(shares) == 1 else None,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=batched_tokens,
            speculation=plan.speculation,
        )
    )
    return layout, cluster, profile


def limited(cluster: Cluster, plan: Plan, devices: Sequence[int]) -> Cluster:
    """With no more of each device than what the user leaves to its ranks: --max-memory, or shares of their own."""
    gpus = list(cluster.gpus)
    for rank, device in enumerate(devices):
        gpu, limit = gpus[device], plan.max_memory.get(plan.devices[rank])
        if limit is None and len(set(plan.gpu_memory_utilization)) > 1:
            share = plan.gpu_memory_utilization[rank]
            limit = (
                int(gpu.memory_bytes * share) - gpu.held_bytes
                if share < DEFAULT_CONFIG.gpu_memory_utilization[0]
                else None
            )
        gpus[device] = msgspec.structs.replace(gpu, limit_bytes=limit)
    return cluster.with_gpus(gpus)


def parted(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    """One device for each rank, of one machine's: those that ranks share are divided evenly among them."""
    (node,) = cluster.nodes
    sharing = Counter(devices)
    gpus = (part(node.gpus[it], sharing[it]) if sharing[it] > 1 else node.gpus[it] for it in devices)
    return Cluster((Node(tuple(gpus), node.link),), cluster.network_Bps)


# --- beside what came out ---


def started(expected: Forecast, ranks: Sequence[Capacity], num_blocks: int) -> str:
    """Once the engine is ready: its memory, and how long the weights took."""
    tokens = num_blocks * expected.plan.block_size
    parts = (
        ("of weights", sum(rank.weight_bytes for rank in ranks), expected.weight_bytes, format_bytes),
        ("for a step", max(rank.activation_bytes for rank in ranks), max(expected.step_bytes), format_bytes),
        ("tokens of KV", tokens, expected.kv_tokens, "{:,}".format),
    )
    told = [f"{tell(real)} {what}{beside(real, planned, tell)}" for what, real, planned, tell in parts]
    far = any(far_off(expected, real, planned) for _, real, planned, _ in parts)
    return f"memory: {', '.join(told)}; loaded in {max(rank.load_s for rank in ranks):.1f} s{hint(far)}"


def answered(expected: Forecast, *, input_len: int, output_len: int, ttft_s: float, tok_s: float) -> str:
    """After a request that was alone: `tok_s` are its tokens per second after the first."""
    if not expected.tells_speed:
        first, then = milliseconds(ttft_s), f"{rate(tok_s)} tokens/s"
        return (
            f"one request of {input_len:,} + {output_len:,} tokens: the first token after {first}, then {then}{GUESSED}"
        )
    speed = expected.speed(input_len, output_len)
    far = far_off(expected, ttft_s, speed.ttft_s) or far_off(expected, tok_s, speed.single_tok_s)
    return (
        f"one request of {input_len:,} + {output_len:,} tokens: the first token after {milliseconds(ttft_s)}"
        f"{beside(ttft_s, speed.ttft_s, milliseconds)}, then {rate(tok_s)} tokens/s"
        f"{beside(tok_s, speed.single_tok_s, rate)}{hint(far)}"
    )


def crowded(
    expected: Forecast, *, requests: int, input_len: float, output_len: float, concurrency: float, tok_s: float
) -> str:
    """After many requests, of which `concurrency` ran at once on average: `tok_s` are the tokens of all per second."""
    told = f"{requests:,} requests, {concurrency:.0f} at once, of {input_len:,.0f} + {output_len:,.0f} tokens: "
    told += f"{rate(tok_s)} tokens/s in all"
    if not expected.tells_speed:
        return told + GUESSED
    speed = expected.speed(input_len, output_len, concurrency)
    planned = speed.concurrency / speed.tpot_s
    return f"{told}{beside(tok_s, planned, rate)}{hint(far_off(expected, tok_s, planned))}"


def predicted_json(expected: Forecast, input_len: int, output_len: int) -> dict[str, Any]:
    """For one request of these lengths: bytes of all ranks, seconds, tokens per second; None what is not known."""
    speed = expected.speed(input_len, output_len)
    return {
        "weight_bytes": expected.weight_bytes,
        "kv_tokens": expected.kv_tokens,
        "ttft_s": round(speed.ttft_s, 4) if expected.tells_speed else None,
        "decode_tok_s": round(speed.single_tok_s, 2) if expected.tells_speed else None,
        "error_band": speed.error_band,
    }


def beside(real: float, planned: float, tell: Callable[[Any], str]) -> str:
    """ " (0.97 of the predicted 1,234)" """
    return f" ({real / planned:.2f} of the predicted {tell(planned)})" if planned > 0 else ""


def far_off(expected: Forecast, real: float, planned: float) -> bool:
    """Whether a figure lies outside of the error band."""
    band = expected.profile.error_of(expected.plan.shape, expected.layout.precision).value
    return planned > 0 and not 1 - band <= real / planned <= 1 + band


def hint(far: bool) -> str:
    return f"; {HINT}" if far else ""


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
