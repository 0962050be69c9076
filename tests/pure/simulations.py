"""Small deployments and loads for the tests of simulate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.formats.catalogue import find
from weft.gateway.policy import LeastConnections
from weft.hardware.cluster import parse_gpus
from weft.planner.deployment import deploy
from weft.planner.profiles import load_profile
from weft.planner.replica import build_replicas
from weft.planner.steps import StepPredictor
from weft.simulate.ask import Ask
from weft.simulate.lengths import Even, Fixed, Lengths
from weft.simulate.load import Drawn, Load, Source
from weft.simulate.objective import Objective
from weft.simulate.replica import Spec
from weft.simulate.report import Report, report
from weft.simulate.system import Run, simulate


def steps(model: str = "Llama-3.1-8B", gpus: str = "1xH100", stages: int = 1, engine: str = "vllm") -> StepPredictor:
    """The costs of one replica."""
    shape, cluster = find(model).shape, parse_gpus(gpus)
    each, rest = divmod(shape.layers, stages)
    layout = deploy(
        shape,
        tensor_weights=[1.0] * (len(cluster.gpus) // stages),
        stage_layers=[each + (stage < rest) for stage in range(stages)],
        gpus=range(len(cluster.gpus)),
        precision="bf16",
        kv_dtype="bf16",
    )
    return StepPredictor(build_replicas(shape, layout, cluster, load_profile(engine))[0])


STEPS = steps()
PROMPT, ANSWER = Fixed(512), Even(16, 240)


def spec(costs: StepPredictor = STEPS, **limits: Any) -> Spec:
    """A replica with room for much, unless it is said."""
    usual: dict[str, Any] = {
        "num_blocks": 20_000,
        "block_size": 16,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "max_num_queued": 1000,
        "max_model_len": 8192,
        "stages": 1,
    }
    return Spec(steps=costs, **{**usual, **limits})


def load(input_len: Lengths = PROMPT, output_len: Lengths = ANSWER, **said: Any) -> Load:
    """Requests of these lengths."""
    drawn = {name: said.pop(name) for name in ("prefixes", "prefix_len", "rows") if name in said}
    return Load(drawn=Drawn(input_len=input_len, output_len=output_len, most=8192, **drawn), **said)


class Counted:
    """A source that counts what it gives from `begin` to `end`."""

    def __init__(self, source: Source, begin: float, end: float) -> None:
        self.source, self.begin, self.end, self.count = source, begin, end, 0

    @property
    def next_s(self) -> float:
        return self.source.next_s

    def take(self) -> Ask:
        self.count += self.begin <= self.next_s < self.end
        return self.source.take()

    def ended(self, now: float, *, refused: bool = False) -> None:
        self.source.ended(now, refused=refused)


def run(specs: list[Spec], asked: Load, *, warmup_s: float = 10.0, end_s: float = 120.0, **options: Any) -> Run:
    """The specs are replicas behind least connections, and there may be a `rest` of others."""
    source: Source = asked.source()
    wrap: Callable[[Source], Source] = options.pop("wrap", lambda it: it)
    options.setdefault("prefix_caching", asked.shares)
    return simulate(specs, wrap(source), LeastConnections(), warmup_s=warmup_s, end_s=end_s, **options)


def told(specs: list[Spec], asked: Load, objective: Objective | None = None, **options: Any) -> Report:
    """A run's report."""
    whole = len(specs) + options.get("rest", 0)
    return report(
        run(specs, asked, **options),
        replicas=whole,
        blocks=specs[0].num_blocks,
        gpus=whole,
        price=None,
        rate=asked.offered,
        users=asked.users,
        objective=objective,
    )
