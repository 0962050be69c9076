"""Forecast: predicted memory and speed of a plan that runs here, and reports that compare them with measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from weft.checkpoint.architectures.shape import DTYPE_BYTES
from weft.checkpoint.quantised.precision import OF_DTYPE
from weft.config import DEFAULT_CONFIG
from weft.errors import ConfigError
from weft.formatting import format_bytes
from weft.machine.hardware.cluster import Cluster, Node
from weft.machine.hardware.host import Host
from weft.plan.limits import limits_of
from weft.plan.memory import Capacity
from weft.plan.plan import Plan
from weft.plan.quantization import precision_of
from weft.planner.deployment import DeploymentLayout, Workload
from weft.planner.memory.activations import activation_bytes
from weft.planner.memory.footprint import Footprint, footprint
from weft.planner.profiles import EngineProfile, engine_profile
from weft.planner.question import Question
from weft.planner.speed.cost import Prediction, predict
from weft.planner.work.batch import TokenBudget
from weft.probes.machine import add_cpu, host_cluster, rank_share
from weft.probes.stored_speeds import Speeds

SPECULATIVE = " (with speculative decoding, whose gain is not predicted)"
HINT = "weft bench calibrate measures what this machine really does"


@dataclass(frozen=True)
class Forecast:
    """A plan with its predictions.

    `layout` has the plan's ranks on the devices of `cluster`; ranks that share a device have a part of it each.
    `step_bytes` are the activation bytes of a step on each rank.
    """

    plan: Plan
    layout: DeploymentLayout
    cluster: Cluster
    profile: EngineProfile
    memory: Footprint
    step_bytes: tuple[int, ...]

    @property
    def weight_bytes(self) -> int:
        """Weight bytes of all ranks, with a draft model's."""
        return sum(rank.weights.total + rank.draft_bytes for rank in self.memory.ranks)

    @property
    def kv_tokens(self) -> int:
        """KV-cache tokens of all attention groups together; a group has what each of its ranks has room for."""
        plan, size, given = self.plan, self.plan.block_size, self.plan.kv_cache_bytes
        groups = plan.data_parallel
        if plan.kv_layout.has_windows:
            rooms = [rank.kv_room_bytes if given is None else given for rank in self.memory.ranks]
            blocks = min(room // plan.block_bytes(rank) for rank, room in enumerate(rooms))
            return groups * plan.kv_layout.tokens(max(0, blocks), plan.max_model_len)
        if given is None:
            return groups * (self.memory.kv_tokens // groups // size * size)
        return groups * min(given // (rank.kv_bytes_per_token * size) for rank in self.memory.ranks) * size

    @property
    def tells_speed(self) -> bool:
        """Return True if the speed can be predicted: with draft tokens it depends on the texts."""
        return self.plan.speculation is None

    def speed(self, input_len: float, output_len: float, concurrency: float = 1) -> Prediction:
        """The predicted speed with `concurrency` requests at once, of these lengths in tokens."""
        work = Workload(
            input_len=max(1, round(input_len)),
            output_len=max(1, round(output_len)),
            concurrency=max(1, round(concurrency)),
        )
        return predict(self.plan.shape, self.layout, self.cluster, work, self.profile, self.memory)

    def over_network(self, network_Bps: float, network_s: float) -> Forecast:
        """The forecast for the same ranks, each on a node of its own.

        `network_Bps` is bytes per second from one node to another, `network_s` the time of a small message in seconds.
        """
        nodes = tuple(Node((gpu,), self.cluster.nodes[0].link) for gpu in self.cluster.gpus)
        return replace(self, cluster=Cluster(nodes, network_Bps, network_s=network_s))


def forecast_plan(plan: Plan, host: Host, known: Speeds) -> Forecast:
    """The forecast of a plan.

    `host` is the machine as it was before the engine started, `known` the result of `execution.measured_speeds`. Raises
    ConfigError for a GPU that is not in the catalogue, and for ranks on several nodes.
    """
    if plan.nodes > 1:
        raise ConfigError(
            "predictions are for the ranks of one machine; weft plan --nodes describes several",
            code="forecast-over-nodes",
        )
    layout, cluster, profile = plan_as_candidate(plan, host, known, plan.max_num_batched_tokens)
    steps = tuple(
        activation_bytes(
            plan.shape,
            place,
            plan.max_num_batched_tokens,
            plan.max_num_seqs,
            profile,
            DTYPE_BYTES[plan.dtype],
            context=plan.max_model_len,
        )
        for place in plan.places
    )
    return Forecast(plan, layout, cluster, profile, footprint(plan.shape, layout, cluster, profile), steps)


def step_token_budget(plan: Plan, host: Host, known: Speeds) -> TokenBudget:
    """The token budget that `planner.work.batch` chooses for a plan. Raises as `forecast_plan`."""
    layout, cluster, profile = plan_as_candidate(plan, host, known, None)
    length = Workload(max_model_len=plan.max_model_len if plan.max_model_len_given else None)
    groups = footprint(plan.shape, layout, cluster, profile, length).replicas
    memory = min(groups, key=lambda group: group.batched_tokens)
    return TokenBudget(memory.batched_tokens, memory.batched_reason)


def plan_as_candidate(
    plan: Plan, host: Host, known: Speeds, batched_tokens: int | None
) -> tuple[DeploymentLayout, Cluster, EngineProfile]:
    """A plan in the form of a search candidate: its layout, the devices of its ranks, and our engine's constants."""
    on_cpu = plan.on_cpu
    kv_dtype = OF_DTYPE[plan.dtype] if plan.kv_cache_dtype == "auto" else plan.kv_cache_dtype
    precision = precision_of(plan.shape, plan.quantization, plan.schemes, plan.dtype)
    cluster, seats = _rank_devices(plan, host, known)
    layout = DeploymentLayout(
        parallelism=msgspec.structs.replace(plan.parallelism, devices=seats),
        precision=precision,
        kv_dtype=kv_dtype,
        places=plan.places,
    )
    shares = set() if on_cpu else set(plan.gpu_memory_utilization)
    profile = engine_profile(
        Question(
            model=plan.model,
            shape=plan.shape,
            cluster=cluster,
            engine="weft",
            precisions=(precision,),
            kv_dtype=kv_dtype,
            # Differing shares are limits, or follow from one request that has to fit: the same rule gives them again.
            gpu_memory_utilization=shares.pop() if len(shares) == 1 else None,
            **limits_of(plan),
            max_num_batched_tokens=batched_tokens,
            speculation=plan.speculation,
        )
    )
    return layout, cluster, profile


def _rank_devices(plan: Plan, host: Host, known: Speeds) -> tuple[Cluster, tuple[int, ...]]:
    """A cluster with one device per rank of the plan, and the number of each rank's device. Ranks on a CPU that is used
    with GPUs have the same one."""
    ranks = range(len(plan.devices))
    if plan.on_cpu:
        machine = host_cluster(msgspec.structs.replace(host, gpus=(), pairs=()), known)
        return split_gpus(capped(machine, plan, dict.fromkeys(ranks, 0)), [0] * len(ranks)), tuple(ranks)
    numbers = {rank: plan.devices[rank].index for rank in ranks if plan.devices[rank].kind == "cuda"}
    machine = host_cluster(host, known)
    machine = add_cpu(machine, host, known) if plan.uses_cpu else machine
    cluster = split_gpus(capped(machine, plan, numbers), list(numbers.values()))
    if machine.cpu is not None:
        cpu = msgspec.structs.replace(machine.cpu, limit_bytes=plan.max_memory.get("cpu"))
        cluster = msgspec.structs.replace(cluster, cpu=cpu)
    order = list(numbers)
    return cluster, tuple(order.index(rank) if rank in numbers else len(order) for rank in ranks)


def capped(cluster: Cluster, plan: Plan, devices: Mapping[int, int]) -> Cluster:
    """The cluster with no more of each device than the user leaves to its ranks, by --max-memory or by their shares."""
    gpus = list(cluster.gpus)
    for rank, device in devices.items():
        gpu, limit = gpus[device], plan.max_memory.get(plan.devices[rank].name)
        if limit is None and len(set(plan.gpu_memory_utilization)) > 1:
            share = plan.gpu_memory_utilization[rank]
            limit = (
                int(gpu.memory_bytes * share) - gpu.held_bytes
                if share < DEFAULT_CONFIG.gpu_memory_utilization[0]
                else None
            )
        gpus[device] = msgspec.structs.replace(gpu, limit_bytes=limit)
    return cluster.with_gpus(gpus)


def split_gpus(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    """One device of one machine for each rank; ranks that share a device divide it evenly."""
    (node,) = cluster.nodes
    sharing = Counter(devices)
    gpus = (
        rank_share(node.gpus[number], sharing[number]) if sharing[number] > 1 else node.gpus[number]
        for number in devices
    )
    return Cluster((Node(tuple(gpus), node.link),), cluster.network_Bps)


# --- compared with measurements ---


def start_report(expected: Forecast, ranks: Sequence[Capacity], num_blocks: int) -> str:
    """Once the engine is ready: its memory, and the time in which the weights were loaded."""
    plan = expected.plan
    tokens = plan.data_parallel * plan.kv_layout.tokens(num_blocks, plan.max_model_len)
    parts = (
        ("of weights", sum(rank.weight_bytes for rank in ranks), expected.weight_bytes, format_bytes),
        ("for a step", max(rank.activation_bytes for rank in ranks), max(expected.step_bytes), format_bytes),
        ("tokens of KV", tokens, expected.kv_tokens, "{:,}".format),
    )
    figures = [f"{show(real)} {what}{compare_line(real, planned, show)}" for what, real, planned, show in parts]
    far = any(far_off(expected, real, planned) for _, real, planned, _ in parts)
    return f"memory: {', '.join(figures)}; loaded in {max(rank.load_s for rank in ranks):.1f} s{hint(far)}"


def request_report(expected: Forecast, *, input_len: int, output_len: int, ttft_s: float, tok_s: float) -> str:
    """After a request that ran alone; `tok_s` are its tokens per second after the first token."""
    request = f"one request of {input_len:,} + {output_len:,} tokens: the first token after"
    first, following = milliseconds(ttft_s), f"{rate(tok_s)} tokens/s"
    if not expected.tells_speed:
        return f"{request} {first}, then {following}{SPECULATIVE}"
    speed = expected.speed(input_len, output_len)
    far = far_off(expected, ttft_s, speed.ttft_s) or far_off(expected, tok_s, speed.single_tok_s)
    first += compare_line(ttft_s, speed.ttft_s, milliseconds)
    following += compare_line(tok_s, speed.single_tok_s, rate)
    return f"{request} {first}, then {following}{hint(far)}"


def load_report(
    expected: Forecast, *, requests: int, input_len: float, output_len: float, concurrency: float, tok_s: float
) -> str:
    """After many requests, of which `concurrency` ran at once on average; `tok_s` are tokens per second of all."""
    report = f"{requests:,} requests, {concurrency:.0f} at once, of {input_len:,.0f} + {output_len:,.0f} tokens: "
    report += f"{rate(tok_s)} tokens/s in all"
    if not expected.tells_speed:
        return report + SPECULATIVE
    speed = expected.speed(input_len, output_len, concurrency)
    planned = speed.concurrency / speed.tpot_s
    return f"{report}{compare_line(tok_s, planned, rate)}{hint(far_off(expected, tok_s, planned))}"


def predicted_json(expected: Forecast, input_len: int, output_len: int) -> dict[str, Any]:
    """Predictions for one request of these lengths: bytes of all ranks, seconds, tokens per second; None if unknown."""
    speed = expected.speed(input_len, output_len)
    return {
        "weight_bytes": expected.weight_bytes,
        "kv_tokens": expected.kv_tokens,
        "ttft_s": round(speed.ttft_s, 4) if expected.tells_speed else None,
        "decode_tok_s": round(speed.single_tok_s, 2) if expected.tells_speed else None,
        "error_band": speed.error_band,
    }


def compare_line(real: float, planned: float, show: Callable[[Any], str]) -> str:
    """ " (predicted 1,234, ratio 0.97)"; empty without a prediction."""
    return f" (predicted {show(planned)}, ratio {real / planned:.2f})" if planned > 0 else ""


def far_off(expected: Forecast, real: float, planned: float) -> bool:
    """Return True if a measured figure lies outside the error band of its prediction."""
    band = expected.profile.error_for(expected.plan.shape, expected.layout.precision).value
    return planned > 0 and not 1 - band <= real / planned <= 1 + band


def hint(far: bool) -> str:
    return f"; {HINT}" if far else ""


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
