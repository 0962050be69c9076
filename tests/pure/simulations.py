"""Small deployments and loads for the tests of simulate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.checkpoint.architectures.kv import kv_layout
from weft.checkpoint.names.catalogue import find
from weft.engine.core.view import SchedulerSettings
from weft.fleet.upstreams.policy import LeastConnections
from weft.machine.hardware.cluster import parse_gpus
from weft.plan.parallelism import Parallelism
from weft.planner.deployment import deploy
from weft.planner.profiles import load_profile
from weft.planner.speed.steps import StepPredictor
from weft.planner.work.replica import build_replicas
from weft.study.simulate.lengths import FixedLength, Lengths, UniformLength
from weft.study.simulate.load import RequestDistribution, RequestSource, SimulatedLoad
from weft.study.simulate.objective import LatencyObjective
from weft.study.simulate.replica import ReplicaSpec
from weft.study.simulate.report import Report, create_report
from weft.study.simulate.simulated_request import SimulatedRequest
from weft.study.simulate.simulation import SimulationResult, simulate


def steps(model: str = "Llama-3.1-8B", gpus: str = "1xH100", stages: int = 1, engine: str = "vllm") -> StepPredictor:
    """The costs of one replica."""
    shape, cluster = find(model).shape, parse_gpus(gpus)
    each, rest = divmod(len(shape.layers), stages)
    layout = deploy(
        shape,
        Parallelism(
            len(cluster.gpus) // stages,
            pipeline_split=tuple(each + (stage < rest) for stage in range(stages)),
            devices=tuple(range(len(cluster.gpus))),
        ),
        precision="bf16",
        kv_dtype="bf16",
    )
    return StepPredictor(build_replicas(shape, layout, cluster, load_profile(engine))[0])


STEPS = steps()
PROMPT, ANSWER = FixedLength(512), UniformLength(16, 240)


def spec(costs: StepPredictor = STEPS, **limits: Any) -> ReplicaSpec:
    """A replica with room for much, unless it is said."""
    usual: dict[str, Any] = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "max_num_queued": 1000,
        "max_model_len": 8192,
        "stages": 1,
        "policy": "fcfs",
    }
    blocks = limits.pop("num_blocks", 20_000)
    kv = limits.pop("kv", kv_layout(find("Llama-3.1-8B").shape, block_size=16, chunk=2048))
    settings = SchedulerSettings(**{**usual, **limits})
    return ReplicaSpec(predictors=(costs,), kv=kv, num_blocks=blocks, scheduler=settings)


def load(input_len: Lengths = PROMPT, output_len: Lengths = ANSWER, **said: Any) -> SimulatedLoad:
    """Requests of these lengths."""
    drawn = {name: said.pop(name) for name in ("prefixes", "prefix_len", "rows") if name in said}
    return SimulatedLoad(
        distribution=RequestDistribution(input_len=input_len, output_len=output_len, most=8192, **drawn), **said
    )


class Counted:
    """A source that counts what it gives from `begin` to `end`."""

    def __init__(self, source: RequestSource, begin: float, end: float) -> None:
        self.source, self.begin, self.end, self.count = source, begin, end, 0

    @property
    def next_s(self) -> float:
        return self.source.next_s

    def take_request(self) -> SimulatedRequest:
        self.count += self.begin <= self.next_s < self.end
        return self.source.take_request()

    def request_ended(self, now: float, *, refused: bool = False) -> None:
        self.source.request_ended(now, refused=refused)


def run(
    specs: list[ReplicaSpec], asked: SimulatedLoad, *, warmup_s: float = 10.0, end_s: float = 120.0, **options: Any
) -> SimulationResult:
    """The specs are replicas behind least connections, and there may be a `unsimulated` of others."""
    source: RequestSource = asked.source()
    wrap: Callable[[RequestSource], RequestSource] = options.pop("wrap", lambda it: it)
    options.setdefault("prefix_caching", asked.shares_prefixes)
    return simulate(specs, wrap(source), LeastConnections(), warmup_s=warmup_s, end_s=end_s, **options)


def told(
    specs: list[ReplicaSpec], asked: SimulatedLoad, objective: LatencyObjective | None = None, **options: Any
) -> Report:
    """A run's report."""
    whole = len(specs) + options.get("unsimulated", 0)
    return create_report(
        run(specs, asked, **options),
        replicas=whole,
        blocks=specs[0].num_blocks,
        gpus=whole,
        price=None,
        rate=asked.offered,
        users=asked.users,
        objective=objective,
    )
